"""The moves of torch.distributed, by those of a transport: no element is combined with another.

A list of tensors goes as one flat tensor, which is a copy.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import apart
from howdah.comm.reduction import REDUCIBLE
from howdah.comm.staging import DIRECT, check_tensor
from howdah.comm.transport import Counts, Transport

NO_ROWS = (0, 0)


def broadcast(wire: Transport, x: Tensor, root: int) -> None:
    """x becomes the root's."""
    flat = DIRECT.take(x)
    wire.broadcast(flat, root)
    if wire.rank != root:
        DIRECT.give(x, flat)


def all_gather(wire: Transport, out: Tensor, x: Tensor) -> None:
    """`out` becomes the x of all ranks, which have as many elements."""
    into, own = DIRECT.take(out, NO_ROWS), DIRECT.take(x)
    at = into.data_ptr() + wire.rank * own.nbytes
    if own.data_ptr() != at and not apart(own, into):
        own = own.clone()
    wire.all_gather(into, own, [own.numel()] * wire.size)
    DIRECT.give(out, into)


def all_gather_list(wire: Transport, outs: Sequence[Tensor], x: Tensor) -> None:
    """outs[r] becomes the x of rank r, which may have a size of its own."""
    own = DIRECT.take(x)
    counts = _counts(outs)
    into = torch.empty(sum(counts), dtype=own.dtype)
    wire.all_gather(into, own, counts)
    _deal(into, outs, counts)


def gather(wire: Transport, outs: Sequence[Tensor], x: Tensor, root: int) -> None:
    """The root's outs[r] becomes the x of rank r."""
    own = DIRECT.take(x)
    if wire.rank != root:
        wire.gather(None, own, root, [own.numel()] * wire.size)
        return
    counts = _counts(outs)
    into = torch.empty(sum(counts), dtype=own.dtype)
    wire.gather(into, own, root, counts)
    _deal(into, outs, counts)


def scatter(wire: Transport, out: Tensor, xs: Sequence[Tensor], root: int) -> None:
    """`out` becomes the root's tensor for this rank."""
    into = DIRECT.take(out, NO_ROWS)
    whole = _row(xs) if wire.rank == root else None
    wire.scatter(into, whole, root, _counts(xs) if xs else [into.numel()] * wire.size)
    DIRECT.give(out, into)


def all_to_all_list(wire: Transport, outs: Sequence[Tensor], xs: Sequence[Tensor]) -> None:
    """outs[p] becomes what rank p has for this one."""
    sent, received, row = _counts(xs), _counts(outs), _row(xs)
    into = torch.empty(sum(received), dtype=row.dtype)
    wire.all_to_all(into, row, sent, received)
    _deal(into, outs, received)


def all_to_all(wire: Transport, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> None:
    """Slices of x go to all ranks, and those of out come from them."""
    into, flat = DIRECT.take(out, NO_ROWS), DIRECT.take(x)
    if not apart(into, flat):
        flat = flat.clone()
    wide = flat.numel() // x.numel() if x.numel() else into.numel() // max(out.numel(), 1)
    wire.all_to_all(into, flat, [n * wide for n in sent], [n * wide for n in received])
    DIRECT.give(out, into)


def elements(operation: str, x: Tensor, splits: Sequence[int], size: int) -> list[int]:
    """Numbers of elements of x for each rank. Raises UserError.

    splits  numbers of rows; none: as many for all
    """
    rows = x.shape[0] if x.ndim else 1
    if not splits:
        if rows % size:
            raise UserError(
                f"{operation}: {rows} rows cannot be cut for {size} ranks: give numbers of rows"
            )
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise UserError(f"{operation}: {list(splits)} cuts {rows} rows for {size} ranks: it must")
    width = x.shape[1:].numel()
    return [split * width for split in splits]


def check_whole(size: int, operation: str, part: Tensor, whole: Tensor) -> None:
    """Raises UserError unless `whole` is a part of each of `size` ranks."""
    check_tensor(operation, part, written=operation == "reduce_scatter")
    check_tensor(operation, whole, written=operation == "all_gather")
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise UserError(
            f"{operation}: {size} ranks have {part.numel()} elements of {part.dtype} each, and the "
            f"whole tensor {whole.numel()} of {whole.dtype}"
        )


def check_each(size: int, operation: str, xs: Sequence[Tensor], like: Tensor | None = None) -> None:
    """Raises UserError unless there is one tensor for each of `size` ranks, all of one dtype.

    like  a tensor of this dtype; None: the first one
    """
    if len(xs) != size:
        raise UserError(f"{operation}: {len(xs)} tensors for {size} ranks: give as many")
    dtype = (xs[0] if like is None else like).dtype
    for x in xs:
        check_tensor(operation, x, written=False)
        if x.dtype != dtype:
            raise UserError(f"{operation}: one tensor is of {x.dtype} and one of {dtype}")


def _counts(xs: Sequence[Tensor]) -> list[int]:
    """Their numbers of elements as they are sent; a dtype that cannot be added goes as bytes."""
    return [x.numel() if x.dtype in REDUCIBLE else x.nbytes for x in xs]


def _row(xs: Sequence[Tensor]) -> Tensor:
    """Tensors as one flat one."""
    return torch.cat([DIRECT.take(x) for x in xs])


def _deal(row: Tensor, outs: Sequence[Tensor], counts: Sequence[int]) -> None:
    """Writes one flat tensor to several."""
    for out, part in zip(outs, row.split(list(counts)), strict=True):
        out.detach().copy_(part.view(out.dtype).view(out.shape))
