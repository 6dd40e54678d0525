"""Whole trainings of a small model: what they compute, and what they leave in the run folder."""

import json
import re
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from small_runs import assert_same_bits, forget, losses, metrics, opened, tensors, train_on
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from howdah.base.errors import UserError
from howdah.checkpoint.folders import best_step, mark_best, steps
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank
from howdah.train.finished_run import open_run
from howdah.train.loop import train
from howdah.train.same_text import require_same_text

# What torchtitan's users read its log with.
TORCHTITAN = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>[\d.]+)\s+grad_norm:\s*(?P<grad_norm>[\d.]+)\s+"
    r"memory:\s*(?P<memory>[\d.]+)GiB\((?P<share>[\d.]+)%\)\s+tps:\s*(?P<tps>[\d,]+)\s+"
    r"tflops:\s*(?P<tflops>[\d.,]+)\s+mfu:\s*(?P<mfu>[\d.]+)%"
)


def relative(first, second):
    assert first.keys() == second.keys() and first
    return max(abs(first[step] - second[step]) / first[step] for step in first)


def test_the_same_run_twice_gives_the_same_bits(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "layout=dp2"), make_job("b", "layout=dp2"))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))
    assert losses(tmp_path / "a")[20] < 0.9 * losses(tmp_path / "a")[1]  # it learns, too


def test_all_of_a_short_text_is_evaluated_once_after_the_last_step(make_job, tmp_path):
    """What is held out was less than a part of it is, and the last evaluation was made twice."""
    often = ("train.evaluate_every=2", "train.evaluate_samples=100000", "train.steps=2")
    train(make_job("a", *often), SingleRank())
    log = (tmp_path / "a" / "log.txt").read_text()
    assert log.count("held-out at step 2, all of it") == log.count("held-out at step") == 1
    assert [*metrics(tmp_path / "a", "held_out_all")] == [2]


def test_a_run_that_is_over_says_so(workers, make_job, tmp_path):
    job = make_job("a", "layout=dp2", "train.steps=2")
    train_on(workers, job)
    assert "steps are done" not in (tmp_path / "a" / "log.txt").read_text()
    train_on(workers, job)
    told = (tmp_path / "a" / "log.txt").read_text()
    assert "all 2 steps are done; to train on, raise train.steps" in told


def test_another_seed_gives_other_bits(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "train.steps=1"), make_job("b", "train.steps=1", "seed=2"))
    assert losses(tmp_path / "a") != losses(tmp_path / "b")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        *("single x3", "dp2 x2"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("single x1", "dp2 x1", "dp4 x2")),
    ],
)
def test_every_layout_has_the_losses_of_one_process(workers, make_job, tmp_path, layout):
    """At dp4 x2 two of eight rows are padding, which must count for nothing."""
    micro = {"dp4 x2": 1, "dp2 x2": 2}.get(layout)
    job = make_job("b", f"layout={layout}", *([f"batch.micro_batch={micro}"] if micro else []))
    train_on(workers, make_job("a"))
    train_on(workers, job)
    assert str(job.layout) == layout
    assert relative(losses(tmp_path / "a"), losses(tmp_path / "b")) < 1e-6
    assert opened(tmp_path / "b", 20).samples == 6 * 20


def test_the_run_folder_tells_the_run(workers, make_job, tmp_path):
    (outcome,) = train_on(workers, make_job("a", "layout=dp2", "train.evaluate_every=8"))
    assert (outcome.step, outcome.signal) == (20, 0)
    folder = tmp_path / "a"
    trained, held_out = metrics(folder), metrics(folder, "held_out")
    assert list(trained) == list(range(1, 21)) and list(held_out) == [8, 16, 20]
    assert all(row["bits_per_byte"] > 0 for row in held_out.values())
    assert trained[3]["rate"] == pytest.approx(3e-3)  # the warm-up reaches the peak
    assert trained[5]["sent"] > 0 and trained[5]["tps"] > 0
    epochs = [row["epoch"] for row in trained.values()]
    assert epochs[19] == pytest.approx(20 * epochs[0]) and epochs[0] > 0
    assert trained[1]["left"] > trained[19]["left"] > trained[20]["left"] == 0

    said = (folder / "log.txt").read_text().splitlines()
    lines = [line for line in said if line.startswith("step:")]
    assert len(lines) == 20 and lines[19].endswith(f"epoch: {epochs[19]:.2f}  left: 0:00:00")
    (length,) = [line for line in said if line.startswith("length")]
    assert length.startswith(f"length      20 steps, 3,840 tokens: {epochs[19]:.3g} epochs of ")
    assert any(line.startswith("sent") and line.endswith("equal") for line in said)
    for step, line in enumerate(lines, 1):
        found = TORCHTITAN.match(line)
        assert found, line
        assert int(found["step"]) == step
        assert float(found["loss"]) == pytest.approx(trained[step]["loss"], abs=1e-5)
        assert float(found["grad_norm"]) == pytest.approx(trained[step]["norm"], abs=1e-4)

    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    drawn = {event.step: event.value for event in board.Scalars("loss_metrics/global_avg_loss")}
    assert drawn == pytest.approx({step: row["loss"] for step, row in trained.items()}, rel=1e-6)
    # at the end once on the samples of the others, to be weighed with them, and once on all
    assert [event.step for event in board.Scalars("held_out/loss")] == [8, 16, 20]
    assert [event.step for event in board.Scalars("held_out_all/loss")] == [20]
    assert list(metrics(folder, "held_out_all")) == [20]


def test_steps_that_are_done_again_stand_once(workers, make_job, tmp_path):
    """A run that dies after step 20 was measured, but before it was saved, goes on from 10."""
    train_on(workers, make_job("a"))
    forget(tmp_path / "a", 20)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')  # cut off in the middle of a row
    train_on(workers, make_job("a"))
    rows = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    trained = [row["step"] for row in map(json.loads, rows) if row["kind"] == "train"]
    assert trained == list(range(1, 21))


def test_old_checkpoints_go_and_the_best_stays(workers, make_job, tmp_path):
    """It learns until step 6; then a rate far too high spoils it."""
    often = [
        "train.evaluate_every=2",
        "train.evaluate_samples=0",
        "train.save_every=2",
        "train.keep_last=1",
    ]
    train_on(workers, make_job("a", *often, "train.steps=6"))
    assert best_step(tmp_path / "a" / "checkpoints") == 6
    train_on(workers, make_job("a", *often, "train.steps=12", "method.lr.peak=100"))
    log = (tmp_path / "a" / "log.txt").read_text()
    assert [log.count(f"held-out at step {n}, all of it") for n in range(2, 13, 2)] == [1] * 6
    held_out = {step: row["loss"] for step, row in metrics(tmp_path / "a", "held_out_all").items()}
    assert held_out[6] < held_out[4] < held_out[2] and held_out[6] < held_out[8]
    assert best_step(tmp_path / "a" / "checkpoints") == 6
    assert steps(tmp_path / "a" / "checkpoints") == [6, 12]
    assert opened(tmp_path / "a", 12).meta["best_loss"] == held_out[6]


def test_one_checkpoint_is_kept_when_asked(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "layout=dp2", "train.save_every=3", "train.keep_last=1"))
    assert steps(tmp_path / "a" / "checkpoints") == [20]


def test_a_run_starts_from_an_exported_folder(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "train.export=true", "train.steps=5"))
    # A rate this small moves no float32 weight, and nothing decays: what is saved is the start.
    still = ["method.lr.peak=1e-30", "method.optimizer.weight_decay=0", "train.steps=1", "seed=7"]
    train_on(workers, make_job("b", f"init_from={tmp_path / 'a' / 'export'}", *still))
    first, second = tensors(tmp_path / "a", 5), tensors(tmp_path / "b", 1)
    weights = [name for name in first if name[0] == "weight"]
    assert weights
    for name in weights:
        assert torch.equal(first[name], second[name]), name


def test_bf16_keeps_float32_masters_and_moments(workers, make_job, tmp_path):
    train_on(workers, make_job("a", "layout=dp2", "method.precision=bf16", "train.steps=3"))
    found = tensors(tmp_path / "a", 3)
    assert {kind for kind, _ in found} == {"weight", "exp_avg", "exp_avg_sq"}
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    weight = found["weight", "layers.0.attention.q.weight"]
    assert not torch.equal(weight, weight.bfloat16().float())  # not merely cast back


def test_a_run_that_diverges_says_so_and_saves_nothing_of_it(make_job, tmp_path):
    """In this process: a rank that fails would take its workers along."""
    job = make_job("a", "method.lr.peak=1e6", "method.lr.warmup_steps=0", "train.save_every=1")
    with pytest.raises(UserError, match=r"training diverged: the gradient norm of step ") as told:
        train(job, SingleRank())
    step = int(re.search(r"of step (\d+) is", str(told.value))[1])
    assert max(losses(tmp_path / "a")) == step - 1
    assert all(saved < step for saved in steps(tmp_path / "a" / "checkpoints"))


def test_the_best_is_opened_when_asked(workers, make_job, tmp_path):
    train_on(workers, make_job("a"))
    mark_best(tmp_path / "a" / "checkpoints", 10)
    assert open_run(tmp_path / "a", say=print).checkpoint.step == 20
    assert open_run(tmp_path / "a", say=print, best=True).checkpoint.step == 10


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at tensors in ways that warn
def test_compiled_blocks_compute_the_same(make_job, tmp_path):
    train(make_job("a", "train.steps=4"), SingleRank())
    train(make_job("b", "train.steps=4", "compile=true"), SingleRank())
    assert relative(losses(tmp_path / "a"), losses(tmp_path / "b")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2", "dp2 zero3 recompute=selective"])
def test_compiled_islands_compute_the_same_on_layouts_with_own_operations(
    workers, make_job, tmp_path, layout
):
    for name, compiles in (("a", "false"), ("b", "true")):
        settings = f"compile={compiles}", f"layout={layout}", "method.dropout=0.1", "train.steps=3"
        train_on(workers, make_job(name, *settings))
    assert relative(losses(tmp_path / "a"), losses(tmp_path / "b")) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2 ep2", "cp2 ep2"])
def test_compiled_runs_with_experts_compute_the_same(workers, make_job, tmp_path, layout):
    """Of replicas the dense block is compiled whole, and everywhere the islands of both."""
    experts = [
        f"model.experts.{one}" for one in ("count=5", "top_k=2", "ffn_size=11", "first_dense=1")
    ]
    for name, compiles in (("a", "false"), ("b", "true")):
        settings = f"compile={compiles}", f"layout={layout}", "train.steps=3", *experts
        train_on(workers, make_job(name, *settings))
    assert relative(losses(tmp_path / "a"), losses(tmp_path / "b")) < 1e-5


def test_a_save_between_two_log_lines_loses_no_step(workers, make_job, tmp_path):
    """The stretch under way was begun anew after a save, and its steps went uncounted: bytes
    predicted for the counted steps then differed from the bytes sent in all of them.
    """
    often = ["train.log_every=4", "train.save_every=3", "train.evaluate_every=3", "train.steps=8"]
    train_on(workers, make_job("a", "layout=dp2", *often))
    (sent,) = (
        line
        for line in (tmp_path / "a" / "log.txt").read_text().splitlines()
        if line.startswith("sent")
    )
    assert "in 8 steps" in sent and sent.endswith(": equal"), sent


class Crowd(SingleRank):
    """As many ranks, each of which says what this one says, or something else."""

    size = 100

    def __init__(self, other=None):
        self._other = other

    def all_gather(self, out, x, counts):
        heard = out.view(self.size, -1)
        heard[:] = x
        if self._other is not None:
            heard[-1] = self._other
        return 0


@pytest.mark.parametrize("checksum", [0, 1, (1 << 32) - 1])
def test_a_hundred_ranks_with_the_same_text_are_told_so(checksum):
    """Sums of 48 bits of a hash were rounded from some 40 ranks on, and equal text was refused."""
    corpus = SimpleNamespace(fingerprint="f", end=0, checksums=(checksum, checksum))
    for other in (None, 5.0):
        world = Group(Crowd(other), axis="dp", counters=Counters())
        with (
            patch("howdah.train.same_text.difference", lambda *_: "rank 99 has other text"),
            nullcontext() if other is None else pytest.raises(UserError, match="different text"),
        ):
            require_same_text(SimpleNamespace(world=world), corpus, None)
        world.close()
