"""Attention as matrices: all probabilities exist, and some of them are dropped.

    softmax(q · kᵀ / √d), inside documents  →  dropout  →  · v

A flash kernel has no probability at hand for longer than a moment, and its dropout would be drawn
from a generator. Here what is dropped is a function of (seed, step, layer, sample, query, head,
key), as all noise is (`model/noise.py`): the same on every layout, and in a second run of the
forward pass. The price is the memory of s² numbers and as many bytes for each head and sample.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.documents import Dropping
from howdah.model.islands import factor_of, mix, promoted, shifted
from howdah.model.relative import Seen, attend_seen


def attend_dropping(q: Tensor, k: Tensor, v: Tensor, of: Dropping, *, causal: bool) -> Tensor:
    """Attention with dropout of its probabilities. q [b, a, s, d], k and v [b, k, s, d] →
    [b, a, s, d].
    """
    if isinstance(of.mask, Seen):
        kept = kept_pairs(of, q.shape[1], k.shape[2])
        return attend_seen(q, k, v, of.mask, (kept, factor_of(of.drop)))
    return cast(Tensor, _Dropping.apply(q, k, v, of, causal))


def kept_pairs(of: Dropping, heads: int, keys: int) -> Tensor:
    """The mask [b, heads, s, keys] of the probabilities that are kept."""
    width = of.heads * keys
    each = torch.arange(of.first, of.first + heads, device=of.drop.rows.device) * keys
    at = torch.arange(keys, device=each.device)
    features = of.drop.rows[:, None, :, None] * width + (each[:, None, None] + at)
    return shifted(mix(of.drop.key, features), 32) >= int(of.drop.share * 2**32)


class _Dropping(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, of: Dropping, causal: bool
    ) -> Tensor:
        assert not isinstance(of.mask, Seen), "its attention is another"
        likely = _likely(q, k, of.mask, causal).to(q.dtype)
        kept = kept_pairs(of, q.shape[1], k.shape[2])
        ctx.save_for_backward(q, k, v, likely, kept)
        ctx.factor = factor_of(of.drop)
        return (likely * kept * ctx.factor) @ _for_each(v, q)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, likely, kept = ctx.saved_tensors
        wide = promoted(q.dtype)
        scaled = kept.to(wide) * ctx.factor
        likely, grad = likely.to(wide), grad.to(wide)
        d_v = (likely * scaled).mT @ grad
        d_likely = (grad @ _for_each(v, q).to(wide).mT) * scaled
        inside = (d_likely * likely).sum(-1, keepdim=True)
        d_scores = likely * (d_likely - inside) * q.shape[-1] ** -0.5
        d_q = d_scores @ _for_each(k, q).to(wide)
        d_k = d_scores.mT @ q.to(wide)
        return d_q.to(q.dtype), _summed(d_k, k), _summed(d_v, v), None, None


def _likely(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """The probabilities [b, a, s, t] in at least float32."""
    wide = promoted(q.dtype)
    scores = (q.to(wide) * q.shape[-1] ** -0.5) @ _for_each(k, q).to(wide).mT
    if mask is None and causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1)


def _for_each(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values of every head of the queries."""
    groups = q.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, 1)


def _summed(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of keys or values that several heads share."""
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2).to(x.dtype)
