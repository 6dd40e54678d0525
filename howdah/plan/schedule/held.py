"""How much a rank holds: the memory of a schedule, before any tensor exists.

    1F1B, rank 0 of 3      F0 F1 F2 B0 F3 B1 B2 B3
    held after each         1  2  3  2  3  2  1  0        peak 3

A forward takes the activations of its (stage, micro, slice). The whole backward B releases them,
or W where it is split: I needs some of them and W others, and nothing is released at I. An
executor that does release a part there holds less than what is said here.
"""

from collections.abc import Sequence

from howdah.plan.schedule.actions import Kind, Schedule

TAKES = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1, Kind.UPDATE: 0}


def held_over_time(
    schedule: Schedule, rank: int, *, sizes: Sequence[int] | None = None
) -> list[int]:
    """What `rank` holds after each of its actions.

    sizes[stage] is what one slice of one micro-batch takes there, in bytes for instance; without
    it, (stage, micro, slice) are counted.
    """
    held, over_time = 0, []
    for action in schedule.programs[rank]:
        held += TAKES[action.kind] * (1 if sizes is None else sizes[action.stage])
        over_time.append(held)
    return over_time


def peak_held(schedule: Schedule, rank: int, *, sizes: Sequence[int] | None = None) -> int:
    """The most that `rank` holds at once, in units of `held_over_time`."""
    return max(held_over_time(schedule, rank, sizes=sizes), default=0)
