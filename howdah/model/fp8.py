"""Linears in 8 bits (`method.precision = "fp8"`), with one scale for each tensor.

    forward     y  = x · wᵀ     x and w in e4m3: 3 bits of fraction, up to 448
    backward    dx = g · w      g in e5m2: 2 bits, up to 57,344, for gradients span more
                dw = gᵀ · x

Before each product a tensor is divided by a scale that makes its largest element the largest number
of the format, and rounded (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433). Scales are
made at each use from the tensor itself: nothing is remembered from step to step. Products are added
in float32. Embedding, head, norms, attention and optimizer stay as under bf16, and so does what is
kept for the backward pass.

On a GPU the products are `torch._scaled_mm`. Elsewhere they are the same numbers multiplied in
float32: what tests compare with. A scale is that of a micro-batch on a rank, so two layouts differ
by the noise of the format; `verify` proves a layout in other precisions.
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import promoted
from howdah.model.norm import Weight

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
STEP = 16  # sizes that torch._scaled_mm multiplies are multiples of it


class Scaled(NamedTuple):
    """A matrix in 8 bits: `numbers` [m, k] times `scale`, a float32 scalar."""

    numbers: Tensor
    scale: Tensor

    def turned(self) -> "Scaled":
        """The transposed matrix, in memory of its own."""
        return Scaled(self.numbers.t().contiguous(), self.scale)


def quantised(x: Tensor, dtype: torch.dtype) -> Scaled:
    """The matrix x [m, k] in 8 bits. Zeros stay zeros; what is not finite spoils the scale, so that
    the step is noticed.
    """
    top = torch.finfo(dtype).max
    largest = x.abs().amax().to(torch.float32)
    least = torch.finfo(torch.float32).tiny  # a scale of 0 would make zeros NaN
    scale = torch.where(largest == 0, 1.0, (largest / top).clamp(min=least))
    return Scaled((x.to(promoted(x.dtype)) / scale).clamp(-top, top).to(dtype), scale)


def product(left: Scaled, right: Scaled, dtype: torch.dtype, *, quick: bool = False) -> Tensor:
    """left [m, k] · rightᵀ [n, k] → [m, n] of `dtype`, added in float32.

    quick  sum in fewer bits than float32 where the GPU can: for forward passes
    """
    if not left.numbers.is_cuda:
        wide = left.numbers.to(torch.float32) @ right.numbers.to(torch.float32).t()
        return (wide * (left.scale * right.scale)).to(dtype)
    short = -left.numbers.shape[1] % STEP  # padding by nothing would copy
    a, b = (F.pad(one.numbers, (0, short)) if short else one.numbers for one in (left, right))
    return torch._scaled_mm(
        a, b.t(), left.scale, right.scale, out_dtype=dtype, use_fast_accum=quick
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
        mine = weight if isinstance(weight, Tensor) else None
        ctx.save_for_backward(x, mine)
        ctx.weight, ctx.bias = None if mine is not None else weight, bias
        left = quantised(x.detach().flatten(0, -2), FORWARD)
        out = product(left, quantised(_value(weight), FORWARD), x.dtype, quick=True)
        if bias is not None:
            out += _value(bias)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, mine = ctx.saved_tensors
        weight = ctx.weight if mine is None else mine
        rows = grad.flatten(0, -2)
        narrow = quantised(rows, BACKWARD)
        d_x = product(narrow, quantised(_value(weight), FORWARD).turned(), x.dtype)
        wide = promoted(x.dtype)

        def d_weight() -> Tensor:
            inputs = quantised(x.detach().flatten(0, -2), FORWARD)
            return product(narrow.turned(), inputs.turned(), wide)

        total = rows.sum(0, dtype=wide) if ctx.bias is not None else None
        d_bias = None
        if isinstance(ctx.bias, Tensor):
            d_bias = cast(Tensor, total).to(ctx.bias.dtype)
        elif ctx.bias is not None:
            ctx.bias.add(lambda out: out.add_(total))
        if mine is None:
            weight.add(lambda out: out.add_(d_weight()))
            return d_x.view(x.shape), None, d_bias
        return d_x.view(x.shape), d_weight().to(mine.dtype), d_bias


def _value(weight: Weight) -> Tensor:
    return weight.detach() if isinstance(weight, Tensor) else weight.value()


def linear(x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
    """x [..., in] · weightᵀ [out, in] + bias [out] → [..., out], in 8 bits."""
    return cast(Tensor, _Linear.apply(x, weight, bias))


class Fp8Linear(nn.Module):
    """Replaces nn.Linear, with its parameters."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] → [..., out]."""
        return linear(x, self.weight, self.bias)
