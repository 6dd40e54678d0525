"""Rows of a batch: which process and which micro-batch gets them.

    dp2 x2, 10 rows     process 0: rows 0 1 | 2 3 4      process 1: 5 6 | 7 8 9

A batch is a tensor, or a tuple, list, dict or named tuple of tensors with equally many rows, which
are the elements along dim 0. What is no tensor goes to every micro-batch as it is. Each micro-batch
counts by its rows, so the loss and the gradients are means over the whole batch, also where rows do
not divide evenly.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from howdah.base.errors import UserError, shown
from howdah.plan.flat_buffers import share


def count_rows(batch: Any) -> int:
    """The number of rows. Raises UserError for a batch without tensors, or of several numbers."""
    counts = {len(tensor) if tensor.ndim else -1 for tensor in _tensors(batch)}
    if len(counts) != 1 or -1 in counts:
        there = "no tensor" if not counts else "tensors of different numbers of rows"
        raise UserError(
            f"the batch {shown(type(batch).__name__)} has {there}; give a tensor, or a tuple or "
            "dict of tensors whose dim 0 counts the same rows"
        )
    return counts.pop()


def cut(batch: Any, start: int, stop: int) -> Any:
    """The rows [start, stop) of a batch, in the same structure."""
    if isinstance(batch, Tensor):
        return batch[start:stop]
    if isinstance(batch, Mapping):
        return {key: cut(value, start, stop) for key, value in batch.items()}
    if isinstance(batch, list):
        return [cut(value, start, stop) for value in batch]
    if isinstance(batch, tuple):
        values = [cut(value, start, stop) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else tuple(values)
    return batch


def micros_of(
    rows: int, micros: int, *, replicas: int = 1, replica: int = 0
) -> list[tuple[int, int]]:
    """The ranges of rows of each micro-batch of a replica. Raises UserError if one has none."""
    if rows < replicas * micros:
        raise UserError(
            f"a batch of {rows} rows is too small for {replicas} processes with {micros} "
            f"micro-batches each; give at least {replicas * micros}"
        )
    first, last = share(rows, replicas, replica)
    ranges = (share(last - first, micros, number) for number in range(micros))
    return [(first + start, first + stop) for start, stop in ranges]


def as_arguments(rows: Any) -> tuple[Any, ...]:
    """The arguments of the function that computes the loss: the parts of a tuple, or the batch."""
    return tuple(rows) if isinstance(rows, tuple | list) else (rows,)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
