"""How many activations a rank holds: the memory of a schedule, computed before any tensor exists.

    1F1B, rank 0 of 3      F0 F1 F2 B0 F3 B1 B2 B3
    held after each         1  2  3  2  3  2  1  0        peak 3

A forward adds the activations of its (stage, micro-batch, slice). The full backward B releases
them. If the backward is split, W releases them: I needs some of them and W needs others, and this
count releases nothing at I. An executor that frees some of them at I holds less than the count.
"""

from collections.abc import Sequence

from howdah.plan.schedule.actions import Kind, Schedule

TAKES = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.INPUT: 0, Kind.WEIGHT: -1, Kind.UPDATE: 0}


def held_over_time(
    schedule: Schedule, rank: int, *, sizes: Sequence[int] | None = None
) -> list[int]:
    """How much `rank` holds after each of its actions.

    sizes  sizes[stage] is the size of the activations of one slice of one micro-batch on that
           stage, in bytes for instance; None counts each (stage, micro-batch, slice) as 1
    """
    held, over_time = 0, []
    for action in schedule.programs[rank]:
        held += TAKES[action.kind] * (1 if sizes is None else sizes[action.stage])
        over_time.append(held)
    return over_time


def peak_held(schedule: Schedule, rank: int, *, sizes: Sequence[int] | None = None) -> int:
    """The most that `rank` holds at any time, in the units of `held_over_time`."""
    return max(held_over_time(schedule, rank, sizes=sizes), default=0)
