"""Reductions: combines the terms of all ranks into one tensor, in rank order.

    out = ((term 0 + term 1) + term 2) + …

The result of float additions depends on their order. All additions here are in rank order, so that
every transport gives every rank the same bits. bf16 and fp16 are added in float32 and rounded once,
at the end.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from howdah.base.errors import UserError, nearest

REDUCIBLE = (
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64),
)
COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
HALF = (torch.bfloat16, torch.float16)
BLOCK = 1 << 17  # elements: a block's float32 sums stay in the cache


def check_reduction(dtype: torch.dtype, op: str) -> None:
    """Raises UserError if tensors of `dtype` cannot be reduced by `op`."""
    if op not in COMBINE:
        raise UserError(f"there is no reduction {op!r}{nearest(op, COMBINE)}")
    if dtype not in REDUCIBLE:
        raise UserError(f"a tensor of {dtype} cannot be reduced: cast it, to float32 for example")
    if op == "mean" and not dtype.is_floating_point:
        raise UserError(f"the mean of {dtype} is not a whole number: reduce the sum, or cast it")


def reduce_in_order(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Writes the reduction of the terms to `out`.

    parts  the terms in rank order, flat tensors of the size of `out`

    `out` may be one of the terms. If it is neither of the first two, the running sum is kept in
    term 0, which is overwritten.
    """
    if out.dtype in HALF:
        for start in range(0, out.numel(), BLOCK):
            total = parts[0][start : start + BLOCK].float()
            _fold(total, [total, *(part[start : start + BLOCK] for part in parts[1:])], op)
            out[start : start + BLOCK] = total
    elif out.data_ptr() in [part.data_ptr() for part in parts[2:]]:
        _fold(parts[0], parts, op)
        out.copy_(parts[0])
    else:
        _fold(out, parts, op)


def _fold(into: Tensor, parts: Sequence[Tensor], op: str) -> None:
    combine = COMBINE[op]
    if len(parts) == 1:
        into.copy_(parts[0])
        return
    combine(parts[0], parts[1], out=into)
    for part in parts[2:]:
        combine(into, part, out=into)
    if op == "mean":
        into.div_(len(parts))
