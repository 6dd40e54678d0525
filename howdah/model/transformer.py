"""A decoder-only Transformer in plain PyTorch.

    tokens → embedding (+ positions) → L blocks → norm → hidden states

    block, norm before:  x + attention(norm x), then x + feedforward(norm x)
    block, norm after:   norm(x + attention x), then norm(x + feedforward x)

The forward pass ends at the hidden states: the head and the loss are one operation (`loss.py`),
because the logits of a long sequence should never be in memory all at once. The model knows no
ranks, no layouts and no random state. Weights are named as in `shapes/weights.py`; a test compares
the names.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.attention import Attention, Cache, rotary_angles
from howdah.model.documents import Mask, cut_documents
from howdah.model.embedding import Embedding
from howdah.model.feedforward import FeedForward
from howdah.model.islands import PLAIN, Drop, promoted
from howdah.model.latent import LatentAttention
from howdah.model.moe import Balancing, WithExperts
from howdah.model.noise import Noise, drop_of, dropout
from howdah.model.norm import added, build_norm
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts as all_parts


@dataclass(frozen=True)
class BlockContext:
    """The inputs that all blocks of one forward pass share.

    rotary  angles (`rotary_angles`), or None
    mask   attention mask (`cut_documents`)
    noise  of dropout; None turns dropout off
    cache  keys and values for decoding, or None
    balancing  what training asks of the routers of experts; None outside of training
    """

    rotary: Tensor | None
    mask: Mask
    noise: Noise | None
    cache: Cache | None
    balancing: Balancing | None = None


BlockRun = Callable[[Tensor, BlockContext], Tensor]
Drops = tuple[Drop | None, Drop | None]  # behind attention, and behind the feed-forward


class Block(WithExperts):
    """One block: attention and feed-forward, each with norm, residual connection and dropout. Some
    blocks have a mixture of experts in the place of the feed-forward.

    run   runs the sublayers in a layout's own way (`parallel/recompute.py`); None: plainly
    body  `both`, compiled; None: as it is
    """

    def __init__(self, shape: ModelShape, layer: str, dropout: float) -> None:
        super().__init__()
        self.name, self.before, self.dropout = f"layers.{layer}", shape.norm_at == "before", dropout
        self.attention_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        kind = LatentAttention if shape.latent else Attention
        self.attention = kind(shape, layer)
        self.feedforward_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
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
        return self.run(x, context) if self.run else self.sublayers(x, context)

    def sublayers(self, x: Tensor, context: BlockContext) -> Tensor:
        """Attention, then feed-forward."""
        first, second = (
            drop_of(context.noise, f"{self.name}.{place}", share=self.dropout, like=x)
            for place in ("attention", "feedforward")
        )
        body = self.body or partial(self.both, balancing=context.balancing)
        return body(x, context.rotary, context.mask, context.cache, (first, second))

    def both(
        self,
        x: Tensor,
        rotary: Tensor | None,
        mask: Mask,
        cache: Cache | None,
        drops: Drops,
        *,
        balancing: Balancing | None = None,
    ) -> Tensor:
        """The sublayers, of tensors that are the same for blocks of all names."""
        first, second = drops
        if self.before:
            mixed = self.attention(self.attention_norm(x), rotary, mask, cache)
            x, inside = self.feedforward_norm.behind(x, mixed, first)
            return added(x, self.feed(inside, balancing), second, self.islands)
        _, x = self.attention_norm.behind(x, self.attention(x, rotary, mask, cache), first)
        return self.feedforward_norm.behind(x, self.feed(x, balancing), second)[1]

    def feed(self, x: Tensor, balancing: Balancing | None) -> Tensor:
        """The feed-forward, or the experts in its place."""
        if self.sparse:
            return self.mixture(x, self.name, balancing)
        return cast(Tensor, self.feedforward(x))


class Transformer(nn.Module):
    """The model of a ModelShape. It is built on the meta device; `parallel` fills in the weights.

    parts  the parts of the model (`shapes.weights.parts`) to build; None: all. A rank of a
           pipeline builds its own parts, with the same names as in the full model.
    """

    def __init__(
        self, shape: ModelShape, *, dropout: float = 0.0, parts: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        self.islands, self.cut = PLAIN, cut_documents
        self.length: int | None = None  # of a sample; None: that of the positions
        own = all_parts(shape) if parts is None else parts
        first, last = "embedding" in own, "head" in own
        if first or (last and shape.tie_embeddings):
            self.embedding = Embedding(shape.vocab, shape.width)
        if first and shape.positions == "learned":
            self.positions = Embedding(shape.context, shape.width)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(shape, str(i), dropout)
                for i in range(shape.layers)
                if f"layers.{i}" in own
            }
        )
        if last and shape.norm_at == "before":
            self.norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        if last and not shape.tie_embeddings:
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, h] that maps hidden states to logits."""
        return (self.embedding if self.shape.tie_embeddings else self.head).weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
        balancing: Balancing | None = None,
    ) -> Tensor:
        """The hidden states [b, s, h] of tokens [b, s].

        positions  [b, s] position of each token in its document
        documents  [b, s] document numbers, as `cut_documents` takes them; None: one per row
        noise      of dropout; None turns dropout off
        cache      keeps keys and values between calls: first for a prompt, then one token each
        balancing  what training asks of the routers of experts
        """
        x = self.embed(tokens, positions, noise=noise)
        context = self.context(x, positions, documents, noise=noise, cache=cache)
        context = replace(context, balancing=balancing)
        for block in self.layers.values():
            x = block(x, context)
        return self.final_norm(x)

    # -- the pieces of a forward pass, for layouts that run them on several ranks

    def embed(self, tokens: Tensor, positions: Tensor, *, noise: Noise | None = None) -> Tensor:
        """The input of the first block [b, s, h], for tokens and positions [b, s]."""
        x = self.embedding(tokens)
        if self.shape.positions == "learned":
            x = x + self.positions(positions)
        return dropout(x, "embedding", share=self.dropout, noise=noise)

    def context(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
    ) -> BlockContext:
        """The context of all blocks, in the dtype and on the device of hidden states x."""
        rotary, scaling = None, self.shape.rope_scaling
        length = self.length or positions.shape[1]  # x may be a slice of it
        if self.shape.positions == "rotary":
            if cache is not None and scaling is not None and scaling.kind == "dynamic":
                length = int(positions.max()) + 1
            rotary = rotary_angles(self.shape, positions, promoted(x.dtype), length)
        mask = None
        if documents is not None:
            mask = self.cut(documents, x.device, length)
        return BlockContext(rotary, mask, noise, cache)

    def final_norm(self, x: Tensor) -> Tensor:
        """The input of the head, from the output x of the last block."""
        return cast(Tensor, self.norm(x)) if self.shape.norm_at == "before" else x

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of a few hidden states [..., h], for decoding."""
        return F.linear(hidden, self.head_weight)
