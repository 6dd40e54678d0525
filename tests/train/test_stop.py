"""Stop requests: one rank is asked, all stop after the same step, and nothing is lost by it."""

import os
import signal
from unittest.mock import patch

import pytest
from small_runs import assert_same_bits, losses, tensors, train_on

from howdah.base.signals import Stopped
from howdah.checkpoint.folders import steps
from howdah.comm.spawn import Workers
from howdah.comm.transport import PeerLost
from howdah.train import loop
from howdah.train.loop import train


class Asked:
    """A transport whose process gets a signal at its n-th all-gather, or sum of scalars."""

    def __init__(self, transport, *, number, after):
        self._transport, self._number, self._left = transport, number, after

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def all_gather(self, out, x, counts):
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), self._number)
        return self._transport.all_gather(out, x, counts)


def train_and_ask(transport, job, asked, number):
    """For workers: trains, and the rank `asked` gets the signal after about 10 steps."""
    if transport.rank == asked:
        transport = Asked(transport, number=number, after=20)
    outcome = train(job, transport)
    return outcome.step, outcome.signal


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("asked", "number"), [(0, signal.SIGTERM), (2, signal.SIGINT)])
def test_all_ranks_stop_after_the_same_step(workers, make_job, tmp_path, asked, number):
    job = make_job("a", "layout=dp3", "train.save_every=0")
    ends = workers.run(train_and_ask, job, asked, number, ranks=3)
    (step,) = {end[0] for end in ends}
    assert 0 < step < 20
    assert ends[asked] == (step, number)
    assert {end[1] for end in ends} <= {number, signal.SIGTERM}
    assert steps(tmp_path / "a" / "checkpoints") == [step]

    train_on(workers, job, make_job("b", "layout=dp3", "train.save_every=0"))
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def train_and_ask_at(transport, job, asked, moment):
    """For workers: the rank `asked` gets SIGTERM when it reads the text, or when all is saved."""
    name = {"start": "prepare", "end": "finish"}[moment]
    before = getattr(loop, name)

    def hear(*arguments, **keywords):
        if transport.rank == asked:
            os.kill(os.getpid(), signal.SIGTERM)
        return before(*arguments, **keywords)

    with patch.object(loop, name, hear):
        try:
            return loop.train(job, transport).signal
        except Stopped as stopped:
            return f"stopped by {stopped.number}"
        except PeerLost:
            return "lost"


@pytest.mark.slow
@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_before_the_first_step_a_rank_leaves_at_once(make_job, tmp_path, asked):
    """The others miss it; the launcher tells them why."""
    job = make_job("a", "layout=dp2")
    with Workers(2) as two:
        ends = two.run(train_and_ask_at, job, asked, "start")
    assert (ends[asked], ends[1 - asked]) == (f"stopped by {signal.SIGTERM}", "lost")
    assert steps(tmp_path / "a" / "checkpoints") == []


def test_when_all_is_saved_a_rank_leaves_at_once(make_job, tmp_path):
    """Held-out text can take minutes: the likeliest moment for Ctrl-C."""
    job = make_job("a", "train.export=true")
    with Workers(1) as one:
        assert one.run(train_and_ask_at, job, 0, "end") == [signal.SIGTERM]
    assert steps(tmp_path / "a" / "checkpoints")[-1] == 20
    assert not (tmp_path / "a" / "export").exists()
    assert "stopped after the last step, which is saved" in (tmp_path / "a" / "log.txt").read_text()
