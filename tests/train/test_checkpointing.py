"""The run folder's tokenizer: there whole, or a sentence before the first step. And what a run
that breaks off leaves of its checkpoints.
"""

import shutil
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from full_disk import fill, small_disk

from howdah.base.errors import UserError
from howdah.checkpoint.folders import draft_folder, steps
from howdah.checkpoint.index import About
from howdah.checkpoint.save import Saver
from howdah.comm.transport import SingleRank
from howdah.plan.boxes import Piece, whole
from howdah.train import checkpointing as keep
from howdah.train import loop
from howdah.train.checkpointing import Checkpointer, keep_tokenizer


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.json"
    path.write_text("a tokenizer")
    return path


def test_it_is_copied_whole(tmp_path, source):
    for before in (None, "", "another"):
        if before is not None:
            (tmp_path / "tokenizer.json").write_text(before)
        keep_tokenizer(source, tmp_path / "tokenizer.json")
        assert (tmp_path / "tokenizer.json").read_text() == "a tokenizer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source.json", "tokenizer.json"]


def test_one_that_is_there_is_not_written(tmp_path, source):
    keep_tokenizer(source, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json.part").mkdir()  # nothing can be written now
    keep_tokenizer(source, tmp_path / "tokenizer.json")
    source.write_text("another")
    with pytest.raises(
        UserError, match=r"cannot copy the tokenizer .*\(Is a directory\); make room"
    ):
        keep_tokenizer(source, tmp_path / "tokenizer.json")
    assert (tmp_path / "tokenizer.json").read_text() == "a tokenizer"


def test_folders_that_are_gone_are_a_sentence(tmp_path, source):
    for source_, to in ((source, tmp_path / "gone" / "t"), (tmp_path / "gone", tmp_path / "t")):
        with pytest.raises(UserError, match=r"\(No such file or directory\)"):
            keep_tokenizer(source_, to)


@pytest.mark.root
def test_on_a_full_disk_the_one_that_is_there_will_do(tmp_path):
    source, disk = tmp_path / "source.json", tmp_path / "disk"
    source.write_text("a" * 10_000)
    disk.mkdir()
    with small_disk(disk, 64 << 10):
        keep_tokenizer(source, disk / "there.json")
        fill(disk)
        keep_tokenizer(source, disk / "there.json")
        with pytest.raises(UserError, match=r"\(No space left on device\); make room there"):
            keep_tokenizer(source, disk / "tokenizer.json")
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "there.json"]


GUARD = 600.0  # seconds


def test_a_save_that_a_lost_rank_leaves_in_flight_leaves_no_draft(tmp_path):
    """Rank 0 waited two seconds for the part of a rank that was killed, and left its own there."""
    said = []
    saver = Saver(tmp_path, rank=0, world=2, keep=1, say=said.append, deadline=GUARD)
    piece = Piece("w", (4,), whole((4,)), 0, 2)
    saver.save(step=7, entries=[("weight", piece, torch.ones(2))], about=About("a", "dp2", 8, {}))
    assert saver.part() and [*draft_folder(tmp_path, 7).iterdir()]
    checkpointer = SimpleNamespace(_saver=saver)
    with patch.multiple(keep, RESCUE=0.0, REMOVE=GUARD):
        Checkpointer.__exit__(checkpointer, RuntimeError)
    assert [*tmp_path.iterdir()] == []
    assert said == [
        "the checkpoint of step 7 was not saved: rank 1 could not write its part, nor say why; "
        "older ones are untouched"
    ]


def test_a_run_that_ends_well_cancels_nothing():
    saver = SimpleNamespace()  # which can do nothing
    Checkpointer.__exit__(SimpleNamespace(_saver=saver), None)


def test_a_run_whose_folder_is_deleted_trains_on(make_job, tmp_path, capsys):
    """TensorBoard's thread ended it; what is left to write is written into a new folder."""
    step_of, folder = loop.train_step, tmp_path / "a"

    def delete(context, batch, *, step, **rest):
        if step == 5:
            shutil.rmtree(folder)
        return step_of(context, batch, step=step, **rest)

    with patch.object(loop, "train_step", delete):
        outcome = loop.train(make_job("a", "train.save_every=0"), SingleRank())
    assert (outcome.step, steps(folder / "checkpoints")) == (20, [20])
    said = capsys.readouterr().out
    for kind in ("metrics.jsonl", "log.txt", "tensorboard"):
        assert said.count(f"{kind} can no longer be written (No such file or directory)") == 1
