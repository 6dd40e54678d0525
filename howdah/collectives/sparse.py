"""The all-reduce of sparse gradients: rows of an embedding, as (number of the row, its values).

How many rows a rank has is known only when it has them, and a sum of two ranks has as many rows as
the two have different ones. So no program, which is made before, can add on the way. Instead all
rows are gathered, by a program whose chunks are as large as the ranks' rows, after an all-gather of
their counts; then each rank adds them by itself, in the order of ranks:

    rank 0   rows 1 4      ->   1 4 | 4 | 1 7   ->   rows 1 4 7, equal bits on all ranks
    rank 1   rows 4
    rank 2   rows 1 7

With density d, the part of the rows that a rank has, it sends (P-1)·d·n·(1 + index/values) bytes in
place of 2(P-1)/P·n: `pays_below` is the density where both are equal. It falls with the ranks.
"""

from collections.abc import Sequence

import numpy as np

from howdah.collectives.execute import Array, run
from howdah.collectives.program import Program

Rows = tuple[Array, Array]  # numbers [rows], values [rows, width]


def sparse_all_reduce(gather: Program, inputs: Sequence[Rows]) -> list[Rows]:
    """The sum on each rank: its rows in ascending order, each once.

    gather  an all-gather for as many ranks as there are inputs
    inputs  rows of each rank; a number may occur several times
    """
    width = inputs[0][1].shape[1]
    numbers = run(gather, [numbers for numbers, _ in inputs])
    values = run(gather, [rows.reshape(-1) for _, rows in inputs])
    return [_sum(n, v.reshape(-1, width)) for n, v in zip(numbers, values, strict=True)]


def pays_below(ranks: int, *, value_bytes: int, index_bytes: int = 8) -> float:
    """The part of the rows below which a rank sends less than in a dense all-reduce.

    value_bytes  of all values of a row

    >>> pays_below(4, value_bytes=4096)
    0.49902534113060426
    """
    return 2 * value_bytes / (ranks * (value_bytes + index_bytes))


def _sum(numbers: Array, values: Array) -> Rows:
    """Equal numbers once; their values are added in the order in which they stand."""
    found, places = np.unique(numbers, return_inverse=True)
    total = np.zeros((len(found), values.shape[1]), values.dtype)
    np.add.at(total, places, values)
    return found, total
