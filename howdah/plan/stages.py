"""Divides a model into pipeline stages, evenly or by cost.

A model is a sequence of parts in forward order, and a stage is a contiguous range of them. The
embedding and the head are parts with costs of their own, so stages may differ in their number of
layers. BLOOM has 70 layers on 12 stages (https://arxiv.org/abs/2211.05100); every part costs the
same:

    [embedding 0 1 2 3 4] [5 6 7 8 9 10] … [59 60 61 62 63 64] [65 66 67 68 69 head]

A part is a position in the model, not a weight: a tied weight is used at both ends, and the ranks
of "embedding" and of "head" both hold it.

where[stage] is the rank that runs the stage. With three ranks:

    stage       0 1 2 3 4 5
    looped      0 1 2 0 1 2     each further round makes the bubble shorter
                                (https://arxiv.org/abs/2104.04473, section 2.2)
    v_shaped    0 1 2 2 1 0     rank 0 has the first and the last stage, so activations take
                                equal memory on all ranks (https://arxiv.org/abs/2401.10241)
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
    """The parts of each stage in forward order, parts[stage], and its rank, where[stage]."""

    parts: tuple[tuple[Part, ...], ...]
    where: tuple[int, ...]


# -- which rank runs a stage ---------------------------------------------------


def looped(ranks: int, virtual: int = 1) -> tuple[int, ...]:
    """The rank of each stage: stage s is on rank s mod `ranks`, and each rank has `virtual`."""
    return tuple(range(ranks)) * virtual


def v_shaped(ranks: int) -> tuple[int, ...]:
    """The rank of each stage, down the ranks and back up: rank r has r and 2·ranks - 1 - r."""
    return (*range(ranks), *reversed(range(ranks)))


def stages_of(where: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """The stages that `rank` runs."""
    return tuple(stage for stage, home in enumerate(where) if home == rank)


# -- which parts a stage has ---------------------------------------------------


def even(parts: Sequence[Part], where: tuple[int, ...]) -> Stages:
    """Stages whose numbers of layers differ by at most one.

    A part that is no layer joins the stage of the layer after it; the head joins the last stage.
    If the layers do not divide evenly, the middle stages have one more, since the outer stages also
    have embedding and head. If all stages but one have one more, the last has not: a head costs
    time, an embedding only memory. Raises UserError for more stages than layers.
    """
    layers = [index for index, part in enumerate(parts) if part.is_block]
    _check_enough(len(layers), where, "layers")
    size, more = divmod(len(layers), len(where))
    first = (len(where) - more) // 2
    sizes = [size + (first <= stage < first + more) for stage in range(len(where))]
    inner = [layers[end - 1] + 1 for end in accumulate(sizes[:-1])]
    return _cut(parts, [0, *inner, len(parts)], where)


def counted(parts: Sequence[Part], counts: Sequence[int], where: tuple[int, ...]) -> Stages:
    """Stages with so many blocks each, as many as the model has.

    A part that is no block joins the stage of the block after it, the head the last stage. A first
    stage without blocks has the embedding, a last one the head.
    """
    blocks = [index for index, part in enumerate(parts) if part.is_block]
    begins = [blocks[0], *(index + 1 for index in blocks)]  # begins[n]: after n blocks
    inner = [begins[done] for done in accumulate(counts[:-1])]
    return _cut(parts, [0, *inner, len(parts)], where)


def by_cost(costs: Mapping[Part, float], where: tuple[int, ...]) -> Stages:
    """The division into stages whose costliest stage costs least.

    costs  the cost of every part, in forward order, in any unit

    Of several such divisions it takes the most even, with the least sum of squared costs; of those,
    the one with the shortest early stages, which hold the most micro-batches in flight. For n parts
    on p stages this takes n·p·log n steps. Raises UserError for more stages than parts.
    """
    _check_enough(len(costs), where, "parts")
    if not all(0 <= cost < inf for cost in costs.values()):
        raise ValueError(f"a cost is negative or not a number: {dict(costs)}")
    # Integers, because rounding errors of floats would decide between stages of equal cost.
    exact = [Fraction(cost) for cost in costs.values()]
    unit = lcm(*(cost.denominator for cost in exact))
    ends = list(accumulate((int(cost * unit) for cost in exact), initial=0))
    most = _least_most(ends, len(where))
    return _cut(tuple(costs), _most_even(ends, len(where), most), where)


def _reach(ends: list[int], most: int) -> Iterator[int]:
    """The most parts that fit into 1, 2, ... stages, each of which costs at most `most`.

    ends[n] is the cost of the first n parts.
    """
    stop = 0
    while True:
        stop = bisect_right(ends, ends[stop] + most) - 1
        yield stop


def _least_most(ends: list[int], stages: int) -> int:
    """The lowest possible cost of the costliest of `stages` stages."""
    low = max(after - before for before, after in pairwise(ends))  # a stage has at least one part
    high = ends[-1]
    while low < high:
        middle = (low + high) // 2
        last = next(islice(_reach(ends, middle), stages - 1, None))
        low, high = (low, middle) if last == len(ends) - 1 else (middle + 1, high)
    return low


def _most_even(ends: list[int], stages: int, most: int) -> list[int]:
    """The boundaries of the stages with the least sum of squared costs, where no stage costs more
    than `most`; among equals the earliest, compared from the last boundary back.

    If a stage stops earlier, its best start is never later, because squares are convex. So the
    search splits: each half of the stops needs only its own half of the starts.
    """
    values, starts = {0: 0}, list[dict[int, int]]()
    for stage, reach in zip(range(stages), _reach(ends, most), strict=False):
        before, values = values, {}
        starts.append({})
        last = min(reach, len(ends) - stages + stage)  # a part for each later stage
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
