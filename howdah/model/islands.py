"""Islands: the small functions between matrix products and attention, apart from the modules.

Each takes tensors and numbers, and knows no weight by name, no layout and no step. So it is one
kernel for torch.compile, compiled once for each shape, and serves every layout: a module, or an own
operation behind a handle, calls the same function. What cannot be compiled (messages, weights that
come and go) stays outside.

    norm             RMSNorm or LayerNorm, and its gradient
    residual         x + dropout(y), with its mask
    residual_norm    both, in one
    rotate           rotary positions, and their gradient
    swiglu           silu(gate) · up, and its gradient
    loss_terms       a chunk of logits: maximum, sum of exponentials, what is subtracted
    logit_gradient   the gradient of the loss by a chunk of logits

`PLAIN` are the functions as they stand; `compiled` gives them to torch.compile. All compute in at
least float32; "at least", because a float64 run must stay in float64, or rounding errors of 1e-7
would hide real errors.

RMSNorm: with n = x·s, s = 1/√(mean x² + ε), y = n·w and g the gradient of y:

    dw = Σ over tokens of g·n
    dx = s · (g·w - n · mean(g·w·n))
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.base.seeds import GOLDEN, MULTIPLIERS, SHIFTS


def promoted(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, else `dtype` itself."""
    return torch.promote_types(dtype, torch.float32)


# -- noise: `base.seeds.mix`, operation for operation, on int64 --------------------


class Drop(NamedTuple):
    """A dropout: which elements it sets to zero is a function of these numbers alone.

    rows   [b, s] int64: number of each token, over all samples and positions
    key    int64 scalar: seed, step and name, hashed
    share  the fraction that is set to zero
    """

    rows: Tensor
    key: Tensor
    share: float


def signed(word: int) -> int:
    """The int64 with the same bits as a uint64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


def mix(key: int | Tensor, counters: Tensor) -> Tensor:
    """Returns 64 random bits for each counter (int64, any shape), as int64.

    Sums and products wrap around as those of uint64 do; a mask makes the right shift logical.
    """
    z = counters * signed(GOLDEN) + (signed(key) if isinstance(key, int) else key)
    for multiplier, shift in zip(MULTIPLIERS, SHIFTS, strict=False):
        z = (z ^ shifted(z, shift)) * signed(multiplier)
    return z ^ shifted(z, SHIFTS[2])


def shifted(z: Tensor, bits: int) -> Tensor:
    """The words of z, shifted to the right by `bits`."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def kept_of(drop: Drop, width: int) -> Tensor:
    """The mask [b, s, width] of the elements that a dropout keeps."""
    features = torch.arange(width, device=drop.rows.device)
    bits = shifted(mix(drop.key, drop.rows[:, :, None] * width + features), 32)
    return bits >= int(drop.share * 2**32)


def factor_of(drop: Drop | None) -> float:
    """What the elements that a dropout keeps are multiplied with."""
    return 1 / (1 - drop.share) if drop else 1.0


# -- norms and residuals -----------------------------------------------------------


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, ...]:
    """RMSNorm of x [..., width], or with a bias LayerNorm: the result in x's dtype, then what the
    gradient needs of each token: its scale; for LayerNorm, its mean and the scale.

    In bfloat16, torch's own LayerNorm on a CPU would sum the gradients of weight and bias in
    bfloat16: their error was 5 % after 2048 tokens and 13 % after 16384 (0.2 % here).
    """
    wide = x.to(promoted(x.dtype))
    if bias is None:
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        return (wide * scale).mul_(weight).to(x.dtype), scale
    of = weight.to(wide.dtype), bias.to(wide.dtype)
    out, *moments = torch.native_layer_norm(wide, weight.shape, *of, epsilon)
    return out.to(x.dtype), *moments


def norm_backward(
    x: Tensor, weight: Tensor, moments: tuple[Tensor, ...], grad: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of x, and in at least float32 those of weight and bias.

    moments  what `norm` returned beside the result
    grad     the gradient of the result
    """
    grad, wide = grad.to(promoted(x.dtype)), weight.to(promoted(x.dtype))
    if len(moments) == 2:
        d_x, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x.to(grad.dtype), weight.shape, *moments, wide, wide, [True] * 3
        )
        return d_x.to(x.dtype), d_weight, d_bias
    (scale,) = moments
    normed = x * scale
    product = grad * normed
    mean = (product @ wide).div_(x.shape[-1])
    d_x = (grad * weight).sub_(normed.mul_(mean[..., None])).mul_(scale)
    return d_x.to(x.dtype), product.flatten(0, -2).sum(0), None


def residual(x: Tensor, y: Tensor, drop: Drop | None) -> tuple[Tensor, Tensor | None]:
    """(x + dropout(y), the mask of what was kept)."""
    if drop is None:
        return x + y, None
    kept = kept_of(drop, y.shape[-1])
    return (y * kept).mul_(factor_of(drop)).add_(x), kept


def residual_norm(
    x: Tensor,
    y: Tensor,
    drop: Drop | None,
    of: tuple[Tensor, Tensor | None],
    epsilon: float,
) -> tuple[Tensor | None, ...]:
    """(x + dropout(y), the mask of what was kept, then the results of `norm` for the sum). `of` are
    weight and bias.
    """
    total, kept = residual(x, y, drop)
    return total, kept, *norm(total, *of, epsilon)


def residual_norm_backward(
    total: Tensor,
    weight: Tensor,
    moments: tuple[Tensor, ...],
    grads: tuple[Tensor | None, Tensor | None],
    kept: tuple[Tensor | None, float],
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of x, y, weight and bias.

    grads  those of the sum and of the normalised sum; None: zero
    kept   mask and factor of the dropout
    """
    of_sum, of_normed = grads
    d_weight = d_bias = None
    if of_normed is not None:
        d_x, d_weight, d_bias = norm_backward(total, weight, moments, of_normed)
        d_x = d_x if of_sum is None else d_x.add_(of_sum)
    else:
        assert of_sum is not None
        d_x = of_sum
    return d_x, dropped_backward(d_x, *kept), d_weight, d_bias


def dropped_backward(grad: Tensor, kept: Tensor | None, factor: float) -> Tensor:
    """The gradient of what a dropout with this mask and factor was given."""
    return grad if kept is None else (grad * kept).mul_(factor)


# -- inside of a block -------------------------------------------------------------


def rotate(x: Tensor, rotary: Tensor, back: bool) -> Tensor:
    """Rotates the pairs (x[i], x[i + d/2]) by their angles, or back; see `attention.rotate`."""
    cos, sin = rotary.unbind()
    sin = -sin if back else sin
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up (Shazeer 2020)."""
    return F.silu(gate) * up


def swiglu_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up; silu(gate) is computed again."""
    return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


# -- the loss: `model/loss.py` has the formulas -------------------------------------


class Smoothed(NamedTuple):
    """Constants of the loss: ε and z of the formulas, and ε divided by the whole vocabulary."""

    smoothing: float
    z: float
    even: float


def loss_terms(
    logits: Tensor, local: Tensor, here: Tensor, how: Smoothed
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each token of a chunk: the maximum of its logits, the sum of their exponentials, and what
    is subtracted from the loss; and exp(logits - maximum), which may overwrite the logits.

    local, here  the column of each token's label [n], and whether it is among these columns [n]
    """
    label_term = torch.where(here, logits.gather(1, local[:, None])[:, 0], 0)
    if how.smoothing:
        label_term = label_term * (1 - how.smoothing) + logits.sum(-1) * how.even
    largest = logits.amax(-1)
    exponentials = logits.sub_(largest[:, None]).exp_()
    return largest, exponentials.sum(-1), label_term, exponentials


def logit_gradient(
    exponentials: Tensor,
    factor: Tensor,
    wanted: Tensor,
    place: tuple[Tensor, Tensor],
    how: Smoothed,
) -> Tensor:
    """The gradient of the summed loss by the logits of a chunk; may overwrite the exponentials.

    factor  what makes of each token's exponentials the gradient of its normaliser
    wanted  the gradient of each token's loss: 0 where it has no label
    place   `local` and `here` of `loss_terms`
    """
    local, here = place
    d_logits = exponentials.mul_(factor[:, None])
    if how.even:
        d_logits.sub_((wanted * how.even)[:, None])
    rows = torch.arange(len(local), device=local.device)
    d_logits[rows, local] -= torch.where(here, wanted * (1 - how.smoothing), 0)
    return d_logits


# -- all of them -------------------------------------------------------------------


@dataclass(frozen=True)
class Islands:
    """The functions that modules call; the fields are described above."""

    norm: Callable[..., tuple[Any, ...]] = norm
    norm_backward: Callable[..., tuple[Any, ...]] = norm_backward
    residual: Callable[..., tuple[Any, ...]] = residual
    residual_norm: Callable[..., tuple[Any, ...]] = residual_norm
    residual_norm_backward: Callable[..., tuple[Any, ...]] = residual_norm_backward
    rotate: Callable[..., Tensor] = rotate
    swiglu: Callable[..., Tensor] = swiglu
    swiglu_backward: Callable[..., tuple[Tensor, Tensor]] = swiglu_backward
    loss_terms: Callable[..., tuple[Tensor, ...]] = loss_terms
    logit_gradient: Callable[..., Tensor] = logit_gradient


PLAIN = Islands()


def compiled(backend: str = "inductor") -> Islands:
    """The functions as torch.compile makes them with a `backend`, each at its first call."""
    plain = {field.name: getattr(PLAIN, field.name) for field in fields(Islands)}
    return Islands(
        **{name: torch.compile(f, fullgraph=True, backend=backend) for name, f in plain.items()}
    )
