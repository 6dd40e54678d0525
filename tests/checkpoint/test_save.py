"""Saver: snapshots stand apart, ranks meet in the file system, failures cost a sentence."""

from threading import Thread

import pytest
import torch
from sample_state import about, assert_holds, only, parts, save, savers, silent, state

from howdah.base.errors import UserError
from howdah.checkpoint import save as saving
from howdah.checkpoint.folders import best_step, step_folder, steps
from howdah.checkpoint.load import newest, open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.checkpoint.snapshot import Snapshots, snapshots_of
from howdah.plan.boxes import whole_piece


def test_a_snapshot_does_not_see_later_changes(tmp_path):
    weight, meta = torch.zeros(1000), {"losses": []}
    piece = whole_piece("w", (1000,))
    (saver,) = savers(tmp_path, 1)
    for step in range(3):
        weight.fill_(step)
        saver.save(step=step, entries=[("weight", piece, weight)], about=about(meta=meta))
        weight.fill_(99.0)
        meta["losses"].append(99.0)
    saver.wait()
    for step in range(3):
        checkpoint = open_checkpoint(step_folder(tmp_path, step))
        assert checkpoint.tensor("weight", "w").tolist() == [float(step)] * 1000
        assert checkpoint.meta == {"losses": [99.0] * step}


def test_buffers_are_used_again_unless_their_sizes_change(tmp_path):
    snapshots = Snapshots()
    saver = Saver(tmp_path, rank=0, world=1, keep=9, say=silent, snapshots=snapshots)

    def place(step, length, dtype=torch.float32):
        piece = whole_piece("w", (length,))
        entries = [("weight", piece, torch.ones(length, dtype=dtype))]
        saver.save(step=step, entries=entries, about=about())
        (buffer,) = snapshots._buffers.values()
        return buffer.data_ptr(), len(buffer), buffer.dtype

    first = place(1, 50)
    assert place(2, 50) == first
    assert place(3, 60)[1:] == (60, torch.float32)
    assert place(4, 60, torch.float64)[1:] == (60, torch.float64)
    saver.wait()


def test_entries_that_do_not_fit_are_refused_in_the_foreground(tmp_path):
    (saver,) = savers(tmp_path, 1)
    piece = whole_piece("w", (4,))
    with pytest.raises(ValueError, match="wants 4 elements"):
        saver.save(step=1, entries=[("weight", piece, torch.ones(3))], about=about())
    twice = [("weight", piece, torch.ones(4))] * 2
    with pytest.raises(ValueError, match="once"):
        saver.save(step=1, entries=twice, about=about())
    with pytest.raises(TypeError, match="JSON"):
        saver.save(step=1, entries=[], about=about(meta={"loss": torch.ones(1)}))
    assert not tmp_path.is_dir() or only(tmp_path) == []


def test_keeping_none_is_refused(tmp_path):
    with pytest.raises(UserError, match="keep at least 1"):
        savers(tmp_path, 1, keep=0)


def test_a_step_marked_as_best_after_it_was_saved(tmp_path):
    (saver,) = savers(tmp_path, 1, keep=1)
    (entries,) = parts(state(), 1)
    for best in (False, True):
        saver.save(step=1, entries=entries, about=about(), best=best)
    saver.save(step=2, entries=entries, about=about())
    saver.wait()
    assert (best_step(tmp_path), steps(tmp_path)) == (1, [1, 2])


def test_a_damaged_checkpoint_is_written_again_when_its_step_comes(tmp_path):
    for step in (10, 30):
        save(tmp_path, step, state(seed=step), world=2)
    (step_folder(tmp_path, 30) / "rank-00001.safetensors").write_bytes(b"")
    save(tmp_path, 30, state(seed=31), world=2)
    assert_holds(newest(tmp_path, silent), state(seed=31))
    assert only(tmp_path) == ["step-00000010", "step-00000030"]


@pytest.mark.parametrize("world", [1, 3])
def test_a_step_that_stands_is_not_written_again(tmp_path, world):
    save(tmp_path, 1, state(seed=1), world=world)
    save(tmp_path, 1, state(seed=2), world=world)  # by other processes
    assert_holds(newest(tmp_path, silent), state(seed=1))
    team = savers(tmp_path, world)  # and by the same, before rank 0 has seen the first
    for seed in (3, 4):
        for saver, mine in reversed([*zip(team, parts(state(seed=seed), world), strict=True)]):
            saver.save(step=2, entries=mine, about=about())
    for saver in team:
        saver.wait()
        assert saver.failed is None
    assert_holds(newest(tmp_path, silent), state(seed=3))
    assert only(tmp_path) == ["step-00000001", "step-00000002"]


# -- what can go wrong ---------------------------------------------------------


def test_a_defect_comes_back_to_the_caller(tmp_path):
    said = []
    (saver,) = savers(tmp_path, 1, say=said.append)
    piece = whole_piece("w", (2,))
    strange = torch.zeros(2, dtype=torch.complex64)  # safetensors has it, howdah does not
    saver.save(step=1, entries=[("weight", piece, strange)], about=about())
    with pytest.raises(KeyError):
        saver.wait()
    saver.wait()
    assert saver.failed in said[0]
    assert only(tmp_path) == []


class Refused(Thread):
    """A thread that a limit does not let start."""

    def start(self):
        raise RuntimeError("can't start new thread")


def test_a_thread_that_cannot_be_started_is_not_waited_for(tmp_path, monkeypatch):
    """`wait` wanted to join it, and said so instead of why there was none."""
    (saver,) = savers(tmp_path, 1)
    (entries,) = parts(state(), 1)
    with monkeypatch.context() as limited, pytest.raises(RuntimeError, match="can't start new"):
        limited.setattr(saving, "Thread", Refused)
        saver.save(step=1, entries=entries, about=about())
    saver.wait()
    assert not saver.part()
    saver.save(step=1, entries=entries, about=about())
    saver.wait()
    assert only(tmp_path) == ["step-00000001"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    said = []
    (saver,) = savers(tmp_path / "file" / "checkpoints", 1, say=said.append)
    saver.save(step=1, entries=parts(state(), 1)[0], about=about())
    saver.wait()
    (sentence,) = said
    assert saver.failed in sentence
    assert "Not a directory" in said[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu(tmp_path):
    tensors, snapshots = state(), snapshots_of(torch.device("cuda", 0), None)
    saver = Saver(tmp_path, rank=0, world=1, keep=9, say=silent, snapshots=snapshots)
    entries = [(kind, piece, tensor.cuda()) for kind, piece, tensor in parts(tensors, 1)[0]]
    saver.save(step=1, entries=entries, about=about())
    assert all(buffer.is_pinned() for buffer in snapshots._buffers.values())
    snapshots.settle()
    for _, _, tensor in entries:
        tensor.zero_()
    saver.wait()
    checkpoint = newest(tmp_path, silent)
    assert_holds(checkpoint, tensors)
    out = torch.empty(35, device="cuda")
    checkpoint.read("weight", whole_piece("layers.0.q.weight", (5, 7)), out)
    assert torch.equal(out.cpu(), tensors["weight", "layers.0.q.weight"].reshape(-1))
