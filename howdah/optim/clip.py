"""The global gradient norm, with every element counted once, and the update clipped by it.

The norm stays on the device. On the CPU the host reads it at once, and decides. On a GPU it would
have to wait until the whole backward pass has ended; so the update is launched in any case, with a
factor and a flag that only the GPU knows:

                       norm ≤ limit     norm > limit              norm not finite
    CPU                update           scale, update             nothing
    GPU, fused         divide by 1      divide by norm / limit    the kernel leaves all as it was
    GPU, not fused     multiply by 1    multiply by limit / norm  what was changed is taken back

The fused kernels of torch divide gradients by `grad_scale`, and skip everything if `found_inf` is
1. Both are float32, so float64 gradients are multiplied instead.
"""

from collections.abc import Iterable
from functools import reduce
from math import isfinite, sqrt

import torch
from torch import Tensor

from howdah.optim.optimizers import is_fused

EPSILON = 1e-6  # as in torch and Megatron-LM: keeps the factor finite at a norm of zero
LONG, ROW = 1 << 14, 1 << 10  # numbers in a buffer whose norm is that of rows, and in a row


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """The sum of squares over flat gradient buffers: a float64 scalar on their device.

    Each buffer's norm is at least float32. The squares are added in float64, in the order given,
    which is the same for all layouts. On a CPU torch adds up float32 in a few sums, side by side:
    the norm of 3 million numbers is 6e-5 off, of 24 million 1e-3. So a long buffer is cut in rows,
    whose squares are added in float64 too.
    """
    flats = list(gradients)
    whole = [flat for flat in flats if flat.numel()]
    if not whole:
        return torch.zeros((), dtype=torch.float64, device=flats[0].device if flats else None)
    cut = [_rows(flat) if _is_long(flat) else flat for flat in whole]
    squares = torch.stack(torch._foreach_norm(cut)).to(torch.float64).square_()
    return reduce(torch.add, squares.unbind())


def _is_long(flat: Tensor) -> bool:
    return flat.is_cpu and flat.dtype == torch.float32 and flat.numel() >= LONG


def _rows(flat: Tensor) -> Tensor:
    """The norms of a buffer's rows, float64 [rows + 1]; the last row is what is left."""
    rest = len(flat) % ROW
    rows, last = flat[: len(flat) - rest].view(-1, ROW), flat[len(flat) - rest :]
    norms = torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(last)[None]
    return torch.cat(norms).to(torch.float64)


def clipped_update(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], *, square: Tensor, limit: float
) -> None:
    """One update, by gradients that are scaled by limit/norm when their norm is above `limit`; a
    limit of 0 never clips. When the norm is not finite, weights and optimizer states stay as they
    are.

    gradients  this rank's flat buffers, which may be scaled in place
    square     the square of the global norm over all ranks, a float64 scalar
    """
    if square.is_cpu:  # math.sqrt rounds correctly; torch's is off by a bit in 1 of 70 numbers
        _update_now(optimizer, gradients, norm=sqrt(square.item()), limit=limit)
    else:
        _update_unseen(optimizer, gradients, norm=square.sqrt(), limit=limit)


def _update_now(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], *, norm: float, limit: float
) -> None:
    if not isfinite(norm):
        return
    if norm > limit > 0:
        torch._foreach_mul_(gradients, limit / (norm + EPSILON))
    optimizer.step()


def _update_unseen(
    optimizer: torch.optim.Optimizer, gradients: list[Tensor], *, norm: Tensor, limit: float
) -> None:
    """The update of a host that does not know the norm."""
    divisor = torch.where(norm > limit, (norm + EPSILON) / limit, 1.0) if limit > 0 else None
    divides = is_fused(optimizer) and gradients[0].dtype == torch.float32
    if divisor is not None and not divides:
        torch._foreach_mul_(gradients, divisor.reciprocal().to(gradients[0].dtype))
        divisor = None
    scale = None if divisor is None else divisor.to(torch.float32)
    optimizer.grad_scale = scale  # type: ignore[attr-defined]
    optimizer.found_inf = norm.isfinite().logical_not().to(torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.grad_scale = optimizer.found_inf = None  # type: ignore[attr-defined]
