"""What each rank of a worker under `method.sync` pushes to servers and pulls, as in `tp2 server2`.

    unit layers.0   rank 0   |q k v o gate up down: its half |norms|      pushes and pulls all of it
                    rank 1   |q k v o gate up down: its half |norms|      pushes and pulls its half

Servers keep every element once. What several ranks of a worker hold alike, the first of them pulls
and gives to the others, so that a step uses one version of every weight, while servers go on.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from howdah.plan.flat_buffers import Buffer, Segment
from howdah.plan.heads import Range
from howdah.plan.plan import Plan
from howdah.plan.sharding import is_first, local_buffers, placement


def pushed_ranges(buffer: Buffer, plan: Plan, rank: int) -> Iterator[Range]:
    """The ranges of a buffer that `rank` pushes to servers, and pulls."""
    for first, *run in _runs(buffer, lambda one: is_first(one.name, plan, rank)):
        if first:
            yield run[0], run[1]


class ServedRange(NamedTuple):
    """The elements [start, stop) of a buffer of one of a worker's ranks, which servers keep."""

    rank: int
    buffer: Buffer
    start: int
    stop: int


def whole(buffer: Buffer) -> ServedRange:
    """A buffer of a worker that is one rank."""
    return ServedRange(0, buffer, 0, buffer.length)


def served_ranges(plan: Plan) -> list[ServedRange]:
    """What servers share out, in the order in which a worker uses it: each element once."""
    held = (local_buffers(plan, rank) for rank in range(plan.layout.tp))
    return [
        ServedRange(rank, buffer, *one)
        for turn in zip(*held, strict=True)
        for rank, buffer in enumerate(turn)
        for one in pushed_ranges(buffer, plan, rank)
    ]


def served_buffers(plan: Plan) -> list[Buffer]:
    """What servers share out, as buffers of which each of them has a range."""
    return [replace(one.buffer, length=one.stop - one.start) for one in served_ranges(plan)]


def alike(buffer: Buffer, plan: Plan, rank: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Yields what other ranks of a worker hold too: the ranks, the first of which pulls it and
    gives it to the others, and its range of a buffer of `rank`.
    """

    def holders(one: Segment) -> tuple[int, ...]:
        placed = placement(plan.weight(one.name), plan, rank)
        return placed.holders if placed else ()

    return (run for run in _runs(buffer, holders) if len(run[0]) > 1)


def _runs(buffer: Buffer, of: Callable[[Segment], Any]) -> Iterator[tuple[Any, int, int]]:
    """Yields the runs of segments of which `of` is the same, with the padding behind them."""
    edges, at = [*(one.start for one in buffer.segments), buffer.length], 0
    for value, run in groupby(buffer.segments, of):
        first, at = at, at + len([*run])
        yield value, edges[first], edges[at]
