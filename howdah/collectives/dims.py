"""Algorithms on grids: ring, torus, mesh, hypercube and halving-doubling are one idea.

Ranks are numbered with the last dim fastest. A reduce-scatter goes along one dim after the other:
in each line of the dim, every rank keeps its share of what the line's ranks hold. Backwards it is
an all-gather. With dims of two, this is recursive halving and doubling.

    dims (2, 3): lines of dim 1   0 1 2   3 4 5      lines of dim 0   0 3   1 4   2 5
"""

from collections.abc import Callable, Sequence
from math import prod

from howdah.collectives.program import Part, Spans, chunk, join, mirror

Along = Callable[[Sequence[int], Sequence[Spans]], Part]  # a reduce-scatter of a line


def lines(dims: Sequence[int], dim: int) -> list[list[int]]:
    """The ranks of each line along a dim."""
    stride, size = prod(dims[dim + 1 :]), dims[dim]
    starts = (r for r in range(prod(dims)) if r // stride % size == 0)
    return [[start + i * stride for i in range(size)] for start in starts]


def in_order(dims: Sequence[int], order: Sequence[int], first: int = 0) -> list[Spans]:
    """The chunk that each rank owns at last, so that all messages are single ranges of chunks.

    Its digits are the rank's places in the dims of `order`; the lowest number is `first`.
    """
    owned = []
    for rank in range(prod(dims)):
        number = 0
        for dim in order:
            number = number * dims[dim] + rank // prod(dims[dim + 1 :]) % dims[dim]
        owned.append(chunk(first + number))
    return owned


def reduce_along(
    dims: Sequence[int], order: Sequence[int], owned: Sequence[Spans], along: Along
) -> list[Part]:
    """A part for each dim of `order`; at the end rank r has the sum of owned[r]."""
    parts: list[Part] = []
    for place, dim in enumerate(order):
        part: Part = []
        for line in lines(dims, dim):
            part += along(line, [_after(dims, order[place + 1 :], rank, owned) for rank in line])
        parts.append(part)
    return parts


def gather_along(reduces: Sequence[Part]) -> list[Part]:
    """The all-gather that undoes such a reduce-scatter."""
    return [mirror(part, add=False) for part in reversed(reduces)]


def _after(dims: Sequence[int], rest: Sequence[int], rank: int, owned: Sequence[Spans]) -> Spans:
    """What a rank holds when the dims of `rest` are still to come: the shares of all that differ
    from it in these dims alone.
    """
    found = [rank]
    for dim in rest:
        stride, size = prod(dims[dim + 1 :]), dims[dim]
        found = [r + (i - r // stride % size) * stride for r in found for i in range(size)]
    return join(owned[r] for r in found)
