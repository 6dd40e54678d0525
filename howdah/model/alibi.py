"""ALiBi: attention with a bias for distance in the place of positions (Press et al. 2022,
https://arxiv.org/abs/2108.12409), as BLOOM has it (https://arxiv.org/abs/2211.05100).

    logit of query i and key j      q · k / √d  -  slope · (i - j)          a slope for each head

The softmax of a query does not change with a term that all its logits have, so slope · j is as good
a bias. It is a product of a number of the query's head and a number of the key, and becomes part of
their product: heads are WIDER numbers wider than they are trained.

    query   q · √((d + WIDER) / d)      slope · √(d + WIDER)
    key     k                           j
    value   v                           0

So whatever computes attention computes the bias, and knows nothing of it: flash kernels of CPUs and
GPUs, documents in a row, keys that come from other ranks. A bias beside the kernel would be a
tensor of s² numbers for each head on a GPU, where FlashAttention takes none.

In 16 bits a slope and a large j are rounded. Three terms of the slope, and two of j below 65,536,
are exact together: six products, which kernels add in float32.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.shapes.shape import WIDER

BYTE = 256  # whole numbers up to it are exact in bfloat16

Heads = tuple[Tensor, Tensor, Tensor]


def slopes(heads: int, own: tuple[int, int], device: torch.device) -> Tensor:
    """The slopes of heads [first, stop) of a model with so many heads, float64.

    Those of 2ⁿ heads fall from 2^(-8/2ⁿ) to 2^-8, each by the same factor. Of other numbers, the
    heads beyond a power of two take every second slope of twice as many.
    """
    whole = 1 << (heads.bit_length() - 1)
    at = torch.arange(heads, device=device, dtype=torch.float64)
    beyond = 4 * (2 * (at - whole) + 1) / whole
    every = torch.exp2(-torch.where(at < whole, 8 * (at + 1) / whole, beyond))
    return every[slice(*own)]  # the same bits on every rank


def widened(heads: Heads, positions: Tensor, slope: Tensor) -> Heads:
    """Queries [b, s, a, d], keys and values [b, s, k, d] with the bias inside: d + WIDER numbers.

    positions  [b, s] of the tokens in their documents
    slope      [a] of the queries' heads, float64
    """
    q, k, v = heads
    size = q.shape[-1] + WIDER
    asking = _terms(slope * sqrt(size), q.dtype).repeat_interleave(2, -1)
    low = positions % BYTE
    asked = torch.stack([low, positions - low], -1).to(k.dtype).repeat(1, 1, 3)
    return (
        _joined(q * sqrt(size / q.shape[-1]), asking),
        _joined(k, asked[:, :, None]),
        F.pad(v, (0, WIDER)),
    )


def _terms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Three numbers [..., 3] of a format whose sum is x [...]."""
    terms = []
    for _ in range(3):
        terms.append(x.to(dtype))
        x = x - terms[-1]
    return torch.stack(terms, -1)


def _joined(x: Tensor, numbers: Tensor) -> Tensor:
    """x [b, s, heads, d] with `numbers` behind each head, and zeros up to WIDER."""
    numbers = F.pad(numbers, (0, WIDER - numbers.shape[-1]))
    return torch.cat([x, numbers.expand(*x.shape[:-1], WIDER)], -1)
