"""The global gradient norm, with every element counted once, and clipping by that norm."""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor

EPSILON = 1e-6  # as in torch and Megatron-LM: keeps the factor finite at a norm of zero


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """The sum of squares over flat gradient buffers; each buffer's norm is at least float32.

    The buffers' terms are added in float64, in the order given, which is the same for all layouts.
    """
    return sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in gradients)


def clip(gradients: Iterable[Tensor], *, norm: float, limit: float) -> None:
    """Scales gradients in place by limit/norm when `norm` is above `limit`; a limit of 0 never
    clips.

    gradients  this rank's flat buffers
    norm       the global norm, over all ranks
    """
    if limit > 0 and norm > limit:
        for flat in gradients:
            flat.mul_(limit / (norm + EPSILON))


def total_norm(squares: Iterable[float]) -> float:
    """The norm: the square root of the sum of `squares`, which are sums of squares."""
    return sqrt(sum(squares))
