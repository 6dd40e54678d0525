"""`train.profile`: one step is recorded, the run is the same, and no failure of it ends the run."""

import json
import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from full_disk import fill, small_disk
from small_runs import assert_same_bits, losses, tensors, train_on

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.train import loop, profile
from howdah.train.loop import train
from howdah.train.profile import StepProfiler, write_whole

CPU, CARD = torch.device("cpu"), torch.device("cuda", 1)


def recorded(folder):
    """The names of the operators in each trace of a run."""
    return {
        str(path.relative_to(folder / "profile")): {
            event.get("name") for event in json.loads(path.read_text())["traceEvents"]
        }
        for path in sorted(folder.glob("profile/*/*"))
    }


def test_every_rank_records_the_step_and_computes_the_same(workers, make_job, tmp_path):
    plain = ["layout=dp2", "train.steps=4", "train.save_every=0"]
    train_on(workers, make_job("a", *plain), make_job("b", *plain, "train.profile=3"))
    assert_same_bits(tensors(tmp_path / "a", 4), tensors(tmp_path / "b", 4))
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    found = recorded(tmp_path / "b")
    assert list(found) == [f"step-00000003/rank-0000{rank}.json" for rank in (0, 1)]
    for names in found.values():
        assert {"aten::mm", "aten::embedding"} <= names
    told = (tmp_path / "b" / "log.txt").read_text()
    assert f"profile     step 3 of each rank: {tmp_path / 'b'}/profile/step-00000003\n" in told
    assert not (tmp_path / "a" / "profile").exists()


def test_one_step_is_recorded_and_no_other(make_job, tmp_path):
    """A marker in each step says which ones a trace has."""
    step_of = loop.train_step

    def marked(context, batch, *, step, **rest):
        with torch.profiler.record_function(f"marker of step {step + 1}"):
            return step_of(context, batch, step=step, **rest)

    with patch.object(loop, "train_step", marked):
        train(make_job("a", "train.steps=4", "train.profile=2"), SingleRank())
    ((_, names),) = recorded(tmp_path / "a").items()
    assert {name for name in names if str(name).startswith("marker")} == {"marker of step 2"}


def test_a_step_that_is_done_is_told_and_not_recorded(make_job, tmp_path):
    train(make_job("a", "train.steps=2"), SingleRank())
    train(make_job("a", "train.steps=3", "train.profile=2"), SingleRank())
    assert "profile     step 2 is done: this start records none" in (
        (tmp_path / "a" / "log.txt").read_text()
    )
    assert not (tmp_path / "a" / "profile").exists()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["train.profile=21"],
            "train.profile is 21, past the last step, 20; name one",
        ),
        (
            ["train.tokens=400", "train.profile=4"],
            "train.profile is 4, past the last step, 3; n",
        ),
        (["train.profile=-1"], "train.profile is -1; it must be at least 0"),
        (["train.profile=first"], "train.profile is 'first'; it must be a whole number"),
    ],
)
def test_a_step_that_the_run_does_not_have_is_refused(make_job, words, sentence):
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        make_job("a", *words)


def test_epochs_are_looked_at_when_they_are_steps(make_job):
    """Their number depends on the text, so a recipe alone is not refused."""
    from howdah.train.length import in_steps

    job = make_job("a", "train.epochs=1", "train.profile=1000")
    assert in_steps(job.train, job.batch, 32, samples=6000).steps == 1000
    with pytest.raises(UserError, match=r"^train\.profile is 1,000, past the last step, 999"):
        in_steps(job.train, job.batch, 32, samples=5994)


# -- what fails in it ----------------------------------------------------------------


def sentence_of(out):
    (line,) = [line for line in out.splitlines() if line.startswith("profile can no longer")]
    assert line.endswith("): training goes on without it")
    return line


def test_a_folder_that_cannot_be_written_costs_the_trace_alone(make_job, tmp_path, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "profile").write_text("a file stands in the way")
    train(make_job("a", "train.steps=3", "train.profile=2"), SingleRank())
    out = capsys.readouterr().out
    assert "Not a directory" in sentence_of(out) or "File exists" in sentence_of(out)
    assert "step:  3 " in out


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("moment", ["start", "stop", "export_chrome_trace"])
def test_a_profiler_that_fails_costs_the_trace_alone(make_job, tmp_path, capsys, moment):
    with patch.object(profile.profile, moment, side_effect=RuntimeError("no profiler here")):
        train(make_job("a", "train.steps=3", "train.profile=2"), SingleRank())
    out = capsys.readouterr().out
    assert "no profiler here" in sentence_of(out) and "step:  3 " in out
    assert not [*(tmp_path / "a").glob("profile/*/*")]


def test_an_error_of_the_step_is_not_the_profilers(make_job, tmp_path):
    with (
        patch.object(loop, "train_step", side_effect=OSError(5, "of the step")),
        pytest.raises(OSError, match="of the step"),
    ):
        train(make_job("a", "train.profile=1"), SingleRank())
    assert not (tmp_path / "a" / "profile").exists()
    train(make_job("b", "train.steps=1", "train.profile=1"), SingleRank())  # none is running still
    assert recorded(tmp_path / "b")


def test_a_file_that_is_cut_off_is_none(tmp_path):
    """torch's profiler says so on its own log alone."""

    def cut_off(name):
        with open(name, "w") as file:
            file.write('{"traceEvents": [{"ph": "X"')
        with open(f"{name}.tmp", "w") as file:
            file.write("its draft")

    path = tmp_path / "trace.json"
    with pytest.raises(OSError, match="not complete"):
        write_whole(path, cut_off)
    assert [*tmp_path.iterdir()] == []
    write_whole(path, lambda name: Path(name).write_text('{"traceEvents": []}\n'))
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.root
def test_a_full_disk_costs_the_trace_alone(tmp_path):
    said = []
    with small_disk(tmp_path, 64 << 10):
        fill(tmp_path)
        profiler = StepProfiler(1, rank=0, device=CPU, folder=tmp_path, say=said.append)
        with profiler.around(1):
            torch.ones(3).sum()
        (sentence,) = said
        assert sentence.startswith("profile can no longer be written (")
        assert not [*tmp_path.glob("profile/*/rank*")]


# -- of a GPU ----------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """What is asked of torch.cuda, in order; a snapshot is a file that ends as a pickle does."""
    made = []

    def dump(name):
        made.append("snapshot")
        with open(name, "wb") as file:
            file.write(b"a pickle.")

    def remember(enabled="all", **how):
        made.append(f"memory {enabled or 'off'}")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda d: made.append(f"synchronize {d}"))
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", remember)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", dump)
    return made


def test_of_a_card_the_step_is_cut_out_and_its_memory_is_drawn(calls, tmp_path):
    profiler = StepProfiler(2, rank=1, device=CARD, folder=tmp_path, say=print)
    for step in (1, 2, 3):
        with profiler.around(step):
            calls.append(f"step {step}")
    assert calls == [
        *("step 1", "synchronize cuda:1", "memory all", "step 2", "synchronize cuda:1"),
        *("snapshot", "memory off", "step 3"),
    ]
    names = [path.name for path in sorted((tmp_path / "profile" / "step-00000002").iterdir())]
    assert names == ["rank-00001-memory.pickle", "rank-00001.json"]


@pytest.mark.parametrize("lost", ["_record_memory_history", "_dump_snapshot"])
def test_a_torch_without_memory_snapshots_gives_the_trace(calls, tmp_path, monkeypatch, lost):
    monkeypatch.delattr(torch.cuda.memory, lost)
    said = []
    profiler = StepProfiler(1, rank=0, device=CARD, folder=tmp_path, say=said.append)
    with profiler.around(1):
        pass
    assert (tmp_path / "profile" / "step-00000001" / "rank-00000.json").is_file()
    assert len(said) == 1 and said[0].startswith("profile     step 1 of each rank: ")


def test_after_a_step_that_fails_memory_is_not_recorded_on(calls, tmp_path):
    profiler = StepProfiler(1, rank=0, device=CARD, folder=tmp_path, say=print)
    with pytest.raises(ValueError, match="the step"), profiler.around(1):
        raise ValueError("the step")
    assert calls[-1] == "memory off" and "snapshot" not in calls
