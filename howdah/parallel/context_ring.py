"""Ring attention: keys and values go round the ranks of cp (Liu et al. 2023,
https://arxiv.org/abs/2310.01889).

Each rank has an early and a late chunk of every sequence, and the queries of both. With cp2 and
chunks 0 to 3, rank 0 has 0 and 3, rank 1 has 1 and 2:

    rank 0      own 0 3: 0 to 0, 3 to 0 and 3          1 2 of rank 1: 3 to 1 and 2
    rank 1      own 1 2: 1 to 1, 2 to 1 and 2          0 3 of rank 0: 1 and 2 to 0

So all ranks compute as much, and what no query attends to is left out. Of the block of another rank
that is always one rectangle: an earlier rank's early chunk, to which all queries attend, or a later
rank's whole block, to which those of the late chunk attend. Documents cut it: of a document that
crosses borders of chunks, the queries are the first of the rectangle, the keys the last. A rank's
own block comes first, in which each query has a key.

In an encoder queries attend to later tokens, too. That is one more rectangle, the other way round:
all queries to an earlier rank's late chunk, those of the early chunk to a later rank's whole block;
of a document that crosses borders, the queries are the last and the keys the first.

    forward     compute own block      next block      …          sent meanwhile: the block itself
    backward    the same once more; the gradients of a block's keys and values go round behind it,
                each rank adds its term, and they end at the block's owner
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.documents import Blocks, Mask, Rectangle, Spans, cut_documents
from howdah.model.islands import promoted
from howdah.model.partial import Three, attend_part, merge, part_gradients
from howdah.model.relative import Seen
from howdah.parallel.context_biased import Biased
from howdah.parallel.mesh import Mesh
from howdah.plan.heads import Range
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sharding import traded_chunks

Pending = Callable[[], Tensor]


class Ring:
    """The ring, as one rank sees it: an attention core.

    merge  adds a block to the blocks so far
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        ranks = axis(plan.layout, "ring").group(mesh.rank)
        self._group, self._waited = mesh.group_of(ranks, label="cp"), mesh.waited
        self._chunks = [traded_chunks(plan.layout, plan.sequence, rank) for rank in ranks]
        self._lengths = [sum(stop - start for start, stop in some) for some in self._chunks]
        self.rank, self.merge, self.causal = self._group.rank, merge, plan.shape.causal
        self.places = [
            torch.cat([torch.arange(*chunk, device=mesh.device) for chunk in some])
            for some in self._chunks
        ]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        """Attention inside documents, of the tokens here to those of all ranks: q [b, a, s, d],
        k [b, k, s, d] and v [b, k, s, e] → [b, a, s, e].
        """
        if isinstance(mask, Seen):
            return _RingAttention.apply(q, k, v, self, Biased(mask, self.places, self.rank))
        assert isinstance(mask, Blocks)
        return _RingAttention.apply(q, k, v, self, Inside(mask, self.rank, self.causal))

    def cut(self, documents: Tensor, device: torch.device, length: int) -> Blocks:
        """The mask of a micro-batch of document numbers [b, S], on the CPU, of whole samples."""
        return blocks_of(documents.numpy(), self._chunks, self.rank, causal=self.causal)

    def rounds(self, held: Tensor, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yields each rank's block with that rank's index, this rank's first. The next is on its
        way meanwhile.

        width  elements of a token
        """
        size = self._group.size
        for turn in range(size):
            owner = (self.rank - turn) % size
            coming = self.pass_on(held, owner, width) if turn + 1 < size else None
            yield owner, held
            held = coming() if coming else held

    def pass_on(self, x: Tensor, owner: int, width: int) -> Pending:
        """Starts to send `x`, which belongs to `owner`, to the next rank, and to receive what
        belongs to the owner before it. Returns a function that waits for that.
        """
        size = self._group.size
        out = x.new_empty(self._lengths[(owner - 1) % size] * width)
        with self._waited:
            handle = self._group.exchange(
                out, x, (self.rank + 1) % size, (self.rank - 1) % size, async_op=True
            )

        def wait() -> Tensor:
            with self._waited:
                handle.result()
            return out

        return wait


def blocks_of(
    documents: np.ndarray, ranks: list[tuple[Range, ...]], index: int, *, causal: bool = True
) -> Blocks:
    """What the queries of rank `index` attend to: `documents` [b, S], and the chunks of all ranks.

    A document's numbers are equal, and lie side by side. So those of its tokens among a rank's
    queries are the first behind an earlier chunk, and those among keys the last before a later one.
    """
    early, late = ranks[index]
    mine = _of(documents, (early, late))
    squares = cut_documents(torch.from_numpy(mine), torch.device("cpu"), mine.shape[1])
    whole, second = Part((early, late), 0), Part((late,), early[1] - early[0])
    others = []
    for other, (first, last) in enumerate(ranks):
        found: list[Rectangle] = []
        if other < index:  # its early chunk is before all queries, its late one behind them
            found += _rectangles(documents, whole, Part((first,), 0))
            behind = whole, Part((last,), first[1] - first[0])
        elif other > index:  # both of its chunks lie between this rank's two
            found += _rectangles(documents, second, Part((first, last), 0))
            behind = Part((early,), 0), Part((first, last), 0)
        if other != index and not causal:
            found += _rectangles(documents, *behind, before=True)
        others.append(tuple(found))
    return Blocks(tuple(_squares(squares, *mine.shape)), tuple(others))


class Part(NamedTuple):
    """Some chunks of a rank, side by side, and the place of their first token among its tokens."""

    chunks: tuple[Range, ...]
    start: int


def _of(documents: np.ndarray, some: tuple[Range, ...]) -> np.ndarray:
    return np.concatenate([documents[:, start:stop] for start, stop in some], 1)


def _squares(spans: Mask, rows: int, length: int) -> Iterator[Rectangle]:
    """Yields the documents of the rank's own tokens."""
    if not isinstance(spans, Spans):
        spans = Spans((rows,), ((length,),))
    row = 0
    for count, lengths in zip(spans.rows, spans.lengths, strict=True):
        place, together = 0, slice(row, row + count)
        for size in lengths:
            yield Rectangle(together, *(slice(place, place + size),) * 2)
            place += size
        row += count


def _rectangles(
    documents: np.ndarray, queries: Part, keys: Part, *, before: bool = False
) -> list[Rectangle]:
    """The rectangles of rows in which a document has some of the queries and of the keys: the first
    queries and the last keys, or if the queries are `before` the keys, the last and the first.
    Neighbouring rows of one kind are one rectangle.
    """
    nearest = keys.chunks[0][0] if before else keys.chunks[-1][1] - 1
    asking, asked = (_of(documents, one.chunks) for one in (queries, keys))
    counts = [(some == documents[:, nearest, None]).sum(1).tolist() for some in (asking, asked)]
    found, row = [], 0
    for (n, m), some in groupby(zip(*counts, strict=True)):
        count = len(list(some))
        if n and m:
            of_queries = _run(queries.start, asking.shape[1], n, last=before)
            of_keys = _run(keys.start, asked.shape[1], m, last=not before)
            found.append(Rectangle(slice(row, row + count), of_queries, of_keys))
        row += count
    return found


def _run(start: int, length: int, count: int, *, last: bool) -> slice:
    """The first or the last places of some that begin at `start`."""
    first = start + (length - count) * last
    return slice(first, first + count)


# -- the operation -----------------------------------------------------------------


class Inside(NamedTuple):
    """Attention inside documents: to each rank's block by rectangles without a mask."""

    blocks: Blocks
    rank: int
    causal: bool

    def of(self, owner: int) -> tuple[Rectangle, ...]:
        """What is computed of a rank's block."""
        return self.blocks.squares if owner == self.rank else self.blocks.others[owner]

    def part(self, owner: int, heads: Three) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exps of a rectangle."""
        return attend_part(*heads, causal=self.causal and owner == self.rank)

    def gradients(
        self, owner: int, grad: Tensor, heads: Three, made: tuple[Tensor, Tensor]
    ) -> Three:
        """The terms of the gradients of its heads."""
        return part_gradients(grad, heads, made, causal=self.causal and owner == self.rank)

    def done(self) -> None:
        """There is no gradient of anything else."""


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, how: Inside | Biased
    ) -> Tensor:
        rows, heads, length, _ = q.shape
        wide, of = promoted(q.dtype), _Packed(rows, k.shape[1], k.shape[3], v.shape[3])
        # token after token, as the projection behind attention takes them
        out = q.new_empty(rows, length, heads, of.value, dtype=wide).transpose(1, 2)
        sums = q.new_empty(rows, heads, length, dtype=wide)
        packed = torch.cat([k.reshape(-1), v.reshape(-1)])
        for owner, block in ring.rounds(packed, of.width):
            keys, values = of.pair(block)
            for one in how.of(owner):
                part = how.part(owner, (q[one.asking], keys[one.asked], values[one.asked]))
                if owner == ring.rank:
                    out[one.asking], sums[one.asking] = part
                else:
                    ring.merge(out[one.asking], sums[one.asking], *part)
        result = out.to(q.dtype)
        ctx.save_for_backward(q, packed, result, sums)
        ctx.ring, ctx.how, ctx.of = ring, how, of
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, packed, out, sums = ctx.saved_tensors
        ring, how, of = ctx.ring, ctx.how, ctx.of
        d_q, passed = torch.zeros_like(q, dtype=sums.dtype), None
        home = packed
        for owner, block in ring.rounds(packed, of.width):
            keys, values = of.pair(block)
            terms = torch.zeros_like(block, dtype=sums.dtype)
            d_keys, d_values = of.pair(terms)
            for one in how.of(owner):
                heads = q[one.asking], keys[one.asked], values[one.asked]
                made = out[one.asking], sums[one.asking]
                found = how.gradients(owner, grad[one.asking], heads, made)
                d_q[one.asking] += found[0]
                d_keys[one.asked] += found[1]
                d_values[one.asked] += found[2]
            if owner == ring.rank:
                home = terms
                continue
            if passed:
                terms += passed()
            passed = ring.pass_on(terms, owner, of.width)
        if passed:
            home += passed()
        how.done()
        d_k, d_v = (x.to(q.dtype) for x in of.pair(home))
        return d_q.to(q.dtype), d_k, d_v, None, None


class _Packed(NamedTuple):
    """Keys and values of some tokens in one message: numbers of a key and of a value."""

    rows: int
    heads: int
    key: int
    value: int

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.rows * self.heads * (self.key + self.value)

    def pair(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values [b, k, s, ·] of a message."""
        length = flat.numel() // self.width
        cut = self.rows * self.heads * length * self.key
        return (
            flat[:cut].view(self.rows, self.heads, length, self.key),
            flat[cut:].view(self.rows, self.heads, length, self.value),
        )
