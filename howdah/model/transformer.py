"""A Transformer of one stack in plain PyTorch: a decoder, or an encoder.

    tokens → embedding (+ positions, token types, norm) → L blocks → norm → hidden states

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.attention import Attention, Cache, both_ways, rotary_angles
from howdah.model.documents import Cuts, Dropping, Mask, cut_documents, dense_mask, document_numbers
from howdah.model.embedding import Embedding
from howdah.model.feedforward import FeedForward, activated
from howdah.model.islands import PLAIN, Drop, promoted
from howdah.model.latent import LatentAttention
from howdah.model.moe import Balancing, WithExperts
from howdah.model.noise import Noise, drop_of, drop_within, dropout
from howdah.model.norm import added, build_norm
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts as all_parts


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
    """

    rotary: Tensor | None
    mask: Mask
    noise: Noise | None
    cache: Cache | None
    balancing: Balancing | None = None
    dropping: tuple[float, int] | None = None


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
        self.heads = shape.heads
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
        return body(x, context.rotary, self.mask_of(context), context.cache, (first, second))

    def mask_of(self, context: BlockContext) -> Mask:
        """The mask of this block's attention, with the noise that drops its probabilities."""
        mask, noise = context.mask, context.noise
        if noise is None or context.dropping is None:
            return mask
        assert mask is None or isinstance(mask, Tensor), "attention as matrices has a dense mask"
        share, length = context.dropping
        drop = drop_within(noise, f"{self.name}.probabilities", share=share, length=length)
        first, _ = cast(Attention, self.attention).own
        return Dropping(mask, drop, first, self.heads)

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


class HeadBias(nn.Module):
    """The bias [V] of a head whose matrix is the embedding."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(vocab))


class Transformer(nn.Module):
    """The model of a ModelShape. It is built on the meta device; `parallel` fills in the weights.

    attention_dropout  the share of attention's probabilities that is dropped
    parts  the parts of the model (`shapes.weights.parts`) to build; None: all. A rank of a
           pipeline builds its own parts, with the same names as in the full model.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        parts: Collection[str] | None = None,
    ) -> None:
        super().__init__()
        self.shape, self.dropout, self.dropping = shape, dropout, attention_dropout
        self.islands, self.cut = PLAIN, cut_documents
        self.length: int | None = None  # of a sample; None: that of the positions
        own = all_parts(shape) if parts is None else parts
        first, last = "embedding" in own, "head" in own
        if first or (last and shape.tie_embeddings):
            self.embedding = Embedding(shape.vocab, shape.width)
        if first and shape.positions == "learned":
            self.positions = Embedding(shape.context + shape.first_position, shape.width)
        if first and shape.token_types:
            self.token_types = Embedding(shape.token_types, shape.width)
        if first and shape.embedding_norm:
            self.embedding_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        self.layers = nn.ModuleDict(
            {
                str(i): Block(shape, str(i), dropout)
                for i in range(shape.layers)
                if f"layers.{i}" in own
            }
        )
        if last and shape.norm_at == "before":
            self.norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        if last and shape.transform:
            self.transform = nn.Linear(shape.width, shape.width)
            self.transform_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        if last and not shape.tie_embeddings:
            self.head: nn.Module = nn.Linear(shape.width, shape.vocab, bias=shape.transform)
        elif shape.tie_embeddings and shape.transform and (first or last):
            self.head = HeadBias(shape.vocab)  # in the unit of the matrix

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, h] that maps hidden states to logits."""
        return cast(Tensor, (self.embedding if self.shape.tie_embeddings else self.head).weight)

    @property
    def head_bias(self) -> Tensor | None:
        """What is added to the logits [V]; None: nothing."""
        return cast(Tensor, self.head.bias) if self.shape.transform else None

    def forward(  # noqa: PLR0913
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        *,
        types: Tensor | None = None,
        noise: Noise | None = None,
        cache: Cache | None = None,
        balancing: Balancing | None = None,
    ) -> Tensor:
        """The hidden states [b, s, h] of tokens [b, s].

        positions  [b, s] position of each token in its document
        documents  [b, s] document numbers, as `cut_documents` takes them; None: one per row
        types      [b, s] token types, of a model that has them; None: 0
        noise      of dropout; None turns dropout off
        cache      keeps keys and values between calls: first for a prompt, then one token each
        balancing  what training asks of the routers of experts
        """
        x = self.embed(tokens, positions, types, noise=noise)
        context = self.context(x, positions, documents, noise=noise, cache=cache)
        context = replace(context, balancing=balancing)
        for block in self.layers.values():
            x = block(x, context)
        return self.final_norm(x)

    # -- the pieces of a forward pass, for layouts that run them on several ranks

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor | None = None,
        *,
        noise: Noise | None = None,
    ) -> Tensor:
        """The input of the first block [b, s, h], for tokens, positions and token types [b, s]."""
        x = self.embedding(tokens)
        if self.shape.positions == "learned":
            first = self.shape.first_position
            x = x + self.positions(positions + first if first else positions)
        if self.shape.token_types:
            x = x + self.token_types(torch.zeros_like(tokens) if types is None else types)
        if self.shape.embedding_norm:
            x = self.embedding_norm(x)
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
        elif self.shape.positions == "alibi":
            rotary = positions
        drops = noise is not None and self.dropping > 0
        mask: Mask = None
        if documents is not None:
            mask = self.cut(documents, x.device, length)
            if drops and mask is not None:
                numbers = documents
                if isinstance(mask, Cuts):
                    numbers = document_numbers(mask, len(positions))
                mask = dense_mask(numbers.to(x.device))
            if isinstance(mask, Tensor) and not self.shape.causal:
                mask = both_ways(mask)
        dropping = (self.dropping, length) if drops else None
        return BlockContext(rotary, mask, noise, cache, dropping=dropping)

    def final_norm(self, x: Tensor) -> Tensor:
        """The input of the head, from the output x of the last block."""
        if self.shape.norm_at == "before":
            x = self.norm(x)
        if self.shape.transform:
            x = self.transform_norm(activated(self.transform(x), self.shape.feedforward))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of a few hidden states [..., h], for decoding."""
        return F.linear(hidden, self.head_weight, self.head_bias)
