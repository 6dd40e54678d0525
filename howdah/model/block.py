"""A block: attention and feed-forward, each with norm, residual connection and dropout.

norm before:  x + attention(norm x), then x + feedforward(norm x)
              and between the two, behind an encoder, x + cross(norm x, source)
norm after:   norm(x + attention x), then norm(x + feedforward x)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor

from howdah.model.attention import Attention, Cache, CrossAttention
from howdah.model.documents import Dropping, Mask
from howdah.model.feedforward import FeedForward
from howdah.model.islands import PLAIN, Drop
from howdah.model.latent import LatentAttention
from howdah.model.moe import Balancing, WithExperts
from howdah.model.noise import Noise, drop_of, drop_within
from howdah.model.norm import added, build_norm
from howdah.model.relative import Seen
from howdah.shapes.part import Part
from howdah.shapes.shape import ModelShape


@dataclass(frozen=True)
class BlockContext:
    """The inputs that all blocks of one forward pass share.

    rotary  what attention knows of positions: angles (`rotary_angles`), or under ALiBi the
            positions themselves [b, s]; None: nothing
    mask   attention mask (`cut_documents`)
    noise  of dropout; None turns dropout off
    cache  keys and values for decoding, or None
    balancing  what training asks of the routers of experts; None outside of training
    dropping  the share of attention's probabilities that is dropped, and positions of a sample
    source    [b, t, h] what the encoder has made of the source, for a decoder behind one
    across    which of it is seen, None without a source
    """

    rotary: Tensor | None
    mask: Mask
    noise: Noise | None
    cache: Cache | None
    balancing: Balancing | None = None
    dropping: tuple[float, int] | None = None
    source: Tensor | None = None
    across: Seen | None = None


BlockRun = Callable[[Tensor, BlockContext], Tensor]
Drops = tuple[Drop | None, ...]  # behind each sub-layer


class Block(WithExperts):
    """One block: attention and feed-forward, each with norm, residual connection and dropout; in a
    decoder behind an encoder also attention to the source. Some blocks have a mixture of experts in
    the place of the feed-forward.

    run   runs the sublayers in a layout's own way (`parallel/recompute.py`); None: plainly
    body  `both`, compiled; None: as it is
    """

    def __init__(
        self, shape: ModelShape, layer: str, dropout: float, *, stack: str = "layers"
    ) -> None:
        super().__init__()
        self.part = Part(stack, int(layer))
        self.name, self.before, self.dropout = str(self.part), shape.norm_at == "before", dropout
        self.heads = shape.heads
        self.attention_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        kind = LatentAttention if shape.latent else Attention
        self.attention = kind(shape, layer)
        self.feedforward_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        self.crosses = stack == "layers" and shape.family == "encoder-decoder"
        if self.crosses:
            self.cross_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
            self.cross = CrossAttention(shape, layer)
        self.sparse = shape.sparse(int(layer))
        if self.sparse:
            self.add_experts(shape)
        else:
            self.feedforward = FeedForward(shape)
        self.islands = PLAIN
        self.run: BlockRun | None = None
        self.body: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Map x [b, s, h] → [b, s, h]."""
        if isinstance(context.mask, Seen) and torch.is_grad_enabled():
            context.mask.expected()
        return self.run(x, context) if self.run else self.sublayers(x, context)

    def sublayers(self, x: Tensor, context: BlockContext) -> Tensor:
        """Attention, to the source too, then feed-forward."""
        drops = tuple(
            drop_of(context.noise, f"{self.name}.{place}", share=self.dropout, like=x)
            for place in ("attention", *(("cross",) if self.crosses else ()), "feedforward")
        )
        body = self.body or partial(
            self.both,
            balancing=context.balancing,
            source=context.source if self.crosses else None,
            across=self.dropping(context, context.across, "cross probabilities"),
        )
        mask = self.dropping(context, context.mask, "probabilities")
        return body(x, context.rotary, mask, context.cache, drops)

    def dropping(self, context: BlockContext, mask: Mask, place: str) -> Mask:
        """A mask of this block's attention, with the noise that drops probabilities there."""
        noise = context.noise
        if noise is None or context.dropping is None:
            return mask
        assert mask is None or isinstance(mask, Tensor | Seen), "attention is of matrices here"
        share, length = context.dropping
        drop = drop_within(noise, f"{self.name}.{place}", share=share, length=length)
        first, _ = cast(Attention, self.attention).own
        return Dropping(mask, drop, first, self.heads)

    def both(  # noqa: PLR0913
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Mask,
        cache: Cache | None,
        drops: Drops,
        *,
        balancing: Balancing | None = None,
        source: Tensor | None = None,
        across: Mask = None,
    ) -> Tensor:
        """The sublayers, of tensors that are the same for blocks of all names."""
        first, second = drops[0], drops[-1]
        if self.before:
            mixed = self.attention(self.attention_norm(x), rotary, mask, cache)
            if source is not None:
                x, inside = self.cross_norm.behind(x, mixed, first)
                mixed, first = self.cross.cross(inside, source, across, cache), drops[1]
            x, inside = self.feedforward_norm.behind(x, mixed, first)
            return added(x, self.feed(inside, balancing), second, self.islands)
        _, x = self.attention_norm.behind(x, self.attention(x, rotary, mask, cache), first)
        return self.feedforward_norm.behind(x, self.feed(x, balancing), second)[1]

    def feed(self, x: Tensor, balancing: Balancing | None) -> Tensor:
        """The feed-forward, or the experts in its place."""
        if self.sparse:
            return self.mixture(x, self.name, balancing)
        return cast(Tensor, self.feedforward(x))
