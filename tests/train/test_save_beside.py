"""Training goes on while a checkpoint is written; and a process that is killed meanwhile."""

import os
import signal
from threading import Event
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from small_runs import assert_same_bits, metrics, tensors, train_on

from howdah.checkpoint import safefile, save
from howdah.checkpoint.folders import draft_folder, rank_file, steps
from howdah.checkpoint.load import newest
from howdah.comm.transport import SingleRank
from howdah.plan.recording import Wires
from howdah.train import loop, room
from howdah.train.report import predicted_memory

GUARD = 120.0  # seconds, of a run that does not go on
WORDS = ["train.steps=12", "train.save_every=5", "train.keep_last=9", "method.dropout=0.1"]


def held_back(until, then=lambda: None):
    """Patches of a run: the thread that writes step 5 waits until step `until` is launched, and
    then calls `then` between two tensors of its file.
    """
    launched, seen = Event(), []
    step_of, write, put = loop.train_step, save.write_part, safefile._write_bytes

    def launch(context, batch, *, step, **rest):
        result = step_of(context, batch, step=step, **rest)
        if step + 1 == until:
            launched.set()
        return result

    def write_part(path, step, entries, **rest):
        if step == 5:
            assert launched.wait(GUARD), "training waits for the disk"
            seen.append(step)
        return write(path, step, entries, **rest)

    def put_bytes(*args):
        if seen == [5]:
            seen.append("put")
        elif seen == [5, "put"]:
            seen.append(then())
        return put(*args)

    return (
        patch.object(loop, "train_step", launch),
        patch.object(save, "write_part", write_part),
        patch.object(safefile, "_write_bytes", put_bytes),
    )


def train_held_back(job, until, then=lambda: None):
    first, second, third = held_back(until, then)
    with first, second, third:
        return loop.train(job, SingleRank())


def test_what_is_written_late_is_what_was_there(make_job, tmp_path):
    """Four more updates before the first byte; the files are those of a run that waits."""
    train_held_back(make_job("late", *WORDS), until=9)
    with patch.object(room, "free_memory", lambda: 0):
        loop.train(make_job("waits", *WORDS), SingleRank())
    assert "checkpoints are written: a copy would take" in (tmp_path / "waits/log.txt").read_text()
    assert "training waits" not in (tmp_path / "late/log.txt").read_text()
    for step in (5, 10, 12):
        late, waits = (
            {file.name: file.read_bytes() for file in (tmp_path / name / path).iterdir()}
            for name, path in ((name, f"checkpoints/step-{step:08d}") for name in ("late", "waits"))
        )
        assert late.keys() == waits.keys()
        assert late["rank-00000.safetensors"] == waits["rank-00000.safetensors"]


def kill_while_writing(transport, job):
    """For a worker: it is killed while the thread writes step 5 and training is at step 8."""
    train_held_back(job, 8, lambda: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.slow
def test_kill_9_while_a_checkpoint_is_written_beside_training(ended_workers, make_job, tmp_path):
    folder = tmp_path / "a" / "checkpoints"
    train_on(ended_workers, make_job("a", *WORDS[1:], "train.steps=3"))
    with pytest.raises(Exception, match=r"ended|lost|signal|killed"):
        ended_workers.run(kill_while_writing, make_job("a", *WORDS), ranks=1)
    assert [*draft_folder(folder, 5).glob(rank_file(0, "safetensors") + "*")]
    assert steps(folder) == [3]
    checkpoint = newest(folder, print)
    assert (checkpoint.step, checkpoint.verify()) == (3, [])
    for name in "ab":  # goes on from step 3; and one that was never killed
        loop.train(make_job(name, *WORDS), SingleRank())
    assert not draft_folder(folder, 5).exists()
    assert_same_bits(*(tensors(tmp_path / name, 12) for name in "ab"))


def test_a_stop_request_waits_for_the_save_in_flight(make_job, tmp_path):
    """Step 5 is written late; a signal comes in step 7: both steps are on disk at the end."""
    job, step_of = make_job("a", *WORDS), loop.train_step

    def asked(context, batch, *, step, **rest):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(context, batch, step=step, **rest)

    with patch.object(loop, "train_step", asked):
        outcome = train_held_back(job, until=7)
    assert outcome.signal == signal.SIGTERM
    assert steps(tmp_path / "a" / "checkpoints") == [5, outcome.step]
    assert max(metrics(tmp_path / "a")) == outcome.step


def test_the_room_for_copies(make_job, monkeypatch):
    """A rank's part of nine tenths of what is free; on a CPU, less the activations of the plan."""
    plan = make_job("a", "layout=dp2").plan
    coming = predicted_memory(plan, 0)["activations"]
    monkeypatch.setattr(room, "snapshots_of", lambda device, bound: (device.type, bound))
    found = {}
    for free in (None, 0, 10_000_000):
        for device in ("cpu", "cuda"):
            mesh = SimpleNamespace(
                rank=0, layout=plan.layout, wires=Wires(), device=torch.device(device)
            )
            monkeypatch.setattr(room, "free_memory", lambda free=free: free)
            found[free, device] = room.snapshots_for(plan, mesh)
    assert found[None, "cpu"] == ("cpu", None) and found[None, "cuda"] == ("cuda", None)
    assert found[0, "cpu"] == ("cpu", 0) and found[0, "cuda"] == ("cuda", 0)
    assert found[10_000_000, "cpu"] == ("cpu", 4_500_000 - coming)
    assert found[10_000_000, "cuda"] == ("cuda", 4_500_000)
