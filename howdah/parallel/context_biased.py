"""A T5's attention to the blocks of a ring: matrices with a bias for distance, and what is seen.

On one device its probabilities are kept, for flash kernels give no gradient of a bias. In a ring
they are computed again from log-sum-exps, as those of flash attention are (`context_ring.py`): of a
block of keys no rank keeps anything. What the gradient of the bias is made of is added up block
after block, and given to the table once. A query may see no key of a block, padding alone: its
logits are then as low as numbers go, and what it makes of them has no weight beside a key that it
sees.
"""

from torch import Tensor

from howdah.model.documents import Rectangle
from howdah.model.islands import promoted
from howdah.model.partial import Three
from howdah.model.relative import Seen

WHOLE = (Rectangle(slice(None), slice(None), slice(None)),)
LOW = -1e30  # finite, so that an unseen block has a log-sum-exp


class Biased:
    """Attention as the stack of an encoder-decoder sees it, for one block's backward pass.

    places  the positions that each rank of the ring has
    """

    def __init__(self, seen: Seen, places: list[Tensor], rank: int) -> None:
        self._seen, self._places, self._mine = seen, places, places[rank]
        self._table: Tensor | None = None

    def of(self, owner: int) -> tuple[Rectangle, ...]:
        """What is computed of a rank's block: all of it."""
        return WHOLE

    def part(self, owner: int, heads: Three) -> tuple[Tensor, Tensor]:
        """The output and log-sum-exps of a block."""
        q, k, v = heads
        scores = self._scores(owner, q, k)
        sums = scores.logsumexp(-1)
        return ((scores - sums[..., None]).exp() @ v.to(scores.dtype)).to(q.dtype), sums

    def gradients(
        self, owner: int, grad: Tensor, heads: Three, made: tuple[Tensor, Tensor]
    ) -> Three:
        """The terms of the gradients of its heads; that of the bias is kept."""
        (q, k, v), (out, sums), bias = heads, made, self._seen.bias
        wide = promoted(q.dtype)
        q, k, v, grad, out = (x.to(wide) for x in (q, k, v, grad, out))
        likely = (self._scores(owner, q, k) - sums[..., None]).exp()
        inside = (grad * out).sum(-1, keepdim=True)
        d_scores = likely * (grad @ v.mT - inside)
        if bias is not None:
            term = bias.add(d_scores.sum(0), self._mine, self._places[owner])
            self._table = term if self._table is None else self._table.add_(term)
        return d_scores @ k, d_scores.mT @ q, likely.mT @ grad

    def done(self) -> None:
        """Gives the gradient of the bias to its table."""
        if self._seen.bias is not None and self._table is not None:
            given = self._seen.bias.give(self._table)
            assert given is None, "a layout has the weights"

    def _scores(self, owner: int, q: Tensor, k: Tensor) -> Tensor:
        """The logits [b, a, s, t] in at least float32."""
        wide, theirs, pairs = promoted(q.dtype), self._places[owner], self._seen.pairs
        scores = q.to(wide) @ k.to(wide).mT
        if self._seen.bias is not None:
            scores += self._seen.bias.of_places(self._mine, theirs).to(wide)
        if pairs is not None:
            of_queries = pairs if pairs.ndim > 2 else pairs[self._mine]
            scores.masked_fill_(~of_queries[..., theirs], LOW)
        return scores
