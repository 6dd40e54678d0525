"""Runs whose host is ahead, as beside a GPU: numbers told one step late, counts exchanged before.

The same code runs on the CPU, where both delays are none; here they are set to one.
"""

import os
import signal
from contextlib import ExitStack
from unittest.mock import patch

import pytest
from small_runs import assert_same_bits, metrics, tensors, train_on

from howdah.base.errors import UserError
from howdah.checkpoint.folders import steps
from howdah.comm.transport import SingleRank
from howdah.train import feed, loop
from howdah.train.tell import Told

TOLD = ("step", "loss", "norm", "rate", "epoch")


def train_ahead(transport, job, asked=None):
    """Trains with a host that is one step ahead. Rank 0 gets a signal before step `asked`. Returns
    the last step, and for each step the number of steps that were launched before it was told.
    """
    launched, told, step_of, values = [], {}, loop.train_step, Told.values

    def launch(context, batch, *, step, **rest):
        if step == asked and transport.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        assert batch.counts is not None  # exchanged before the step
        result = step_of(context, batch, step=step, **rest)
        launched.append(result.told)
        return result

    def read(self):
        told.setdefault(launched.index(self) + 1, len(launched))
        return values(self)

    with ExitStack() as stack:
        for where, name, new in (
            (loop, "steps_late", lambda device: 1),
            (feed, "steps_late", lambda device: 1),
            (loop, "train_step", launch),
            (Told, "values", read),
        ):
            stack.enter_context(patch.object(where, name, new))
        return loop.train(job, transport).step, told


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 zero1", "pp2"])
def test_a_host_that_is_ahead_trains_the_same_model(workers, make_job, tmp_path, layout):
    words = [f"layout={layout}", "train.steps=7", "train.save_every=3", "train.evaluate_every=5"]
    train_on(workers, make_job("a", *words))
    for last, told in workers.run(train_ahead, make_job("b", *words), ranks=2):
        assert last == 7
        # one step late; before a save (3, 6, 7) and an evaluation (5) nothing is left untold
        assert told == {1: 2, 2: 3, 3: 3, 4: 5, 5: 5, 6: 6, 7: 7}
    for kind in ("train", "held_out", "held_out_all"):
        rows = [metrics(tmp_path / name, kind) for name in "ab"]
        first, second = (
            [{k: row.get(k) for k in TOLD} for row in by_step.values()] for by_step in rows
        )
        assert first == second
    first, second = ([row["sent"] for row in metrics(tmp_path / name).values()] for name in "ab")
    for one, other in zip(first, second, strict=True):
        assert abs(one - other) <= 4 * 2 * 8  # the counts of a step are sent in another
    for step in (6, 7):
        assert_same_bits(tensors(tmp_path / "a", step), tensors(tmp_path / "b", step))


def test_a_request_to_stop_is_heard_one_step_later(workers, make_job, tmp_path):
    """All ranks have exchanged the numbers of the next step when it comes."""
    job = make_job("a", "layout=dp2", "train.save_every=0")
    ends = workers.run(train_ahead, job, 8, ranks=2)
    assert [last for last, _ in ends] == [11, 11]  # asked in step 9, told for step 11
    assert all(set(told) == set(range(1, 12)) for _, told in ends)  # before the save, too
    assert steps(tmp_path / "a" / "checkpoints") == [11]


def test_a_run_that_diverges_is_refused_and_not_saved(make_job, tmp_path):
    job = make_job("a", "train.save_every=1", "method.lr.peak=1e6", "method.lr.warmup_steps=0")
    with pytest.raises(UserError, match=r"training diverged: the gradient norm of step ") as error:
        train_ahead(SingleRank(), job)
    number = int(str(error.value).split(" step ")[1].split()[0])
    assert steps(tmp_path / "a" / "checkpoints")[-1] == number - 1
