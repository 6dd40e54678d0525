"""Reductions: several parts into one, in rank order.

    out = ((part 0 + part 1) + part 2) + …

Additions of floats depend on their order. Whoever adds here adds in the order of the ranks, so
that every transport gives every rank the same bits. bf16 and fp16 are added in float32 and
rounded once, at the end.
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
    """Raises UserError, at the call, for what cannot be reduced."""
    if op not in COMBINE:
        raise UserError(f"there is no reduction {op!r}{nearest(op, COMBINE)}")
    if dtype not in REDUCIBLE:
        raise UserError(f"a tensor of {dtype} cannot be reduced: cast it, to float32 for example")
    if op == "mean" and not dtype.is_floating_point:
        raise UserError(f"the mean of {dtype} is not a whole number: reduce the sum, or cast it")


def reduce_in_order(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """`out` becomes the reduction of the parts, flat tensors of its size.

    It may be one of the parts. Where that is neither of the first two, part 0 takes the running
    sum and is changed by it.
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
