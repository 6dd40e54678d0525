"""The end of a run: bytes predicted and bytes counted are compared row by row."""

from unittest.mock import patch

import pytest
import torch

from howdah.sim.traffic import Traffic
from howdah.train import loop
from howdah.train.finish import sent

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

    def chatty(stepper, batch, **rest):
        stepper.mesh.world.broadcast(torch.zeros(3), 0)
        return step_of(stepper, batch, **rest)

    with patch.object(loop, "train_step", chatty):
        loop.train(job, transport)


def test_a_run_tells_what_it_was_not_predicted_to_send(workers, make_job, tmp_path):
    job = make_job("a", "layout=dp2", "pace.steps=2")
    workers.run(train_chatty, job, ranks=2)
    lines = (tmp_path / "a" / "log.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("sent "))
    assert line.endswith("NOT EQUAL in dp broadcast over shared, 0 and 24: please report this")
