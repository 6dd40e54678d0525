"""Layers to pipeline stages: evenly, or by cost.

In forward order a model is a row of parts, and a stage is a run of them. Embedding and head are
parts of their own cost, so stages may be uneven in layers: BLOOM's 70 on 12 stages
(https://arxiv.org/abs/2211.05100), where each part counts the same:

    [embedding 0 1 2 3 4] [5 6 7 8 9 10] … [59 60 61 62 63 64] [65 66 67 68 69 head]

A part is a place in the model, not a weight: a tied weight is used at both ends, and lives
wherever "embedding" or "head" does.

`where` says which rank runs each stage. With three ranks:

    stage       0 1 2 3 4 5
    looped      0 1 2 0 1 2     each round more makes the bubble shorter
                                (https://arxiv.org/abs/2104.04473, section 2.2)
    v_shaped    0 1 2 2 1 0     rank 0 has the first and the last stage, so activations
                                take equal memory everywhere (https://arxiv.org/abs/2401.10241)
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, islice, pairwise
from math import inf, lcm

from howdah.base.errors import UserError
from howdah.shapes.part import Part


@dataclass(frozen=True)
class Stages:
    """parts[stage] in forward order, and the pipeline rank that runs it, where[stage]."""

    parts: tuple[tuple[Part, ...], ...]
    where: tuple[int, ...]


# -- which rank runs a stage ---------------------------------------------------


def looped(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """Stage s on rank s mod ranks, `virtual` stages on each."""
    return tuple(range(ranks)) * virtual


def v_shaped(ranks: int) -> tuple[int, ...]:
    """Down the ranks and back up: stages r and 2·ranks - 1 - r on rank r."""
    return (*range(ranks), *reversed(range(ranks)))


def stages_of(where: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The stages that `rank` runs."""
    return tuple(stage for stage, home in enumerate(where) if home == rank)


# -- which parts a stage has ---------------------------------------------------


def even(parts: Sequence[Part], where: tuple[int, ...]) -> Stages:
    """Numbers of layers that differ by at most one.

    Other parts go with the layer after them, the head with the last. Stages in the middle get
    the layer more, since the ends also have embedding and head. When all but one get it, the
    last goes without: a head costs time, an embedding only memory.
    Raises UserError for more stages than layers.
    """
    layers = [index for index, part in enumerate(parts) if part.is_block]
    _check_enough(len(layers), where, "layers")
    size, more = divmod(len(layers), len(where))
    first = (len(where) - more) // 2
    sizes = [size + (first <= stage < first + more) for stage in range(len(where))]
    inner = [layers[end - 1] + 1 for end in accumulate(sizes[:-1])]
    return _cut(parts, [0, *inner, len(parts)], where)


def by_cost(costs: Mapping[Part, float], where: tuple[int, ...]) -> Stages:
    """The stages whose costliest costs least; `costs` of all parts, in forward order, any unit.

    Of those the most even, by the sum of squares; of those again, the one with the shortest
    early stages, which hold the most micro-batches in flight. n parts on p stages take n·p·log n
    steps. Raises UserError for more stages than parts.
    """
    _check_enough(len(costs), where, "parts")
    if not all(0 <= cost < inf for cost in costs.values()):
        raise ValueError(f"a cost is negative or not a number: {dict(costs)}")
    # As whole numbers, or rounding would decide between stages that cost the same.
    exact = [Fraction(cost) for cost in costs.values()]
    unit = lcm(*(cost.denominator for cost in exact))
    ends = list(accumulate((int(cost * unit) for cost in exact), initial=0))
    most = _least_most(ends, len(where))
    return _cut(tuple(costs), _most_even(ends, len(where), most), where)


def _reach(ends: list[int], most: int) -> Iterator[int]:
    """How many parts fit at most into 1, 2, ... stages that cost no more than `most` each.

    ends[n] is the cost of the first n parts.
    """
    stop = 0
    while True:
        stop = bisect_right(ends, ends[stop] + most) - 1
        yield stop


def _least_most(ends: list[int], stages: int) -> int:
    """The least that the costliest of so many stages can cost."""
    low = max(after - before for before, after in pairwise(ends))  # a stage has a part
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        last = next(islice(_reach(ends, middle), stages - 1, None))
        low, high = (low, middle) if last == len(ends) - 1 else (middle + 1, high)
    return low


def _most_even(ends: list[int], stages: int, most: int) -> list[int]:
    """The boundaries of the stages, none costlier than `most`, with the least sum of squares; of
    equals the earliest, from the back.

    The best start of a last stage is not later for an earlier stop, for squares are convex. So
    each half of the stops has its own half of the starts to look at.
    """
    values, starts = {0: 0}, list[dict[int, int]]()
    for stage, reach in zip(range(stages), _reach(ends, most), strict=False):
        before, values = values, {}
        starts.append({})
        last = min(reach, len(ends) - stages + stage)  # the stages to come have a part each
        halves = [(stage + 1, last, stage, last)]
        while halves:
            low, high, first, latest = halves.pop()
            stop = (low + high) // 2
            begin = max(first, bisect_left(ends, ends[stop] - most))
            values[stop], start = min(
                (before[start] + (ends[stop] - ends[start]) ** 2, start)
                for start in range(begin, min(latest, stop - 1) + 1)
                if start in before
            )
            starts[-1][stop] = start
            halves += [(low, stop - 1, first, start)] if low < stop else []
            halves += [(stop + 1, high, start, latest)] if stop < high else []
    cuts = [len(ends) - 1]
    for found in reversed(starts):
        cuts.append(found[cuts[-1]])
    return cuts[::-1]


def _cut(parts: Sequence[Part], cuts: Sequence[int], where: tuple[int, ...]) -> Stages:
    return Stages(tuple(tuple(parts[start:stop]) for start, stop in pairwise(cuts)), where)


def _check_enough(count: int, where: tuple[int, ...], what: str) -> None:
    if len(where) <= count:
        return
    ranks = max(where) + 1
    virtual = len(where) // ranks
    fits = (count // virtual, virtual) if count >= virtual else (1, count)
    raise UserError(
        f"layout: {_spell(ranks, virtual)} makes {len(where)} stages, and the model has only "
        f"{count} {what}; use at most {_spell(*fits)}"
    )


def _spell(ranks: int, virtual: int) -> str:
    return f"pp{ranks}" if virtual == 1 else f"pp{ranks} v{virtual}"
