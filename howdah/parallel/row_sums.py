"""Sums an embedding's gradient over the replicas by its rows that are not zero (`comm.sparse`).

    rank 0   rows 1 4      1. all ranks hear how many rows each has
    rank 1   rows 4        2. each broadcasts the numbers of its rows, and their values
    rank 2   rows 1 7      3. each adds them, in the order of ranks: rows 1 4 7

A step touches the rows of its own tokens, and those of the whole vocabulary are many more. The sum
is that of the whole gradients, addition by addition, since all else is zero. Where some rank has so
many rows that it would send more than in a dense all-reduce (`collectives/sparse.py`), all ranks
take the dense one: the numbers of rows, which all have heard, decide.
"""

import torch
from torch import Tensor

from howdah.collectives.sparse import pays_below
from howdah.comm.group import Group
from howdah.plan.sum_order import Complete
from howdah.plan.sums import ROW_NUMBER_BYTES


def start_rows(group: Group, gradient: Tensor) -> Complete:
    """Starts to sum a gradient [rows, width] in place. Returns a function that completes it. All
    ranks of the group call together. The group's counters have how many rows this rank has sent.
    """
    numbers = gradient.ne(0).any(1).nonzero().flatten().to(torch.int32)
    heard = torch.empty(group.size, 1, dtype=torch.int64)
    mine = torch.tensor([len(numbers)])
    handle = group.gather_scalars(heard, mine, async_op=True)

    def complete() -> None:
        handle.result()
        counts = heard.flatten().tolist()
        width = gradient[0].nbytes
        limit = pays_below(group.size, value_bytes=width, index_bytes=ROW_NUMBER_BYTES)
        if max(counts) >= limit * len(gradient):
            group.all_reduce(gradient)
            group.counters.dense_sums += 1
        else:
            group.counters.rows_sent += len(numbers)
            _add_all(group, gradient, numbers, counts)

    return complete


def _add_all(group: Group, gradient: Tensor, numbers: Tensor, counts: list[int]) -> None:
    """Replaces the gradient by the sum of all ranks' rows."""
    every = numbers.new_empty(sum(counts)).split(counts)
    values = gradient.new_empty(sum(counts), gradient.shape[1]).split(counts)
    every[group.rank].copy_(numbers)
    torch.index_select(gradient, 0, numbers, out=values[group.rank])
    with group.together():
        for root in range(group.size):
            group.broadcast(every[root], root)
            group.broadcast(values[root], root)
    gradient.index_fill_(0, numbers.long(), 0)
    for rows, terms in zip(every, values, strict=True):
        gradient.index_add_(0, rows, terms)
