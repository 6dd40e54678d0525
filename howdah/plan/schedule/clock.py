"""When each action runs, if every rank runs ahead as soon as it can and messages take no time.

    rank 0   F0F1      B0··B1··      0B0 needs what 1B0 makes: rank 0 idles for three seconds,
    rank 1     F0F1B0··B1··          and rank 1 for three, before its first and after its last

This is the simplest timing of a schedule: it follows from the order on each rank and the values
that each action needs, and nothing else. The papers' drawings use it. The lowering takes the order
of messages from it, and it detects schedules that cannot finish.
"""

from collections.abc import Callable
from typing import NamedTuple

from howdah.plan.schedule.actions import Action, Kind, Schedule, Value, makes, needs


class Deadlock(Exception):
    """Raised when every unfinished rank waits for a value that no rank will ever make."""


class Interval(NamedTuple):
    """When an action starts and ends, in seconds from the start of the step."""

    start: float
    end: float


# Durations in the papers' drawings. The unit is a forward; each half of a backward takes one unit.
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1, Kind.UPDATE: 0}


def units(action: Action) -> float:
    """Duration of an action in the papers' drawings, in forwards."""
    return UNITS[action.kind]


def clock(schedule: Schedule, seconds: Callable[[Action], float]) -> dict[Action, Interval]:
    """When each action of `schedule` starts and ends, if an action takes `seconds(action)`.

    Raises Deadlock, which names the value that each stuck rank waits for, if the schedule cannot
    finish.
    """
    runs: dict[Action, Interval] = {}
    made: dict[Value, float] = {}
    waiting: dict[Value, list[int]] = {}  # missing value → ranks whose next action needs it
    now = [0.0] * len(schedule.programs)
    todo = [list(reversed(program)) for program in schedule.programs]
    ready = list(range(len(todo)))
    while ready:
        rank = ready.pop()
        while todo[rank]:
            action = todo[rank][-1]
            needed = needs(action, schedule)
            lacks = next((value for value in needed if value not in made), None)
            if lacks is not None:
                waiting.setdefault(lacks, []).append(rank)
                break
            start = max([now[rank], *(made[value] for value in needed)])
            runs[action] = Interval(start, start + seconds(action))
            made[makes(action)] = now[rank] = runs[action].end
            ready += waiting.pop(makes(action), ())
            todo[rank].pop()
    if waiting:
        stuck = sorted((rank, value) for value, ranks in waiting.items() for rank in ranks)
        raise Deadlock("; ".join(_lack(rank, todo[rank][-1], value) for rank, value in stuck))
    return runs


def _lack(rank: int, action: Action, value: Value) -> str:
    return f"rank {rank} waits at {action} for {named(value)}"


def named(value: Value) -> str:
    """A value in the words of a sentence: the gradient of stage 2, micro-batch 0."""
    part = f", slice {value.slice}" if value.slice else ""
    return f"the {value.name} of stage {value.stage}, micro-batch {value.micro}{part}"
