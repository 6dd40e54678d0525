"""Runs that are opened where something is missing: a mistake, or an error of the system."""

import shutil

import pytest
from full_disk import fill, small_disk

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.host import measured as measure
from howdah.train.finished_run import open_run
from howdah.train.loop import train


@pytest.fixture
def run(make_job, tmp_path):
    train(make_job("a", "train.steps=1"), SingleRank())
    return open_run(str(tmp_path / "a"), say=print)  # as a notebook would


def test_a_model_that_memory_has_no_room_for_is_refused(run, monkeypatch):
    """The system would kill the process, and the end of a run with it."""
    needed = 4 * sum(weight.numel() for weight in run.model().parameters())
    monkeypatch.setattr(measure, "memory", lambda: {"MemAvailable": needed})
    monkeypatch.setattr(measure, "memory_limit", lambda: None)
    run.model()
    monkeypatch.setattr(measure, "memory", lambda: {"MemAvailable": needed - 1})
    with pytest.raises(
        UserError, match=r"the model of .* takes 0\.0 GB of memory in float32, and "
    ):
        run.model()
    monkeypatch.setattr(measure, "memory", dict)
    run.model()
    monkeypatch.setattr(measure, "memory_limit", measure.most_held)
    with pytest.raises(UserError, match=r"and 0\.0 GB are left"):
        run.model()


def test_what_has_vanished_is_a_mistake_or_an_error_of_the_system(run, tmp_path):
    shutil.rmtree(run.folder)
    for use in (run.model, run.tokenizer, lambda: run.export(tmp_path / "out")):
        with pytest.raises((UserError, OSError)):
            use()
    with pytest.raises((UserError, OSError)):
        open_run(run.folder, say=print)
    assert not (tmp_path / "out").exists() and not run.folder.exists()


def test_a_run_without_a_best_checkpoint_says_how_to_get_one(run, tmp_path):
    """It said "train it first" of a run that had been trained."""
    told = r"/a has no best checkpoint; set train\.evaluate_every, or leave --best out$"
    with pytest.raises(UserError, match=told):
        open_run(run.folder, say=print, best=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no best checkpoint; train it first, or name a run"):
        open_run(tmp_path / "empty", say=print, best=True)


@pytest.mark.root
def test_an_export_to_a_full_disk_is_a_mistake_and_leaves_nothing(run, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 300 << 10):
        filler = fill(disk)
        with pytest.raises(UserError, match=r"cannot export to .*: No space left on device"):
            run.export(disk / "out")
        assert [*disk.iterdir()] == [filler]
        filler.unlink()
        run.export(disk / "out")
        before = {path: path.read_bytes() for path in (disk / "out").iterdir()}
        fill(disk)
        with pytest.raises(UserError, match=r"cannot export to .*: No space left on device"):
            run.export(disk / "out")
        assert {path: path.read_bytes() for path in (disk / "out").iterdir()} == before
