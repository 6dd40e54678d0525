"""Matrices of low rank beside frozen ones (LoRA, https://arxiv.org/abs/2106.09685), and lengths of
rows beside those (DoRA, https://arxiv.org/abs/2402.09353).

    x [.., in] ──┬── W [out, in] ───────────────────────┬── + ── v [.., out] ── · m/n ── y
                 └── A [r, in] ── B [out, r] ── · s ────┘

s is alpha/r. B starts at zero, so a model with fresh adapters computes what it computed without
them. LoRA ends at v. DoRA gives each row of W + s·B·A the length m that is trained: n are the
lengths that these rows have, and m starts as those of W. The backward pass takes n as a constant
(section 4.3 there, and PEFT). What was trained is W + s·B·A, with its rows brought to the lengths
m, which a model has place for (`merged`).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import promoted
from howdah.model.norm import Weight, give, keep, value_of
from howdah.plan.method import Adapter
from howdah.shapes.marks import Marks

ROWS = 1 << 22  # elements of W + s·B·A that are made at one time to measure its rows


class Magnitude(nn.Module):
    """The lengths m [out] of the rows of a matrix."""

    weight: Weight

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def forward(self, v: Tensor, norms: Tensor, bias: Weight | None) -> Tensor:
        """v [.., out] · m/norms + bias."""
        return cast(Tensor, _Magnified.apply(v, norms, self.weight, bias))


class AdaptedLinear(nn.Linear):
    """A linear with an adapter, of the same name; the adapter's are `lora_a` and `lora_b` in it,
    and with DoRA `lora_magnitude`.
    """

    def __init__(self, plain: nn.Linear, adapter: Adapter) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None)
        self.lora_a = nn.Linear(plain.in_features, adapter.rank, bias=False)
        self.lora_b = nn.Linear(adapter.rank, plain.out_features, bias=False)
        self.lora_magnitude = Magnitude(plain.out_features) if adapter.measures else None
        self.scale = adapter.scale

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] → [..., out]."""
        if self.lora_magnitude is None:
            return torch.add(super().forward(x), self.lora_b(self.lora_a(x)), alpha=self.scale)
        v = torch.add(F.linear(x, self.weight), self.lora_b(self.lora_a(x)), alpha=self.scale)
        norms = row_lengths(self.weight, self.lora_a.weight, self.lora_b.weight, self.scale)
        return cast(Tensor, self.lora_magnitude(v, norms, self.bias))


def adapt(model: nn.Module, marks: Marks, adapter: Adapter | None) -> None:
    """Gives linears of a model adapters; those that it does not have are left out."""
    if adapter is None:
        return
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and f"{path}.weight" in marks.adapted:
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, AdaptedLinear(module, adapter))


def merged(
    base: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """W + s·B·A in the dtype of W, computed in at least float32; with a `magnitude` [out], its rows
    brought to these lengths.
    """
    wide = promoted(base.dtype)
    whole = torch.addmm(base.to(wide), b.to(wide), a.to(wide), alpha=scale)
    if magnitude is not None:
        norms = lengths(whole.square().sum(1), wide)
        whole *= (magnitude.to(wide) / norms)[:, None]
    return whole.to(base.dtype)


# -- lengths of rows -----------------------------------------------------------


@torch.no_grad()
def row_squares(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The sums of squares [out] of the rows of W + s·B·A, in at least float32. Those of some
    columns of W and A are terms of these sums.
    """
    wide, few = promoted(base.dtype), max(ROWS // base.shape[1], 1)
    right, found = a.to(wide), base.new_empty(len(base), dtype=wide)
    for at in range(0, len(base), few):
        part = slice(at, at + few)
        whole = torch.addmm(base[part].to(wide), b[part].to(wide), right, alpha=scale)
        torch.sum(whole.square_(), 1, out=found[part])
    return found


@torch.no_grad()
def lengths(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """The lengths of rows with these sums of squares, as `dtype`; of a row of zeros, a number near
    zero by which can be divided. m is rounded to this dtype, too: so m/n starts as 1.
    """
    return squares.sqrt().clamp_min(torch.finfo(squares.dtype).tiny).to(dtype)


def row_lengths(base: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The lengths [out] of the rows of W + s·B·A, in the dtype of W."""
    return lengths(row_squares(base, a, b, scale), base.dtype)


def magnified(v: Tensor, norms: Tensor, magnitude: Weight, bias: Weight | None) -> Tensor:
    """v [.., out] · m/norms + bias, without a graph."""
    out = (v * _ratio(magnitude, norms)).to(v.dtype)
    return out if bias is None else out.add_(cast(Tensor, value_of(bias)))


def magnified_back(
    rows: Tensor, v: Tensor, norms: Tensor, magnitude: Weight
) -> tuple[Tensor, Tensor]:
    """From the gradient of the output, rows [n, out]: that of v, [n, out], and that of m, [out], in
    at least float32.
    """
    wide = promoted(norms.dtype)
    of_m = (rows.to(wide) * v.flatten(0, -2)).sum(0) / norms
    return (rows * _ratio(magnitude, norms)).to(rows.dtype), of_m


def _ratio(magnitude: Weight, norms: Tensor) -> Tensor:
    """m/n [out], in at least float32."""
    return cast(Tensor, value_of(magnitude)).to(promoted(norms.dtype)) / norms


class _Magnified(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, v: Tensor, norms: Tensor, magnitude: Weight, bias: Weight | None
    ) -> Tensor:
        keep(ctx, (v, norms), (magnitude, bias), [])
        return magnified(v, norms, magnitude, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        v, norms, *parameters = ctx.saved_tensors
        magnitude, bias = (
            a if b is None else b for a, b in zip(parameters, ctx.handles, strict=True)
        )
        rows = gradient.flatten(0, -2)
        d_v, of_m = magnified_back(rows, v, norms, magnitude)
        of_bias = None if bias is None else rows.sum(0, dtype=of_m.dtype)
        return d_v.view_as(gradient), None, *give(ctx, tuple(parameters), [of_m, of_bias])
