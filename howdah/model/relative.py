"""Attention with a bias for distance (T5, https://arxiv.org/abs/1910.10683, section 2.1), and to a
source: what the stacks of an encoder-decoder attend with.

    logit of query i and key j      q · k + table[bucket(j - i), head]          no division by √d

A stack has one table, which all of its blocks use. Distances share buckets, the finer the nearer;
an encoder tells before from behind. With 8 buckets and distances up to 16, seen from token i:

    before        …  -6 -5 -4 -3 -2 -1  0                                  a decoder
                  …   5  4  4  3  2  1  0
    both ways     …  -6 -5 -4 -3 -2 -1  0   1  2  3  4  5  6  …            an encoder
                  …   3  2  2  2  2  1  0   5  6  6  6  6  7  …

What the bias of a stack is made of is looked up once in a pass: a number for each distance and
head. Attention is computed as matrices: flash kernels give no gradient of a bias. Their backward
pass adds the gradient of all pairs of a bucket to the table's. So a table is used once by each
block of its stack, whether or not the block is recomputed (`Bias.expected`).
"""

from dataclasses import dataclass, replace
from math import log
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import promoted
from howdah.model.norm import Vector, value_of

FARTHEST = 128  # from this distance on there is one bucket; T5's relative_attention_max_distance


def buckets_of(distances: Tensor, buckets: int, *, both_ways: bool) -> Tensor:
    """The bucket of each distance j - i, int64. A decoder, which does not look ahead, has one for
    all that comes later.

    In float32, as published models were trained: where a logarithm is nearly whole, its last bit
    decides.
    """
    first = torch.zeros_like(distances)
    if both_ways:
        buckets //= 2
        first, far = (distances > 0) * buckets, distances.abs()
    else:
        far = (-distances).clamp(min=0)
    exact = buckets // 2
    grown = (far.to(torch.float32) / exact).log() / log(FARTHEST / exact) * (buckets - exact)
    # a distance of 0 has no logarithm, and is near
    large = (exact + torch.where(far < exact, 0, grown).to(torch.int64)).clamp(max=buckets - 1)
    return first + torch.where(far < exact, far, large)


class RelativeTable(nn.Module):
    """The numbers [buckets, heads] that a stack adds to its logits by distance."""

    def __init__(self, buckets: int, heads: int) -> None:
        super().__init__()
        self.weight: Tensor | Vector = nn.Parameter(torch.empty(buckets, heads))

    def expected(self) -> None:
        """Called once for each block whose backward pass will add to the table's gradient."""

    def bias(self, queries: range, keys: int, *, both_ways: bool, device: torch.device) -> "Bias":
        """The bias of queries at these positions and the keys of positions up to `keys`."""
        table = value_of(self.weight)
        assert table is not None
        first = -queries[-1]  # the key farthest before a query
        distances = torch.arange(first, keys - queries[0], device=device)
        buckets = buckets_of(distances, len(table), both_ways=both_ways)
        return Bias(table[buckets].T.contiguous(), buckets, self, (len(table), table.shape[1]))


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to the logits of a stack's blocks.

    numbers  [heads, s + t - 1] by distance: first that of the last query and the first key
    buckets  [s + t - 1] of these distances
    table    whose gradient is the bias's
    sizes    of the table: rows and heads
    first    the head of the table that is the first here
    """

    numbers: Tensor
    buckets: Tensor
    table: RelativeTable
    sizes: tuple[int, int]
    first: int = 0

    def of_heads(self, first: int, stop: int) -> "Bias":
        """The bias of some of the heads."""
        return replace(self, numbers=self.numbers[first:stop], first=self.first + first)

    def of_pairs(self, keys: int) -> Tensor:
        """The bias [heads, s, t] of each pair: row after row one distance less."""
        return self.numbers.unfold(1, keys, 1).flip(1)

    def add(self, pairs: Tensor) -> Tensor:
        """The gradient of the table [rows, heads], of that of all pairs [heads here, s, t]."""
        heads, s, t = pairs.shape
        ahead = torch.arange(t, device=pairs.device) - torch.arange(s, device=pairs.device)[:, None]
        at = self.buckets[ahead + (s - 1)].flatten()
        total = pairs.new_zeros(self.sizes)
        mine = total[:, self.first : self.first + heads]
        mine.index_add_(0, at, pairs.flatten(1).T.contiguous())
        return total


@dataclass(frozen=True, eq=False)
class Seen:
    """What the queries of a stack see, and with which bias.

    pairs  True where a query sees a key: [s, t], or [b, 1, 1, t] for all queries of a row alike;
           None: they see all. A query sees one key at least
    bias   None: attention to another stack has none
    """

    pairs: Tensor | None
    bias: Bias | None = None

    def of_heads(self, first: int, stop: int) -> "Seen":
        """The same for some of the heads."""
        return replace(self, bias=self.bias and self.bias.of_heads(first, stop))

    def expected(self) -> None:
        """Called once for each block that attends so, before its forward pass."""
        if self.bias is not None:
            self.bias.table.expected()


def attend_seen(q: Tensor, k: Tensor, v: Tensor, of: Seen) -> Tensor:
    """Attention as matrices, without division by √d. q [b, a, s, d], k and v [b, a, t, d] →
    [b, a, s, d].
    """
    weight = of.bias.table.weight if of.bias else None
    return cast(Tensor, _Seen.apply(q, k, v, weight if isinstance(weight, Tensor) else None, of))


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None, of: Seen
    ) -> Tensor:
        wide = promoted(q.dtype)
        scores = q.to(wide) @ k.to(wide).mT
        if of.bias is not None:
            scores += of.bias.of_pairs(k.shape[2]).to(wide)
        if of.pairs is not None:
            scores.masked_fill_(~of.pairs, float("-inf"))
        likely = scores.softmax(-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, likely)
        ctx.of = of
        return likely @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, likely = ctx.saved_tensors
        bias, wide = ctx.of.bias, promoted(q.dtype)
        likely, grad = likely.to(wide), grad.to(wide)
        d_v = likely.mT @ grad
        d_likely = grad @ v.to(wide).mT
        d_scores = likely * (d_likely - (d_likely * likely).sum(-1, keepdim=True))
        d_table = None if bias is None else _give(bias, bias.add(d_scores.sum(0)))
        d_q, d_k = d_scores @ k.to(wide), d_scores.mT @ q.to(wide)
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), d_table, None


def _give(bias: Bias, gradient: Tensor) -> Tensor | None:
    """Adds the gradient of a table that autograd does not see; returns that of another."""
    weight = bias.table.weight
    if isinstance(weight, Tensor):
        return gradient.to(weight.dtype)
    weight.add(lambda out: out.add_(gradient))
    return None
