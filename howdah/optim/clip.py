"""The global gradient norm, every element counted once, and clipping by it."""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import Tensor

EPSILON = 1e-6  # torch's and Megatron's: keeps the factor finite at a norm of zero


def squared_norm(gradients: Iterable[Tensor]) -> float:
    """Sum of squares over flat gradient buffers, in at least float32 per buffer.

    Buffers are added up in float64 in the order given, which no layout changes.
    """
    return sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in gradients)


def clip(gradients: Iterable[Tensor], *, norm: float, limit: float) -> None:
    """Scales gradients in place by limit/norm where the norm is over the limit (0: never)."""
    if limit > 0 and norm > limit:
        for flat in gradients:
            flat.mul_(limit / (norm + EPSILON))


def total_norm(squares: Iterable[float]) -> float:
    """The norm from sums of squares."""
    return sqrt(sum(squares))
