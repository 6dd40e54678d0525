"""Functions of the user's own in a training: on every layout, with a loss, metrics and a stop."""

import sys
from dataclasses import replace
from signal import SIGINT

import pytest
import torch
from small_runs import assert_same_bits, losses, metrics, tensors, train_on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from howdah.base.errors import UserError
from howdah.comm.spawn import WorkerError
from howdah.comm.transport import SingleRank
from howdah.train.inputs import code_problems
from howdah.train.loop import train

CODE = """
import sys
import torch.nn.functional as F
from howdah import full_parameter

def plain(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")

def focal(logits, labels):
    loss = F.cross_entropy(logits, labels, reduction="none")
    return (1 - (-loss).exp()) * loss

def watch(now):
    now.log(ratio=now.norm / now.loss, ranks=now.sum(1), loss=now.loss)
    now.log(size=full_parameter(now.model, "norm.weight").norm())

def stop_on_the_last_rank(now):
    if now.rank == now.world - 1 and now.step == 3:
        now.stop("three are enough")

class Evaluations:
    def __init__(self):
        self.seen = []
    def __call__(self, now):
        self.seen.append(now.held_out)
        if now.held_out:
            now.log(of=now.held_out[0], count=len(self.seen))

def fails(now):
    raise KeyError("what")

def leaves(now):
    sys.exit(3)

class Own(BaseException):
    def __str__(self):
        raise ValueError

def raises(now):
    raise Own

def interrupts(now):
    if now.step == 2:
        raise KeyboardInterrupt

def no_number(now):
    now.log(bad=float("nan"))
"""
FLOAT64 = ("method.precision=float64", "train.steps=4", "train.save_every=0")


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine_of_callbacks.py").write_text(CODE)
    yield str(tmp_path / "mine_of_callbacks.py")
    sys.modules.pop("mine_of_callbacks", None)


def apart(first, second):
    """The largest relative distance of two tensors of one name."""
    assert first.keys() == second.keys()
    sizes = {name: max(float(one.norm()), 1e-6) for name, one in first.items()}
    return max(float((first[name] - second[name]).norm()) / sizes[name] for name in first)


@pytest.mark.parametrize(
    "layouts",
    [
        ["single", "dp2 zero3", "pp2"],
        pytest.param(["dp2", "dp3 zero2", "cp2", "pp2 dp2 zero1 zb-h1"], marks=pytest.mark.slow),
    ],
)
def test_an_own_loss_equals_the_built_in_one_on_every_layout(
    workers, make_job, tmp_path, mine, layouts
):
    train_on(workers, make_job("built-in", *FLOAT64))
    expected = tensors(tmp_path / "built-in", 4)
    for number, layout in enumerate(layouts):
        own = f"method.loss={mine}:plain"
        train_on(workers, make_job(f"{number}", *FLOAT64, own, f"layout={layout}"))
        assert apart(tensors(tmp_path / f"{number}", 4), expected) < 1e-10, layout


def test_another_loss_is_the_same_on_two_layouts(workers, make_job, tmp_path, mine):
    own = (*FLOAT64, f"method.loss={mine}:focal")
    train_on(workers, make_job("one", *own))
    train_on(workers, make_job("two", *own, "layout=dp2 zero3"))
    assert apart(tensors(tmp_path / "one", 4), tensors(tmp_path / "two", 4)) < 1e-10
    train_on(workers, make_job("plain", *FLOAT64))
    assert losses(tmp_path / "one")[1] < 0.999 * losses(tmp_path / "plain")[1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 zero1", "pp2"])
def test_callbacks_log_into_every_file_and_change_nothing(
    workers, make_job, tmp_path, mine, layout
):
    """The bytes that were predicted are still those that were counted."""
    named = f'train.callbacks=["{mine}:watch", "{mine}:Evaluations"]'
    every = ("train.evaluate_every=2", "train.steps=4", f"layout={layout}")
    train_on(workers, make_job("a", *every), make_job("b", *every, named))
    assert_same_bits(tensors(tmp_path / "a", 4), tensors(tmp_path / "b", 4))
    rows = metrics(tmp_path / "b", kind="own")
    assert [*rows] == [1, 2, 3, 4] and rows[4]["ranks"] == 2 and rows[4]["size"] > 0
    assert {step: row["loss"] for step, row in rows.items()} == losses(tmp_path / "b")
    assert (rows[3]["of"], rows[3]["count"]) == (2, 3) and "of" not in rows[2]
    log = (tmp_path / "b" / "log.txt").read_text()
    assert "own         step:  4  ratio: " in log and ": equal" in log
    board = EventAccumulator(str(tmp_path / "b" / "tensorboard")).Reload()
    assert [row.step for row in board.Scalars("own/ratio")] == [1, 2, 3, 4]


def test_all_ranks_stop_after_the_same_step_and_the_run_ends_well(
    workers, make_job, tmp_path, mine
):
    """One rank asks; the run is saved, evaluated and exported, and can go on."""
    stop = f"train.callbacks={mine}:stop_on_the_last_rank"
    how = ("layout=dp2", "train.steps=9", "train.log_every=5", "train.export=true")
    outcome = train_on(workers, make_job("a", *how, stop))[0]
    assert (outcome.step, outcome.signal) == (4, 0)
    log = (tmp_path / "a" / "log.txt").read_text()
    assert "stopped by a callback; to train on: howdah train" in log and ": equal" in log
    of_rank_1 = "mine_of_callbacks.py:stop_on_the_last_rank: three are enough (rank 1)"
    assert "stop        after step 3, by " in log and of_rank_1 in log
    assert [*metrics(tmp_path / "a", "held_out_all")] == [4]
    assert (tmp_path / "a" / "export" / "config.json").is_file()
    train_on(workers, make_job("a", *how, "train.callbacks=[]"), make_job("b", *how))
    assert_same_bits(tensors(tmp_path / "a", 9), tensors(tmp_path / "b", 9))


def test_an_interrupt_inside_a_callback_is_one(make_job, tmp_path, mine):
    """The run is saved, as at Ctrl-C, and not told to have failed."""
    job = make_job("a", f"train.callbacks={mine}:interrupts", "train.steps=9")
    outcome = train(job, SingleRank())
    assert (outcome.step, outcome.signal) == (3, SIGINT)
    assert "stopped after step 3 of 9 and saved; go on" in (tmp_path / "a" / "log.txt").read_text()


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", r"mine_of_callbacks.py:fails at step 1 failed in .*, line \d+: KeyError: 'what'"),
        ("leaves", r"mine_of_callbacks.py:leaves at step 1 failed in .*, line \d+: SystemExit: 3"),
        ("raises", r"mine_of_callbacks.py:raises at step 1 failed in .*: Own: it cannot be shown"),
        ("no_number", "a callback logs bad as nan; give a finite number"),
    ],
)
def test_a_callback_that_fails_is_one_sentence(workers, make_job, mine, name, said):
    with pytest.raises(WorkerError, match=said) as caught:
        train_on(workers, make_job("a", f"train.callbacks={mine}:{name}"))
    assert caught.value.kind == "mistake"


def test_a_loss_that_is_declined_says_why(make_job):
    job = make_job("a")
    method = replace(job.method, loss="DPO")
    (told,) = code_problems(job.train, method, ranks=1)
    assert told.startswith("method.loss 'DPO': it is not there yet: it needs pairs of answers")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("layout=tp2",), "method.loss needs each token's logits of the whole vocabulary, and tp2"),
        (("method.z_loss=0.1",), "are terms of cross-entropy, and method.loss takes its place"),
    ],
)
def test_what_an_own_loss_cannot_be_combined_with(make_job, mine, keys, said):
    with pytest.raises(UserError, match=said):
        make_job("a", f"method.loss={mine}:plain", *keys)


def test_numbers_of_torch_and_numpy_can_be_logged(workers, make_job):
    from howdah.train.callbacks import Moment

    now = Moment(1, 2, 3.0, 4.0, 5.0, 6, 7.0, None, 0, 1, model=None)
    now.log(a=torch.tensor(2.5), b=torch.ones(2).numpy()[0], c=True)
    assert now.logged == {"a": 2.5, "b": 1.0, "c": 1.0}
    with pytest.raises(UserError, match="a callback logs d as "):
        now.log(d=torch.ones(2))
    for name in ("step", "kind", "two\nlines"):  # a row has a step already, by which it is sorted
        with pytest.raises(UserError, match="a callback logs a value named"):
            now.log(**{name: 1.0})
