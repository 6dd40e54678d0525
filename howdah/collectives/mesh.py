"""Meshes: grids whose lines do not close to rings, so each line works from both ends.

    share 1 of a line of four:    0 -> 1 <- 2 <- 3      its sum flows to rank 1 from both sides

Rank i of a line of X sends (X-1-i)/X of the vector to the right and i/X to the left: (X-1)/X in
total, in X-1 rounds, as on a ring. But a ring would need a wire from the last rank to the first.

    all_reduce/mesh: 6 ranks, 6 chunks, 6 rounds, a rank sends 3/2 to 2 vectors
            1           2      3              4            5        6
    rank 0  3-5>1 +0-2  2>2    1>2 +0         0>2 =1       =2       0-2>1 =3-5
    rank 1  0-2>0 +3-5  5>3    4>3 +3         3>3 =4       =5       3-5>0 =0-2
    rank 2  3-5>3 +0-2  +2 +0  2>4 0>0 +1 +1  1>4,0 =0 =2  0>4 2>0  0-2>3 =3-5
    rank 3  0-2>2 +3-5  +5 +3  5>5 3>1 +4 +4  4>5,1 =3 =5  3>5 5>1  3-5>2 =0-2
    rank 4  3-5>5 +0-2  0>2    1>2 +2         2>2 =1       =0       0-2>5 =3-5
    rank 5  0-2>4 +3-5  3>3    4>3 +5         5>3 =4       =3       3-5>4 =0-2
    3-5>1: chunks to rank 1, +: added to what is there, =: kept

    all_reduce/mesh_rows_then_columns: 6 ranks, 6 chunks, 6 rounds, a rank sends 2 to 3 vectors
            1           2           3          4                      5                  6
    rank 0  3-5>1 +0-2  0-2>1 =3-5  4-5>2      2-3>2 +0-1             0-1>2 =2-3         =4-5
    rank 1  0-2>0 +3-5  3-5>0 =0-2  4-5>3      2-3>3 +0-1             0-1>3 =2-3         =4-5
    rank 2  3-5>3 +0-2  0-2>3 =3-5  +4-5 +0-1  4-5>4 0-1>0 +2-3 +2-3  2-3>4,0 =0-1 =4-5  0-1>4 4-5>0
    rank 3  0-2>2 +3-5  3-5>2 =0-2  +4-5 +0-1  4-5>5 0-1>1 +2-3 +2-3  2-3>5,1 =0-1 =4-5  0-1>5 4-5>1
    rank 4  3-5>5 +0-2  0-2>5 =3-5  0-1>2      2-3>2 +4-5             4-5>2 =2-3         =0-1
    rank 5  0-2>4 +3-5  3-5>4 =0-2  0-1>3      2-3>3 +4-5             4-5>3 =2-3         =0-1
    3-5>1: chunks to rank 1, +: added to what is there, =: kept
"""

from collections.abc import Sequence

from howdah.collectives.dims import gather_along, in_order, reduce_along
from howdah.collectives.limits import grid_dims
from howdah.collectives.program import Message, Part, Program, Spans, cut, program, span, then


def reduce_line(group: Sequence[int], shares: Sequence[Spans]) -> Part:
    """Rank group[i] ends with the sum of shares[i]; the shares of the farthest ranks go first."""
    size = len(group)
    right = [
        Message(size - 1 - j + i, group[i], group[i + 1], shares[j], add=True)
        for j in range(size)
        for i in range(j)
    ]
    left = [
        Message(j + size - 1 - i, group[i], group[i - 1], shares[j], add=True)
        for j in range(size)
        for i in range(j + 1, size)
    ]
    return right + left


def all_reduce(ranks: int, *, dims: tuple[int, ...] | None = None) -> Program:
    """The form that sends the least: reduce-scatter along rows, all-reduce of the rest along
    columns, all-gather along rows.
    """
    sizes = grid_dims(ranks, dims, 2, who="all_reduce/mesh")
    order = range(len(sizes))[::-1]
    down = reduce_along(sizes, order, in_order(sizes, order), reduce_line)
    part = then(*down, *gather_along(down))
    return program("all_reduce", "mesh", ranks, ranks, part)


def rows_then_columns(ranks: int, *, dims: tuple[int, ...] | None = None) -> Program:
    """The simple form: an all-reduce of the whole vector along the rows, then along the columns."""
    sizes = grid_dims(ranks, dims, 2, who="all_reduce/mesh_rows_then_columns")
    parts: list[Part] = []
    for dim in range(len(sizes))[::-1]:
        shares = cut(span(0, ranks), sizes[dim])
        stride = ranks
        for size in sizes[: dim + 1]:
            stride //= size
        owned = [shares[rank // stride % sizes[dim]] for rank in range(ranks)]
        down = reduce_along(sizes, [dim], owned, reduce_line)
        parts += [*down, *gather_along(down)]
    return program("all_reduce", "mesh_rows_then_columns", ranks, ranks, then(*parts))
