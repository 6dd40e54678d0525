"""The table of schedules by name, from which a layout or a method chooses one."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from howdah.base.errors import UserError, nearest, shown
from howdah.plan.schedule.actions import Schedule
from howdah.plan.schedule.gpipe import gpipe, naive
from howdah.plan.schedule.interleaved import interleaved
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.pipedream import pipedream, pipedream_2bw
from howdah.plan.schedule.terapipe import terapipe
from howdah.plan.schedule.zero_bubble import zero_bubble_h1, zero_bubble_h2
from howdah.plan.schedule.zero_bubble_v import zero_bubble_v

MOST = 1 << 17  # most forwards that a schedule may have


class Family(NamedTuple):
    """One entry of the table: how to build the schedules of one name.

    build   function (ranks, micros) → Schedule, with the number named in `takes` as third argument
    about   one line for a list of schedules
    takes   "", "virtual" or "slices"
    keeps   whether training has the same result as on one device: false without a flush
    stages  stages on each rank, unless `takes` is "virtual"
    folded  whether the stages go down the ranks and back up, so that a rank has both ends
    split   whether backward passes are split into an input half and a weight half
    steady  whether the activations it holds stop growing once a rank has 4 micro-batches for each
            of its stages: a plan may then count the schedule of that many
    fills   function (ranks) → micro-batches that it is built with at least, and then shortened
    """

    build: Callable[..., Schedule]
    about: str
    takes: str = ""
    keeps: bool = True
    stages: int = 1
    folded: bool = False
    split: bool = False
    steady: bool = False
    fills: Callable[[int], int] = lambda ranks: 1


SCHEDULES = {
    "naive": Family(
        naive, "one micro-batch at a time; one rank works, the others wait", steady=True
    ),
    "gpipe": Family(gpipe, "all forwards, then all backwards; holds every micro-batch"),
    "1f1b": Family(
        one_f_one_b, "forwards and backwards in turn: GPipe's bubble, p held at most", steady=True
    ),
    "interleaved": Family(
        interleaved, "1F1B with v stages on each rank: a bubble v times as short", "virtual"
    ),
    "zb-h1": Family(
        zero_bubble_h1,
        "1F1B with split backwards: a third of its bubble",
        split=True,
        steady=True,
    ),
    "zb-h2": Family(
        zero_bubble_h2,
        "no bubble between steps, in twice the memory of 1F1B",
        split=True,
        steady=True,
    ),
    "zb-v": Family(
        zero_bubble_v,
        "no bubble between steps, in 1F1B's memory; two stages a rank",
        stages=2,
        folded=True,
        split=True,
        steady=True,
        fills=lambda ranks: 2 * ranks - 1,
    ),
    "terapipe": Family(
        terapipe, "1F1B over token slices: a bubble as many times as short", "slices", steady=True
    ),
    "pipedream": Family(
        pipedream, "1F1B without flush: an update after every backward, p versions", keeps=False
    ),
    "pipedream-2bw": Family(
        pipedream_2bw, "1F1B without flush: an update every p backwards, 2 versions", keeps=False
    ),
}

# For each extra number, the schedule that takes it and its meaning; used in error messages.
TAKERS = {
    "virtual": ("interleaved", "several stages on each rank"),
    "slices": ("terapipe", "token slices of a micro-batch"),
}


@lru_cache(2)  # called for each rank of a plan
def build(name: str, *, ranks: int, micros: int, virtual: int = 1, slices: int = 1) -> Schedule:
    """The schedule `name` on `ranks` ranks for `micros` micro-batches.

    virtual  stages on each rank; `interleaved` takes 2 or more, `zb-v` always has 2
    slices   token slices of each micro-batch; `terapipe` takes 2 or more

    Raises UserError for an unknown name (the message names the nearest known one), for a number
    that does not fit the schedule, and for a schedule that is too long.
    """
    if name not in SCHEDULES:
        raise UserError(f"schedule {shown(name)} is unknown{nearest(name, SCHEDULES)}")
    family = SCHEDULES[name]
    numbers = {"ranks": ranks, "micros": micros, "virtual": virtual, "slices": slices}
    for word, number in numbers.items():
        if number < 1:
            raise UserError(f"schedule {name}: {word} is {number}; it must be at least 1")
    _check_taken(name, family, "virtual", virtual)
    _check_taken(name, family, "slices", slices)
    stages = ranks * max(virtual, family.stages)
    check_size(name, stages=stages, micros=max(micros, family.fills(ranks)), slices=slices)
    third = {family.takes: numbers[family.takes]} if family.takes else {}
    return family.build(ranks, micros, **third)


def check_size(name: str, *, stages: int, micros: int, slices: int) -> None:
    """Raises UserError for a schedule that is too long to list: more than MOST forwards."""
    size = stages * micros * slices
    if size > MOST:
        raise UserError(
            f"schedule {name}: {stages:,} stages with {micros:,} micro-batches"
            + (f" of {slices:,} slices" if slices > 1 else "")
            + f" have {size:,} forwards, and {MOST:,} are the most; use fewer of them"
        )


def _check_taken(name: str, family: Family, word: str, number: int) -> None:
    other, what = TAKERS[word]
    if family.takes == word:
        if number == 1:
            raise UserError(f"schedule {name} needs {what}: use {word}=2 or more, or schedule 1f1b")
    elif number > 1 and (word, number) != ("virtual", family.stages):
        raise UserError(
            f"schedule {name} does not take {word}={number}: use {word}=1, or schedule {other}, "
            f"which has {what}"
        )
