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
        sizes = len(table), table.shape[1]
        return Bias(table[buckets].T.contiguous(), buckets, self, sizes, len(queries))


@dataclass(frozen=True, eq=False)
class Bias:
    """What is added to the logits of a stack's blocks.

    numbers  [heads, s + t - 1] by distance: first that of the last query and the first key
    buckets  [s + t - 1] of these distances
    table    whose gradient is the bias's
    sizes    of the table: rows and heads
    queries  how many there are
    first    the head of the table that is the first here
    """

    numbers: Tensor
    buckets: Tensor
    table: RelativeTable
    sizes: tuple[int, int]
    queries: int
    first: int = 0

    def of_heads(self, first: int, stop: int) -> "Bias":
        """The bias of some of the heads."""
        return replace(self, numbers=self.numbers[first:stop], first=self.first + first)

    def of_pairs(self, keys: int) -> Tensor:
        """The bias [heads, s, t] of each pair: row after row one distance less."""
        return self.numbers.unfold(1, keys, 1).flip(1)

    def of_places(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The bias [heads, s, t] of queries and keys at some of the positions."""
        return self.numbers[:, self._at(queries, keys)]

    def add(
        self, pairs: Tensor, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> Tensor:
        """The gradient of the table [rows, heads], of that of pairs [heads here, s, t] of queries
        and keys at some of the positions; None: at all of them.
        """
        heads, s, t = pairs.shape
        queries = torch.arange(s, device=pairs.device) if queries is None else queries
        keys = torch.arange(t, device=pairs.device) if keys is None else keys
        total = pairs.new_zeros(self.sizes)
        mine = total[:, self.first : self.first + heads]
        at = self.buckets[self._at(queries, keys)].flatten()
        mine.index_add_(0, at, pairs.flatten(1).T.contiguous())
        return total

    def _at(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Where the number of each pair [s, t] is; queries are counted from the first of them."""
        return keys - queries[:, None] + (self.queries - 1)

    def give(self, gradient: Tensor) -> Tensor | None:
        """Adds the gradient of a table that autograd does not see; returns that of another."""
        weight = self.table.weight
        if isinstance(weight, Tensor):
            return gradient.to(weight.dtype)
        weight.add(lambda out: out.add_(gradient))
        return None


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
        """What is seen, with the bias of some of the heads."""
        return replace(self, bias=self.bias and self.bias.of_heads(first, stop))

    def expected(self) -> None:
        """Called once for each block that attends so, before its forward pass."""
        if self.bias is not None:
            self.bias.table.expected()


Kept = tuple[Tensor, float]  # which probabilities [b, a, s, t] are kept, times a factor


def attend_seen(q: Tensor, k: Tensor, v: Tensor, of: Seen, kept: Kept | None = None) -> Tensor:
    """Attention as matrices, without division by √d. q [b, a, s, d], k and v [b, a, t, d] →
    [b, a, s, d]. Without `kept` all probabilities are.
    """
    weight = of.bias.table.weight if of.bias else None
    plain = weight if isinstance(weight, Tensor) else None
    return cast(Tensor, _Seen.apply(q, k, v, plain, (of, kept)))


class _Seen(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        asked: tuple[Seen, Kept | None],
    ) -> Tensor:
        of, dropped = asked
        kept, ctx.factor = dropped or (None, 1.0)
        wide = promoted(q.dtype)
        scores = q.to(wide) @ k.to(wide).mT
        if of.bias is not None:
            scores += of.bias.of_pairs(k.shape[2]).to(wide)
        if of.pairs is not None:
            scores.masked_fill_(~of.pairs, float("-inf"))
        likely = scores.softmax(-1).to(q.dtype)
        ctx.save_for_backward(q, k, v, likely, kept)
        ctx.of = of
        return (likely if kept is None else likely * kept * ctx.factor) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, likely, kept = ctx.saved_tensors
        bias, wide = ctx.of.bias, promoted(q.dtype)
        likely, grad = likely.to(wide), grad.to(wide)
        scaled = 1.0 if kept is None else kept.to(wide) * ctx.factor
        d_v = (likely * scaled).mT @ grad
        d_likely = grad @ v.to(wide).mT * scaled
        d_scores = likely * (d_likely - (d_likely * likely).sum(-1, keepdim=True))
        d_table = None if bias is None else bias.give(bias.add(d_scores.sum(0)))
        d_q, d_k = d_scores @ k.to(wide), d_scores.mT @ q.to(wide)
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype), d_table, None
