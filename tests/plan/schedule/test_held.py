"""What a rank holds, counted again by brute force."""

import pytest
from reference import SIZES

from howdah.plan.schedule.actions import Kind, Schedule
from howdah.plan.schedule.held import held_over_time, peak_held
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.zero_bubble_v import zero_bubble_v

RELEASES = (Kind.BACKWARD, Kind.WEIGHT)


def test_over_time():
    assert held_over_time(one_f_one_b(3, 4), 0) == [1, 2, 3, 2, 3, 2, 1, 0]
    assert peak_held(one_f_one_b(3, 4), 0) == 3
    assert peak_held(Schedule("none", 1, 1, 1, ((),)), 0) == 0


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_sizes_are_counted_per_stage(ranks, micros):
    schedule = zero_bubble_v(ranks, micros)
    sizes = [10**stage for stage in range(2 * ranks)]
    for rank, program in enumerate(schedule.programs):
        held = set()
        for action, size in zip(program, held_over_time(schedule, rank, sizes=sizes), strict=True):
            if action.kind is Kind.FORWARD:
                held.add(action[1:])
            elif action.kind in RELEASES:
                held.remove(action[1:])
            assert size == sum(sizes[stage] for stage, _, _ in held)
        assert held == set()
        assert peak_held(schedule, rank, sizes=sizes) == max(
            held_over_time(schedule, rank, sizes=sizes)
        )
