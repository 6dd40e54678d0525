"""Products of rows with the matrices of several experts: each row with that of its own.

    rows     | expert 0 | 1 | expert 2     | ...        [n, in], sorted by expert
    weight   [E, out, in]                               one matrix for each expert
    out      rows of expert e · weight[e]ᵀ              [n, out]

A GPU takes all of it as one operation in bfloat16 (torch's grouped product, which knows the numbers
of rows as a tensor, so the host waits for nothing). Everywhere else it is a loop over experts. The
grouped product refuses gradients that are not dense, so they are made contiguous. Its branch has
not run on a GPU yet.

A weight is a parameter, or a handle that returns it and takes its gradient, as in `model/norm.py`.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import promoted
from howdah.model.loss import Add, add_product
from howdah.model.norm import Weight, keep, trained, value_of

Sizes = tuple[int, ...] | Tensor  # rows of each expert; on a GPU an int64 tensor


def grouped(x: Tensor, weight: Weight, sizes: Sizes) -> Tensor:
    """Rows x [n, in], of which each expert has `sizes`, times its matrix of weight [E, out, in]:
    [n, out].
    """
    return cast(Tensor, _Grouped.apply(x, weight, sizes))


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, sizes: Sizes) -> Tensor:
        keep(ctx, (x if trained(weight) else None,), (weight,), [])
        ctx.sizes = sizes
        return _product(x, cast(Tensor, value_of(weight)).mT, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad, sizes = grad.contiguous(), ctx.sizes
        d_x = _product(grad, cast(Tensor, value_of(ctx.handles[0] or weight)), sizes)
        if x is None:
            return d_x, None, None
        return d_x, give(ctx, 0, weight, lambda out: _add_products(out, grad, x, sizes)), None


def give(ctx: Any, at: int, parameter: Tensor | None, add: Add) -> Tensor | None:
    """Passes a weight's gradient on: adds it to the handle `at`, or returns that of a parameter, in
    at least float32. None where there is no such weight.
    """
    if ctx.handles[at] is not None:
        ctx.handles[at].add(add)
        return None
    if parameter is None:
        return None
    out = torch.zeros_like(parameter, dtype=promoted(parameter.dtype))
    add(out)
    return out


def _product(x: Tensor, matrices: Tensor, sizes: Sizes) -> Tensor:
    """Rows x [n, k] times matrices [E, k, m], each times its expert's: [n, m]."""
    if _takes_groups(x, matrices):
        return torch._grouped_mm(x, matrices, offs=_ends(sizes, x.device))
    out, stop = x.new_empty(len(x), matrices.shape[-1]), 0
    for matrix, (start, stop) in zip(matrices, _spans(sizes), strict=True):
        torch.mm(x[start:stop], matrix, out=out[start:stop])
    out[stop:] = 0  # rows that no expert takes (`model/places.py`); a GPU leaves them as they are
    return out


def _add_products(out: Tensor, grad: Tensor, x: Tensor, sizes: Sizes) -> None:
    """Adds gradᵀ · x of each expert's rows to its matrix of out [E, m, k]."""
    if _takes_groups(x, out):
        out.add_(torch._grouped_mm(grad.mT, x, offs=_ends(sizes, x.device)))
        return
    for matrix, (start, stop) in zip(out, _spans(sizes), strict=True):
        add_product(matrix, grad[start:stop].mT, x[start:stop])


def _takes_groups(x: Tensor, matrices: Tensor) -> bool:
    """Whether torch has one product for all groups of such rows: lines are of 16 bytes."""
    lines = (x.shape[-1], *matrices.shape[1:])
    even = all(size % 8 == 0 for size in lines)
    return x.is_cuda and x.dtype == torch.bfloat16 and even and hasattr(torch, "_grouped_mm")


def _ends(sizes: Sizes, device: torch.device) -> Tensor:
    """Where the rows of each expert end."""
    counts = sizes if isinstance(sizes, Tensor) else torch.tensor(sizes, device=device)
    return counts.cumsum(0).to(torch.int32)


def _spans(sizes: Sizes) -> Iterator[tuple[int, int]]:
    """The rows [start, stop) of each expert."""
    counts = sizes.tolist() if isinstance(sizes, Tensor) else sizes
    return pairwise(accumulate(counts, initial=0))


class ExpertMatrix(nn.Module):
    """One matrix of each of `experts`, stacked: weight [E, out, in]."""

    weight: Weight

    def __init__(self, experts: int, columns: int, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Map rows x [n, in] → [n, out], each by its expert's matrix."""
        return grouped(x, self.weight, sizes)
