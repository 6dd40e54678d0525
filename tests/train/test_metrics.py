"""MetricsWriter: what stands in the files of a run, and a run whose files cannot be written."""

import json
import os
import shutil
import sys
from dataclasses import replace
from importlib.abc import MetaPathFinder

import pytest
from full_disk import FULL, fill, small_disk
from small_runs import assert_same_bits, tensors
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from howdah.base.signals import Stopped, stop_behind
from howdah.comm.transport import SingleRank
from howdah.config.history import HISTORY, remember
from howdah.train.loop import train
from howdah.train.metrics import MetricsWriter, StepMetrics, append
from howdah.train.optional import importing

ROW = StepMetrics(
    step=1,
    loss=5.0,
    norm=1.0,
    rate=1e-3,
    tps=10.0,
    tflops=1.0,
    mfu=0.5,
    mfu_causal=0.4,
    memory=1,
    memory_share=0.1,
    sent=0.0,
    exposed=0.0,
    waited=0.0,
    seconds=1.0,
)
FILES = ("metrics.jsonl", "log.txt", "tensorboard")


def measured(records, *steps):
    for step in steps:
        records.measured(replace(ROW, step=step))


def rows(folder):
    """(kind, step) of every row; lines that are none are left out, as every reader must."""
    found = []
    for line in (folder / "metrics.jsonl").read_bytes().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        found.append((row["kind"], row["step"]))
    return found


def drawn(folder, name="loss_metrics/global_avg_loss"):
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [event.step for event in board.Scalars(name)]


def sentences(why):
    return [
        f"{file} can no longer be written ({why}): training goes on without it" for file in FILES
    ]


def test_what_is_said_is_written(tmp_path):
    said = []
    records = MetricsWriter(tmp_path, step=0, say=said.append)
    measured(records, 1, 2)
    records.held_out(step=2, values={"loss": 3.0, "bits_per_byte": 2.0}, whole=False)
    assert rows(tmp_path) == [("train", 1), ("train", 2), ("held_out", 2)]
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        replace(ROW, step=step).line() for step in (1, 2)
    ]
    assert drawn(tmp_path) == [1, 2] and drawn(tmp_path, "held_out/bits_per_byte") == [2]
    assert said == []


def test_what_is_measured_again_is_purged_from_the_board(tmp_path):
    measured(MetricsWriter(tmp_path, step=0, say=print), 1, 2, 3)
    measured(MetricsWriter(tmp_path, step=1, say=print), 2)
    assert drawn(tmp_path) == [1, 2]
    assert rows(tmp_path) == [("train", 1), ("train", 2)]


# -- what cannot be written ----------------------------------------------------


def test_files_that_cannot_be_opened_cost_a_sentence_each(tmp_path):
    for file in FILES[:2]:
        (tmp_path / file).symlink_to(FULL)
    (tmp_path / "tensorboard").write_text("a file stands in the way")
    said = []
    records = MetricsWriter(tmp_path, step=0, say=said.append)
    measured(records, 1, 2, 3)
    records.held_out(step=3, values={"loss": 3.0, "bits_per_byte": 2.0}, whole=False)
    why = "No space left on device"
    assert sorted(said) == sorted([*sentences(why)[:2], *sentences("File exists")[2:]])


def test_a_pipe_without_a_reader_keeps_nobody_waiting(tmp_path):
    """A start waited for ever when history.jsonl was one, and a run when its log.txt was full."""
    for file in (*FILES[:2], HISTORY):
        os.mkfifo(tmp_path / file)
    remember(tmp_path, 0, {})
    assert (tmp_path / HISTORY).is_fifo()
    with open(os.open(tmp_path / FILES[1], os.O_RDWR), "rb") as reader:  # a pipe that gets full
        os.set_blocking(reader.fileno(), False)
        append(tmp_path / FILES[1], "a line")
        with pytest.raises(BlockingIOError, match="nobody reads it"):
            append(tmp_path / FILES[1], "x" * (1 << 21))
        assert reader.readline() == b"a line\n"


def test_rows_of_gigabytes_are_not_read_again(tmp_path):
    """The run ended for want of memory when a broken disk had made them of zeros."""
    (tmp_path / "metrics.jsonl").touch()
    os.truncate(tmp_path / "metrics.jsonl", (1 << 30) + 1)
    said = []
    measured(MetricsWriter(tmp_path, step=0, say=said.append), 1)
    assert said[0].startswith("metrics.jsonl can no longer be written (it has more than the 1,073,")
    assert (tmp_path / "log.txt").read_text().splitlines()[-1] == ROW.line()


def test_a_folder_that_goes_and_comes_back(tmp_path):
    folder, said = tmp_path / "a", []
    folder.mkdir()
    records = MetricsWriter(folder, step=0, say=said.append)
    measured(records, 1)
    shutil.rmtree(folder)
    measured(records, 2, 3)
    assert sorted(said) == sorted(sentences("No such file or directory"))
    folder.mkdir()
    measured(records, 4)
    assert rows(folder) == [("train", 4)] and drawn(folder) == [4] and len(said) == 3


@pytest.mark.root
def test_a_disk_that_is_full_for_a_while(tmp_path):
    """Full in the middle of a line, of a record, and of a rewriting."""
    said = []
    with small_disk(tmp_path, 64 << 10):
        records = MetricsWriter(tmp_path, step=0, say=said.append)
        measured(records, 1)
        filler = fill(tmp_path)
        measured(records, *range(2, 60))
        assert sorted(said) == sorted(sentences("No space left on device"))
        records.held_out(step=60, values={"loss": 3.0, "bits_per_byte": 2.0}, whole=False)
        filler.unlink()
        measured(records, 60)
        steps = [step for _, step in rows(tmp_path)]
        assert steps[0] == 1 and steps[-1] == 60 and steps == sorted(steps)
        assert drawn(tmp_path)[0] == 1 and drawn(tmp_path)[-1] == 60
        assert (tmp_path / "log.txt").read_text().endswith(replace(ROW, step=60).line() + "\n")
        assert len(said) == 3
        files = [path.stat().st_size for path in (tmp_path / "tensorboard").iterdir()]
        assert len(files) <= 3 and all(files)  # not an empty one of each try

        again = MetricsWriter(tmp_path, step=60, say=said.append)
        assert rows(tmp_path)[-1] == ("train", 60)
        assert said[3:] in ([], ["metrics.jsonl: lines that cannot be read were left out: 1"])
        fill(tmp_path)
        measured(again, *range(61, 90))
        MetricsWriter(tmp_path, step=1, say=said.append)  # has to write anew what it keeps
        assert any(one.startswith("metrics.jsonl can no longer be written") for one in said[-2:])
        assert rows(tmp_path)[0] == ("train", 1)


def test_a_library_that_is_not_there_costs_its_files_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    said = []
    measured(MetricsWriter(tmp_path, step=0, say=said.append), 1, 2)
    (sentence,) = said
    assert sentence.startswith("tensorboard can no longer be written (")
    assert rows(tmp_path) == [("train", 1), ("train", 2)]


class Broken(MetaPathFinder):
    """Raises an error where a module is imported."""

    def __init__(self, module, error):
        self._module, self._error = module, error

    def find_spec(self, name, path, target=None):
        if name == self._module:
            raise self._error


@pytest.mark.parametrize(
    "module", ["compat.proto.summary_pb2", "compat.proto.event_pb2", "summary.writer.record_writer"]
)
@pytest.mark.parametrize(
    ("error", "why"),
    [
        (AttributeError("no attribute 'x'\nand more"), "AttributeError: no attribute 'x'"),
        (TypeError("Descriptors cannot be created"), "TypeError: Descriptors cannot be created"),
        (RuntimeError(), "RuntimeError"),
        (ImportError("gone"), "ImportError: gone"),
    ],
)
def test_a_library_that_is_broken_costs_its_files_alone(tmp_path, monkeypatch, module, error, why):
    """Two versions that do not fit each other raise anything; it ended the run."""
    name = f"tensorboard.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(name, error), *sys.meta_path])
    said = []
    measured(MetricsWriter(tmp_path, step=0, say=said.append), 1, 2)
    assert said == [
        f"tensorboard can no longer be written (tensorboard cannot be imported: {why}): training "
        "goes on without it"
    ]
    assert rows(tmp_path) == [("train", 1), ("train", 2)]
    assert not [*tmp_path.glob("tensorboard/*")]


def test_a_stop_signal_in_an_import_is_no_broken_library():
    """Python turns what is raised while it makes a class into a RuntimeError."""
    with pytest.raises(RuntimeError) as told, importing("a package"):
        raise RuntimeError("Error calling __set_name__") from Stopped(15)
    assert stop_behind(told.value).number == 15


def test_a_run_trains_to_the_same_bits_without_any_of_its_records(make_job, tmp_path, capsys):
    train(make_job("a"), SingleRank())
    (tmp_path / "b").mkdir()
    for file in FILES[:2]:
        (tmp_path / "b" / file).symlink_to(FULL)
    for folder in ("tensorboard", "trace"):
        (tmp_path / "b" / folder).write_text("a file stands in the way")
    capsys.readouterr()
    train(make_job("b"), SingleRank())
    assert_same_bits(tensors(tmp_path / "a", 20), tensors(tmp_path / "b", 20))
    told = capsys.readouterr().out
    for file in (*FILES, "trace"):
        assert told.count(f"{file} can no longer be written (") == 1
    assert "step: 20 " in told


# -- lines that were spoilt ----------------------------------------------------

SPOILT = [
    b"\0" * 300,
    b'{"kind": "train", "st',
    b"[1, 2]",
    b'"a"',
    b"{}",
    b'{"kind": "train", "step": "7"}',
    b'{"kind": "train", "step": true}',
    b'{"kind": "train", "step": 1e999}',
    b'{"kind": "train", "step": NaN}',
    b'{"kind": "tr\xff", "step": 1}',
    b"[" * 100_000,
    b'{"kind": "train", "step": ' + b"7" * 5000 + b"}",
]


@pytest.mark.parametrize("spoilt", SPOILT, ids=lambda line: str(line[:40]))
def test_a_line_that_is_no_row_is_passed_over(tmp_path, spoilt):
    good = [json.dumps({"kind": "train", "step": step}).encode() for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([good[0], spoilt, *good[1:], spoilt]))
    said = []
    measured(MetricsWriter(tmp_path, step=2, say=said.append), 3)
    assert said == ["metrics.jsonl: lines that cannot be read were left out: 2"]
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == said[0]
    kept = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert kept[:2] == good[:2] and json.loads(kept[2])["step"] == 3 and len(kept) == 3


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "a"
    for content in (None, b"", b"whole\n", b"cut o"):
        if content is not None:
            path.write_bytes(content)
        append(path, "next ³")
        lines = path.read_text("utf-8").splitlines()
        assert lines[-1] == "next ³" and lines[:-1] == (content or b"").decode().splitlines()


# -- a step stands there once --------------------------------------------------


def test_a_step_that_is_evaluated_again_stands_there_once(tmp_path):
    """A finished run that was started again added a row each time."""
    for loss in (3.0, 3.0, 2.5):
        records = MetricsWriter(tmp_path, step=2, say=print)
        records.held_out(step=2, values={"loss": loss, "bits_per_byte": 1.0}, whole=False)
    records.held_out(step=4, values={"loss": 2.0, "bits_per_byte": 1.0}, whole=False)
    records.held_out(step=4, values={"loss": 1.0, "bits_per_byte": 1.0}, whole=False)
    measured(records, 4)
    assert rows(tmp_path) == [("held_out", 2), ("held_out", 4), ("train", 4)]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [2.5, 1.0, 5.0]


def test_a_finished_run_that_is_started_again_adds_no_row(make_job, tmp_path):
    train(make_job("a", "train.steps=2"), SingleRank())
    before = rows(tmp_path / "a")
    train(make_job("a", "train.steps=2"), SingleRank())
    assert rows(tmp_path / "a") == before
