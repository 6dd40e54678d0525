"""Attention by all-to-all: the ranks of cp trade parts of the sequence for heads (Ulysses, Jacobs
et al. 2023, https://arxiv.org/abs/2309.14509).

    rank 0   tokens 0 3, heads a b c d         tokens 0 1 2 3, heads a b
    rank 1   tokens 1 2, heads a b c d   ⇄     tokens 0 1 2 3, heads c d

One all-to-all brings queries, keys and values of a rank's heads, for all tokens. Attention is that
of one device, with fewer heads. A second all-to-all brings the output of all heads back, for the
rank's tokens. The backward pass does the same the other way round. Where there are more ranks than
key-value heads, several ranks compute with the same key-value head, and the gradients that come
back for it are summed.

Under context=both the ranks that trade are some of those of cp. What they have together is a part
of the sequence, and attention is a ring of such groups.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.attention import core_of
from howdah.model.documents import Dropping, Mask
from howdah.model.islands import promoted
from howdah.model.partial import padded
from howdah.model.relative import Seen
from howdah.parallel.context_ring import Ring
from howdah.parallel.mesh import Mesh
from howdah.plan.heads import Range
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sharding import chunks, traded_chunks, traded_heads

Ranges = list[Range]  # the heads of each rank of cp


class Trade:
    """The trade, as one rank sees it: an attention core.

    ring  attention of the traded heads, where this rank's group has a part of the sequence
    """

    def __init__(self, plan: Plan, mesh: Mesh, ring: Ring | None = None) -> None:
        ranks = axis(plan.layout, "traders").group(mesh.rank)
        self._group, self._waited = mesh.group_of(ranks, label="cp"), mesh.waited
        chunk_by_chunk = [chunks(plan.layout, plan.sequence, rank) for rank in ranks]
        self._lengths = [sum(stop - start for start, stop in some) for some in chunk_by_chunk]
        early, late = traded_chunks(plan.layout, plan.sequence, mesh.rank)
        behind = late[0] - (early[1] - early[0])  # the late range is behind the early one here
        self._chunks = [
            ((a - early[0], b - early[0]), (c - behind, d - behind))
            for (a, b), (c, d) in chunk_by_chunk
        ]
        pairs = [traded_heads(plan, mesh.rank, index) for index in range(len(ranks))]
        self.queries, self.keys = ([*some] for some in zip(*pairs, strict=True))
        self.ring, self._core = ring, ring or core_of(plan.shape)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """The model's attention, of this rank's tokens to those of all ranks:
        q [b, a, s, d], k [b, k, s, d] and v [b, k, s, e] → [b, a, s, e].
        """
        queries, keys, values = _ToHeads.apply(q, k, v, self)
        narrow, wide = values.shape[-1], keys.shape[-1]
        if self.ring is None and narrow < wide:
            values = padded(values, wide)
        out = self._core(queries, keys, values, self._of_heads(mask))[..., :narrow]
        return _ToTokens.apply(out, self)

    def _of_heads(self, mask: Mask) -> Mask:
        """The mask with what belongs to this rank's heads: their bias, or their noise."""
        first, stop = self.queries[self._group.rank]
        if isinstance(mask, Seen):
            return mask.of_heads(first, stop)
        if isinstance(mask, Dropping):
            seen = mask.mask
            inner = seen.of_heads(first, stop) if isinstance(seen, Seen) else seen
            return mask._replace(mask=inner, first=mask.first + first)
        return mask

    def to_heads(self, given: list[tuple[Tensor, Ranges]]) -> list[Tensor]:
        """Of tensors [b, heads, s, d] of this rank's tokens, with each rank's heads: this rank's
        heads for all tokens, [b, heads, S, d].
        """
        group, rows = self._group, len(given[0][0])
        to = [[x[:, slice(*of[p])] for x, of in given] for p in range(group.size)]
        own = [of[group.rank][1] - of[group.rank][0] for _, of in given]
        width = rows * sum(n * x.shape[3] for n, (x, _) in zip(own, given, strict=True))
        parts = self._exchange(to, [width * length for length in self._lengths])
        outs = [
            x.new_empty(rows, n, sum(self._lengths), x.shape[3])
            for n, (x, _) in zip(own, given, strict=True)
        ]
        for part, some, length in zip(parts, self._chunks, self._lengths, strict=True):
            sizes = [rows * length * out.shape[1] * out.shape[3] for out in outs]
            for out, flat in zip(outs, part.split(sizes), strict=True):
                piece = flat.view(rows, out.shape[1], length, -1)
                for (start, stop), one in zip(some, piece.split(_sizes(some), 2), strict=True):
                    out[:, :, start:stop] = one
        return outs

    def to_tokens(self, given: list[tuple[Tensor, Ranges]]) -> list[Tensor]:
        """The inverse of `to_heads`; of heads that several ranks have, the sum."""
        group, rows = self._group, len(given[0][0])
        to = [
            [x[:, :, start:stop] for x, _ in given for start, stop in some] for some in self._chunks
        ]
        length, places = self._lengths[group.rank], _sizes(self._chunks[group.rank])
        counts = [[stop - start for start, stop in of] for _, of in given]
        widths = [
            [rows * n[p] * x.shape[3] for n, (x, _) in zip(counts, given, strict=True)]
            for p in range(group.size)
        ]
        each = [[width * place for width in some for place in places] for some in widths]
        parts = self._exchange(to, [sum(sizes) for sizes in each])
        outs = [_tokens(x, of, length) for x, of in given]
        for p, (part, sizes) in enumerate(zip(parts, each, strict=True)):
            flats = iter(part.split(sizes))
            for out, (_, of) in zip(outs, given, strict=True):
                into = out[:, slice(*of[p])]
                for piece, one in zip(into.split(places, 2), flats, strict=False):
                    piece.add_(one.view(piece.shape))
        return [out.to(x.dtype) for out, (x, _) in zip(outs, given, strict=True)]

    def _exchange(self, to: list[list[Tensor]], received: list[int]) -> tuple[Tensor, ...]:
        """Sends to each rank its tensors; returns what came from each, in so many elements."""
        sent = [sum(x.numel() for x in some) for some in to]
        pieces = [x for some in to for x in some]
        x = pieces[0].new_empty(sum(sent))
        for flat, piece in zip(x.split([one.numel() for one in pieces]), pieces, strict=True):
            flat.view(piece.shape).copy_(piece)
        out = x.new_empty(sum(received))
        with self._waited:
            self._group.all_to_all(out, x, sent=sent, received=received)
        return out.split(received)


def _sizes(some: tuple[Range, ...]) -> list[int]:
    return [stop - start for start, stop in some]


def _tokens(x: Tensor, of: Ranges, length: int) -> Tensor:
    """Zeros [b, heads, s, d] for the heads of all ranks, token after token in memory; wider than
    `x` where a head has several terms.
    """
    heads = max(stop for _, stop in of)
    several = sum(stop - start for start, stop in of) > heads
    dtype = promoted(x.dtype) if several else x.dtype
    return x.new_zeros(len(x), length, heads, x.shape[3], dtype=dtype).transpose(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, trade: Trade) -> Any:
        ctx.trade = trade
        return tuple(trade.to_heads([(q, trade.queries), (k, trade.keys), (v, trade.keys)]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        trade = ctx.trade
        of = trade.queries, trade.keys, trade.keys
        return *trade.to_tokens([*zip(gradients, of, strict=True)]), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, trade: Trade) -> Tensor:
        ctx.trade = trade
        return trade.to_tokens([(out, trade.queries)])[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        trade = ctx.trade
        return trade.to_heads([(gradient, trade.queries)])[0], None
