"""Drafts of checkpoints: those of a killed rank 0 are removed, those of another run never."""

import os
import signal

import pytest
from small_runs import train_on

from howdah.checkpoint import save
from howdah.checkpoint.folders import draft_folder, rank_file, steps
from howdah.cli import train as cli_train
from howdah.train.checkpointing import remove_drafts
from howdah.train.run_folder import lock

TRAIN_RANK = cli_train.train_rank


def die_while_saving(seat, job):
    """For ranks: rank 0 is killed when its own file is written, and perhaps those of others."""

    def die(folder, own, world, **_):
        (job.folder / "drafts").write_text("".join(path.name for path in folder.glob("*.tmp")))
        os.kill(os.getpid(), signal.SIGKILL)

    save.publish = die
    return TRAIN_RANK(seat, job)


@pytest.mark.slow
def test_a_killed_rank_0_leaves_no_draft(make_job, monkeypatch, tmp_path, capsys):
    """It stayed until the next start: as many bytes as a checkpoint has."""
    monkeypatch.setattr(cli_train, "train_rank", die_while_saving)
    assert cli_train._train_here(make_job("a", "layout=dp2"), 0) == 1
    assert capsys.readouterr().err.endswith("go on with the same command\n")
    assert (tmp_path / "a" / "drafts").read_text() == "step-00000010.tmp"  # it was there
    assert [*(tmp_path / "a" / "checkpoints").iterdir()] == []


@pytest.fixture
def left(tmp_path):
    """A run folder with a draft."""
    draft = draft_folder(tmp_path / "a" / "checkpoints", 10)
    draft.mkdir(parents=True)
    (draft / rank_file(0, "safetensors")).write_bytes(bytes(100))
    (tmp_path / "a" / "trace").mkdir()
    (tmp_path / "a" / "trace" / "rank-0.new").touch()
    return draft


def test_the_draft_of_a_live_run_stays(left, tmp_path):
    """Another run may have begun by then. Its rank 0 holds the lock as long as any rank saves."""
    with lock(tmp_path / "a"):
        remove_drafts(tmp_path / "a")
        assert [*left.iterdir()] and [*(tmp_path / "a" / "trace").iterdir()]
    remove_drafts(tmp_path / "a")
    assert not left.exists() and not [*(tmp_path / "a" / "trace").iterdir()]


def test_where_no_checkpoint_was_begun_nothing_is_made(tmp_path):
    remove_drafts(tmp_path / "a")
    assert [*tmp_path.iterdir()] == []


def test_the_next_start_removes_what_nobody_else_could(workers, make_job, left, tmp_path):
    train_on(workers, make_job("a", "train.steps=2", "train.save_every=0"))
    assert not left.exists()
    assert steps(tmp_path / "a" / "checkpoints") == [2]
