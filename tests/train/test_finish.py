"""The end of a run: bytes predicted and bytes counted are compared row by row; no older step
passes for the last one; and what follows training does not need the folder it began in.
"""

import shutil
from unittest.mock import patch

import pytest
import torch

from howdah.base.errors import Unfinished
from howdah.checkpoint.folders import steps
from howdah.comm.transport import SingleRank
from howdah.plan.recording import Traffic
from howdah.train import loop
from howdah.train.checkpointing import Checkpointer
from howdah.train.finish import how_to_go_on, sent

SCATTER, GATHER = (
    Traffic("dp", operation, "shared") for operation in ("reduce_scatter", "all_gather")
)
FAR = GATHER._replace(link="tcp")


def test_equal_rows_are_equal():
    rows = {SCATTER: 3 << 20, GATHER: 1 << 20}
    assert sent(rows, dict(reversed(rows.items())), 7) == (
        "sent        4.0 MiB by rank 0 in 7 steps; predicted 4,194,304 bytes, "
        "counted 4,194,304: equal"
    )


@pytest.mark.parametrize(
    ("predicted", "counted", "row"),
    [
        ({GATHER: 10}, {GATHER: 11}, "dp all_gather over shared, 10 and 11"),
        ({GATHER: 10}, {}, "dp all_gather over shared, 10 and 0"),
        ({GATHER: 10}, {GATHER: 10, SCATTER: 1}, "dp reduce_scatter over shared, 0 and 1"),
        ({}, {SCATTER: 1}, "dp reduce_scatter over shared, 0 and 1"),
        ({GATHER: 10, SCATTER: 5}, {GATHER: 5, SCATTER: 10}, "dp all_gather over shared, 10 and 5"),
        ({GATHER: 10, SCATTER: 5}, {FAR: 10, SCATTER: 5}, "dp all_gather over shared, 10 and 0"),
    ],
)
def test_the_first_row_that_differs_is_named(predicted, counted, row):
    """Only the sum over predicted rows was compared: other rows, and bytes that went over another
    wire or in another operation, were not seen.
    """
    line = sent(predicted, counted, 2)
    assert line.endswith(f": NOT EQUAL in {row}: please report this")


def train_chatty(transport, job):
    """Trains, and in each step sends what no plan knows of."""
    step_of = loop.train_step

    def chatty(context, batch, **rest):
        context.mesh.world.broadcast(torch.zeros(3), 0)
        return step_of(context, batch, **rest)

    with patch.object(loop, "train_step", chatty):
        loop.train(job, transport)


def test_a_run_tells_what_it_was_not_predicted_to_send(workers, make_job, tmp_path):
    job = make_job("a", "layout=dp2", "train.steps=2")
    workers.run(train_chatty, job, ranks=2)
    lines = (tmp_path / "a" / "log.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("sent "))
    assert line.endswith("NOT EQUAL in dp broadcast over shared, 0 and 24: please report this")


def remove_last(checkpoints):
    shutil.rmtree(checkpoints / "step-00000020")


def damage_last(checkpoints):
    file = checkpoints / "step-00000020" / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("harm", "stands"),
    [
        (remove_last, "step 10 is the newest that is"),
        (damage_last, "step 10 is the newest that is"),
        (shutil.rmtree, "no other one is"),
    ],
)
def test_no_older_step_passes_for_the_last_one(make_job, tmp_path, harm, stands):
    """The final evaluation takes minutes, in which somebody may tidy up: step 10 was exported."""
    evaluate, checkpoints = Checkpointer.evaluate, tmp_path / "a" / "checkpoints"

    def evaluate_and_harm(checkpointer, step, *, limit):
        found = evaluate(checkpointer, step, limit=limit)
        if limit == 0:
            assert steps(checkpoints) == [10, 20]
            harm(checkpoints)
        return found

    sentence = f"step 20 was saved, and is no longer whole in .*; {stands}; .*: howdah train "
    with (
        patch.object(Checkpointer, "evaluate", evaluate_and_harm),
        pytest.raises(Unfinished, match=sentence),
    ):
        loop.train(make_job("a", "train.export=true"), SingleRank())
    assert not (tmp_path / "a" / "export").exists()
    loop.train(make_job("a", "train.export=true"), SingleRank())
    assert (tmp_path / "a" / "export" / "model.safetensors").is_file()


def test_the_folder_that_a_run_began_in_may_go(make_job, tmp_path, monkeypatch, capsys):
    """A finished run ended with exit code 1 and no export, for a path could not be shortened."""
    job = make_job("a", "train.steps=2", "train.export=true")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    loop.train(job, SingleRank())
    assert (tmp_path / "a" / "export" / "model.safetensors").is_file()
    assert f"checkpoint  {tmp_path}/a/checkpoints/step-00000002\n" in capsys.readouterr().out
    assert how_to_go_on(job, 1).endswith(f"howdah train {tmp_path}/a")


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "there is not enough memory"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
            "there is not enough memory: DefaultCPUAllocator: can't allocate memory",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_is_not_training_does_not_fail_the_run(make_job, tmp_path, capsys, error, sentence):
    """torch says by a RuntimeError that there is no memory: a finished run ended with code 1."""
    with patch("howdah.train.finish.FinishedRun.export", side_effect=error):
        loop.train(make_job("a", "train.steps=2", "train.export=true"), SingleRank())
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("export"))
    assert f"not made: {sentence}" in line and "try again with howdah export" in line


def test_a_defect_in_an_export_is_one(make_job):
    with (
        patch("howdah.train.finish.FinishedRun.export", side_effect=RuntimeError("a defect")),
        pytest.raises(RuntimeError, match="a defect"),
    ):
        loop.train(make_job("a", "train.steps=2", "train.export=true"), SingleRank())
