"""Attention inside documents: rotary embeddings, grouped queries, a key-value cache for decoding.

The form of the mask chooses the kernel; a micro-batch has one mask, and all blocks use it
(`model/documents.py`):

    None     every row is one document: one call for the whole micro-batch. On a GPU torch takes
             cuDNN's kernel if it can, then FlashAttention
    Spans    on a CPU: one call for each document
    Cuts     FlashAttention over documents of any lengths (`model/varlen.py`); where it does not
             compute, as in float32 on a GPU, a dense mask that the GPU makes
    dense    torch's kernels with a mask

Attention of a decoder is causal. In an encoder, a token attends to all tokens of its document; so
padding is a document of its own, to which no other token attends.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import ceil, floor, log
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from howdah.model.alibi import slopes, widened
from howdah.model.documents import (
    Blocks,
    Cuts,
    Dropping,
    Mask,
    Spans,
    dense_mask,
    document_numbers,
)
from howdah.model.islands import PLAIN, Islands
from howdah.model.norm import build_norm
from howdah.model.relative import Seen, attend_seen
from howdah.model.unfused import attend_dropping
from howdah.model.varlen import flash_takes, varlen
from howdah.shapes.shape import ModelShape, RopeScaling

BEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

Core = Callable[[Tensor, Tensor, Tensor, Mask], Tensor]  # heads and mask, as `attend` takes them


@dataclass
class Cache:
    """The key-value cache for decoding: (keys, values) of the tokens so far, [b, k, t, d] each, by
    layer. When there is no room for more, twice as much is made.

    hidden  [b] tokens of padding in front of each row; None: there are none
    pairs   with room for later tokens behind
    kept    tokens of each layer
    source  behind an encoder, what it has made [b, t, h], and which of it is seen [b, t] (None:
            all)
    """

    hidden: Tensor | None = None
    source: tuple[Tensor, Tensor | None] | None = None
    pairs: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens that all layers have passed, padding included."""
        return min(self.kept.values(), default=0)

    def extend(self, layer: str, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values to those of `layer`; returns all of them."""
        before, new = self.kept.get(layer, 0), key.shape[2]
        room = self.pairs.get(layer)
        if room is None or room[0].shape[2] < before + new:
            size = max(before + new, 2 * before)
            grown = key.new_empty(*_with(key, size)), value.new_empty(*_with(value, size))
            for old, x in zip(room or (), grown, strict=False):
                x[:, :, :before] = old[:, :, :before]
            room = self.pairs[layer] = grown
        for x, more in zip(room, (key, value), strict=True):
            x[:, :, before : before + new] = more
        self.kept[layer] = before + new
        return room[0][:, :, : before + new], room[1][:, :, : before + new]

    def keep(self, rows: Tensor) -> None:
        """Keeps these rows, in this order; one may be kept several times."""
        self.pairs = {
            layer: (key.index_select(0, rows), value.index_select(0, rows))
            for layer, (key, value) in self.pairs.items()
        }
        self.hidden = None if self.hidden is None else self.hidden.index_select(0, rows)
        if self.source is not None:
            states, seen = self.source
            seen = None if seen is None else seen.index_select(0, rows)
            self.source = states.index_select(0, rows), seen

    def seen(self, new: int) -> Tensor | None:
        """Which of the tokens so far and of `new` more are no padding, [b, t]; None: all are."""
        if self.hidden is None:
            return None
        places = torch.arange(self.length + new, device=self.hidden.device)
        return places >= self.hidden[:, None]


def _with(x: Tensor, tokens: int) -> tuple[int, ...]:
    return *x.shape[:2], tokens, x.shape[3]


class Attention(nn.Module):
    """Multi-head or grouped-query attention with q, k, v and o as separate matrices.

    own  the heads of queries that are here, [first, stop): a layout may have some of them
    """

    def __init__(self, shape: ModelShape, layer: str) -> None:
        super().__init__()
        self.shape, self.layer = shape, layer
        h, d, bias = shape.width, shape.d, shape.bias or shape.qkv_bias
        self.q = nn.Linear(h, shape.heads * d, bias=bias)
        self.k = nn.Linear(h, shape.k * d, bias=bias)
        self.v = nn.Linear(h, shape.k * d, bias=bias)
        self.o = nn.Linear(shape.heads * d, h, bias=shape.bias)
        if shape.qk_norm:
            self.q_norm = build_norm("rmsnorm", d, shape.norm_eps)
            self.k_norm = build_norm("rmsnorm", d, shape.norm_eps)
        self.core: Core = core_of(shape)  # some layouts replace it
        self.islands, self.own = PLAIN, (0, shape.heads)

    def forward(
        self, x: Tensor, rotary: Tensor | None, mask: Mask, cache: Cache | None = None
    ) -> Tensor:
        """Map x [b, s, h] → [b, s, h]; `rotary` is what BlockContext says."""
        by_head = (-1, self.shape.d)  # the numbers of heads and tokens here depend on the layout
        q = self.q(x).unflatten(-1, by_head)
        k = self.k(x).unflatten(-1, by_head)
        v = self.v(x).unflatten(-1, by_head)
        if self.shape.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.shape.positions == "alibi":
            assert rotary is not None, "ALiBi asks for positions"
            slope = slopes(self.shape.heads, self.own, x.device)
            (q, k, v), rotary = widened((q, k, v), rotary, slope), None
        if rotary is not None and not x.is_cpu:  # a GPU's kernels take token after token
            by_token = rotary.transpose(2, 3)
            q, k = rotate(q, by_token, self.islands), rotate(k, by_token, self.islands)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if rotary is not None and x.is_cpu:
            q, k = rotate(q, rotary, self.islands), rotate(k, rotary, self.islands)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        out = self.core(q, k, v, mask).transpose(1, 2)
        if out.shape[-1] != self.shape.d:
            out = out[..., : self.shape.d].contiguous()
        return cast(Tensor, self.o(out.flatten(2)))


class CrossAttention(Attention):
    """Attention of a decoder's tokens to what the encoder has made of the source."""

    def cross(self, x: Tensor, source: Tensor, mask: Mask, cache: Cache | None = None) -> Tensor:
        """Map x [b, s, h] → [b, s, h], with keys and values of `source` [b, t, h]. A cache keeps
        those: they are the same for every token that is decoded.
        """
        name, by_head = f"{self.layer}.cross", (-1, self.shape.d)
        q = self.q(x).unflatten(-1, by_head).transpose(1, 2)
        if cache is not None and name in cache.pairs:
            k, v = cache.pairs[name]
        else:
            k, v = (of(source).unflatten(-1, by_head).transpose(1, 2) for of in (self.k, self.v))
        if cache is not None:
            cache.pairs[name] = k, v
        return cast(Tensor, self.o(self.core(q, k, v, mask).transpose(1, 2).flatten(2)))


def core_of(shape: ModelShape) -> Core:
    """Attention of a model's blocks on one device."""
    return attend if shape.causal else partial(attend, causal=False)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, causal: bool = True) -> Tensor:
    """Attention inside documents, if `causal` to earlier tokens alone. q [b, a, s, d], k and v
    [b, k, t, d] → [b, a, s, d].

    With more keys than queries (t > s, decoding) the query is the last token: s must be 1, else
    ValueError is raised. What Seen says is seen, whatever `causal` says.
    """
    if q.shape[2] not in (1, k.shape[2]) and not isinstance(mask, Seen):
        raise ValueError("a cache that holds tokens takes one more at a time")
    if isinstance(mask, Seen | Dropping):
        return (
            attend_seen(q, k, v, mask)
            if isinstance(mask, Seen)
            else attend_dropping(q, k, v, mask, causal=causal)
        )
    if isinstance(mask, Cuts):
        if q.is_cpu or flash_takes(q):
            return varlen(q, k, v, mask, causal=causal)
        mask = dense_mask(document_numbers(mask, len(q)))
        mask = mask if causal else both_ways(mask)
    if k.shape[1] != q.shape[1] and not _knows_groups(q, mask):
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if isinstance(mask, Spans):
        return _attend_spans(q, k, v, mask, causal)
    assert not isinstance(mask, Blocks), "the tokens of other ranks are not here"
    if mask is not None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    if not q.is_cuda:
        return _whole(q, k, v, causal=causal)
    with sdpa_kernel(BEST_FIRST, set_priority=True):
        return _whole(q, k, v, causal=causal)


def both_ways(mask: Tensor) -> Tensor:
    """A causal mask [b, 1, s, s] with later tokens of the same documents, too."""
    return mask | mask.mT


def _knows_groups(q: Tensor, mask: Mask) -> bool:
    """Whether to let torch's kernel share key-value heads (grouped queries) without copying them.

    Not with a mask: torch may fall back to a slow kernel. In float16 and bfloat16 not on a CPU: the
    kernel sums the gradients of a group's heads in that format, and with 16 heads per group their
    error was 2.4 times as large. On a GPU only in these formats: in others the kernel that knows
    groups keeps all probabilities.
    """
    return not isinstance(mask, Tensor) and (q.dtype.itemsize >= 4) != q.is_cuda


def _whole(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    grouped, ordered = q.shape[1] != k.shape[1], causal and q.shape[2] > 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=ordered, enable_gqa=grouped)


def _attend_spans(q: Tensor, k: Tensor, v: Tensor, spans: Spans, causal: bool) -> Tensor:
    """One attention call for each document of each group of rows in `spans`.

    Splitting and concatenating are views and copies, in the backward pass too; selecting rows by
    index would scatter gradients one element at a time.
    """
    parts = (x.split(spans.rows) for x in (q, k, v))
    together = []
    for *rows, lengths in zip(*parts, spans.lengths, strict=True):
        documents = zip(*(x.split(lengths, 2) for x in rows), strict=True)
        together.append(torch.cat([_whole(*document, causal=causal) for document in documents], 2))
    return torch.cat(together)


# -- rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864) --------


def rotary_angles(
    shape: ModelShape, positions: Tensor, dtype: torch.dtype, length: int = 0
) -> Tensor:
    """Cosines and sines of every position's angles: [2, b, 1, s, d/2] of `dtype`.

    length  tokens of a sample, where wavelengths depend on it (RopeScaling, dynamic)

    They are computed for each micro-batch: a stored table would need a device and a layout. Angles
    are computed in float64: late positions would lose too many digits in float32.
    """
    d = shape.latent.qk_rope_size if shape.latent else shape.d
    steps = torch.arange(0, d, 2, device=positions.device, dtype=torch.float64) / d
    theta, scaling = shape.rope_theta, shape.rope_scaling
    if scaling is not None and scaling.kind == "dynamic" and length > scaling.context:
        grown = scaling.factor * length / scaling.context - (scaling.factor - 1)
        theta *= grown ** (d / (d - 2))
    frequencies = theta**-steps
    if scaling is not None:
        frequencies = frequencies * _kept(frequencies, theta, scaling)
    angles = positions[:, None, :, None].to(torch.float64) * frequencies
    turned = torch.stack([angles.cos(), angles.sin()])
    return (turned if scaling is None else turned * scaling.turned).to(dtype)


def _kept(frequencies: Tensor, theta: float, scaling: RopeScaling) -> Tensor | float:
    """What frequencies [d/2] are multiplied by: 1 for short wavelengths, 1/factor for long ones."""
    assert scaling.high is not None
    if scaling.kind == "dynamic":
        return 1.0
    if scaling.kind == "linear":
        return 1 / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.context * frequencies / (2 * torch.pi)
        blend = ((turns - scaling.low) / (scaling.high - scaling.low)).clamp(0, 1)
        return blend + (1 - blend) / scaling.factor
    pairs = len(frequencies)  # yarn: the pair of numbers that turns so often in the context
    first, last = (
        pairs * log(scaling.context / (turns * 2 * torch.pi)) / log(theta)
        for turns in (scaling.high, scaling.low)
    )
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    last += 0.001 * (first == last)
    at = torch.arange(pairs, device=frequencies.device, dtype=torch.float64)
    blend = 1 - ((at - first) / (last - first)).clamp(0, 1)
    return blend + (1 - blend) / scaling.factor


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rotary: Tensor, islands: Islands) -> Tensor:
        ctx.save_for_backward(rotary)
        ctx.islands = islands
        return islands.rotate(x.detach(), rotary, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (rotary,) = ctx.saved_tensors
        return ctx.islands.rotate(gradient, rotary, True), None, None


def rotate(x: Tensor, rotary: Tensor, islands: Islands = PLAIN) -> Tensor:
    """Rotate the pairs (x[i], x[i + d/2]) of each head by their angles; x [b, heads, s, d].

    When `rotary` is at least float32, the products are too; the result has the dtype of x.
    """
    return cast(Tensor, _Rotate.apply(x, rotary, islands))
