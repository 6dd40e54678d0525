"""When a rank keeps the memory that it frees."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
from small_cases import case_of

from howdah.comm.transport import SingleRank
from howdah.train.loop import train
from howdah.train.report import predicted_memory
from howdah.train.room import keeps_freed


def mesh_of(plan, nodes=()):
    return SimpleNamespace(rank=0, layout=plan.layout, wires=SimpleNamespace(nodes=nodes))


@pytest.mark.parametrize(
    ("words", "times", "kept"),
    [
        ("dp2 zero1 x1", 0.5, True),
        ("dp2 zero1 x1", None, True),
        ("dp2 zero1 x1 optimizer=host", 4.1, True),
        ("dp2 zero1 x1 optimizer=host", 3.9, False),
        ("dp2 zero1 x1 activations=host", 3.9, False),
        ("dp2 zero1 x1 optimizer=host", None, True),  # a system that does not tell
        ("dp2 zero1 x1 optimizer=disk", 1e6, False),
        ("dp2 zero1 x1 optimizer=disk", None, False),
        ("dp2 zero1 x1 optimizer=host activations=disk", 1e6, False),
    ],
)
def test_freed_memory_is_kept_where_two_ranks_have_twice_the_bytes_of_the_plan(words, times, kept):
    """It was given back with any home off the device: a step took 40 % longer by it."""
    plan = case_of(words).plan
    there = None if times is None else int(times * sum(predicted_memory(plan, 0).values()))
    with patch("howdah.train.room.total_memory", lambda: there):
        assert keeps_freed(plan, mesh_of(plan)) == kept


def test_ranks_of_other_machines_take_no_memory_of_this_one():
    plan = case_of("dp2 zero1 x1 optimizer=host").plan
    there = int(3 * sum(predicted_memory(plan, 0).values()))
    with patch("howdah.train.room.total_memory", lambda: there):
        assert not keeps_freed(plan, mesh_of(plan, (0, 0)))
        assert keeps_freed(plan, mesh_of(plan, (0, 1)))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("home", "kept"), [("device", True), ("host", True), ("disk", False)])
def test_a_run_asks_for_what_its_homes_need(make_job, home, kept):
    job = make_job("a", "train.steps=1", f"layout=single x1 optimizer={home}")
    with patch("howdah.train.loop.keep_freed_memory") as asked:
        train(job, SingleRank())
    asked.assert_called_once_with(kept)
