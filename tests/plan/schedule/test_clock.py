"""The clock: the same times as the simplest simulator, and a schedule that is stuck says where."""

import pytest
import reference
from hypothesis import given
from small_schedules import any_schedule, shipped

from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.clock import Deadlock, clock, units
from howdah.plan.schedule.registry import SCHEDULES, build


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_are_those_of_the_simplest_simulator(name):
    for schedule in shipped(name):
        assert clock(schedule, units) == reference.spans(schedule)


@given(any_schedule())
def test_so_are_those_of_any_schedule(schedule):
    costs = {Kind.FORWARD: 3, Kind.BACKWARD: 5, Kind.INPUT: 4, Kind.WEIGHT: 1}
    assert clock(schedule, lambda a: costs[a.kind]) == reference.spans(schedule, costs)


def test_the_example_of_the_docstring():
    schedule = build("gpipe", ranks=2, micros=2)
    runs = clock(schedule, units)
    starts = [
        {str(action): runs[action].start for action in program} for program in schedule.programs
    ]
    assert starts == [
        {"0F0": 0, "0F1": 1, "0B0": 5, "0B1": 7},
        {"1F0": 1, "1F1": 2, "1B0": 3, "1B1": 5},
    ]


def test_a_deadlock_says_what_everyone_waits_for():
    schedule = build("1f1b", ranks=3, micros=2)
    first, second, third = schedule.programs
    stuck = schedule._replace(programs=(first, second[::-1], third))
    with pytest.raises(Deadlock) as caught:
        clock(stuck, units)
    assert str(caught.value) == (
        "rank 0 waits at 0B0 for the gradient of stage 1, micro-batch 0; "
        "rank 1 waits at 1B1 for the activation of stage 1, micro-batch 1; "
        "rank 2 waits at 2F0 for the activation of stage 1, micro-batch 0"
    )


def test_a_slice_is_named_too():
    schedule = build("terapipe", ranks=1, micros=1, slices=2)
    (program,) = schedule.programs
    with pytest.raises(Deadlock, match=r"the gradient of stage 0, micro-batch 0, slice 1$"):
        clock(schedule._replace(programs=(program[:2] + program[3:],)), units)
