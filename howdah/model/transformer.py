"""A decoder-only Transformer in plain PyTorch.

    tokens → embedding (+ positions) → L blocks → norm → hidden states

    block, norm before:  x + attention(norm x), then x + feedforward(norm x)
    block, norm after:   norm(x + attention x), then norm(x + feedforward x)

It ends at the hidden states: the head and the loss are one operation (`loss.py`), because the
logits of a long sequence should never exist whole. The model knows no ranks, no layouts and no
random state. Weights are named as in `plan/sharding.py`, and a test holds the two together.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.attention import Attention, Cache, Mask, cut_documents, rotary_turns
from howdah.model.embedding import Embedding
from howdah.model.feedforward import FeedForward
from howdah.model.noise import Noise, dropout
from howdah.model.norm import build_norm, promoted
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts as all_parts


@dataclass(frozen=True)
class BlockContext:
    """What all blocks of one forward pass share: angles, mask, noise and cache."""

    turn: Tensor | None
    mask: Mask
    noise: Noise | None
    cache: Cache | None


class Block(nn.Module):
    """Attention and feed-forward, each with its norm, its residual and its dropout."""

    def __init__(self, shape: ModelShape, layer: str, dropout: float) -> None:
        super().__init__()
        self.name, self.before, self.dropout = f"layers.{layer}", shape.norm_at == "before", dropout
        self.attention_norm = build_norm(shape.norm, shape.width, shape.epsilon)
        self.attention = Attention(shape, layer)
        self.feedforward_norm = build_norm(shape.norm, shape.width, shape.epsilon)
        self.feedforward = FeedForward(shape)

    def forward(self, x: Tensor, around: BlockContext) -> Tensor:
        """Map x [b, s, h] → [b, s, h]."""
        inside = self.attention_norm(x) if self.before else x
        mixed = self.attention(inside, around.turn, around.mask, around.cache)
        x = x + self._drop(mixed, "attention", around)
        x = x if self.before else self.attention_norm(x)
        inside = self.feedforward_norm(x) if self.before else x
        x = x + self._drop(self.feedforward(inside), "feedforward", around)
        return x if self.before else self.feedforward_norm(x)

    def _drop(self, x: Tensor, place: str, around: BlockContext) -> Tensor:
        return dropout(x, f"{self.name}.{place}", share=self.dropout, noise=around.noise)


class Transformer(nn.Module):
    """The model of a ModelShape. Build it on the meta device; whoever places it fills it.

    parts  of the model (`plan.weights.parts`) to build; None: all. A pipeline's rank builds its
           own, under the names they have in the whole.
    """

    def __init__(
        self, shape: ModelShape, *, dropout: float = 0.0, parts: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self.shape, self.dropout = shape, dropout
        own = all_parts(shape) if parts is None else parts
        first, last = "embedding" in own, "head" in own
        if first or (last and shape.tied):
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
            self.norm = build_norm(shape.norm, shape.width, shape.epsilon)
        if last and not shape.tied:
            self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """The matrix that turns hidden states into logits: [V, h]."""
        return (self.embedding if self.shape.tied else self.head).weight

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states [b, s, h] of tokens [b, s].

        positions  [b, s] of each token inside its document
        documents  [b, s] document numbers on the host, rising along a row; None: one per row
        noise      turns dropout on
        cache      keeps keys and values between calls: first a prompt, then token by token
        """
        x = self.embed(tokens, positions, noise=noise)
        around = self.around(x, positions, documents, noise=noise, cache=cache)
        for block in self.layers.values():
            x = block(x, around)
        return self.final_norm(x)

    # -- the pieces of a forward pass, for whoever runs them on several ranks

    def embed(self, tokens: Tensor, positions: Tensor, *, noise: Noise | None = None) -> Tensor:
        """What the first block takes, [b, s, h], of tokens and positions [b, s]."""
        x = self.embedding(tokens)
        if self.shape.positions == "learned":
            x = x + self.positions(positions)
        return dropout(x, "embedding", share=self.dropout, noise=noise)

    def around(
        self,
        x: Tensor,
        positions: Tensor,
        documents: Tensor | None,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
    ) -> BlockContext:
        """What all blocks share, in the dtype and on the device of hidden states x."""
        turn = None
        if self.shape.positions == "rotary":
            turn = rotary_turns(self.shape, positions, promoted(x.dtype))
        mask = None if documents is None else cut_documents(documents, x.device)
        return BlockContext(turn, mask, noise, cache)

    def final_norm(self, x: Tensor) -> Tensor:
        """The hidden states that the head takes, of what the last block gives."""
        return cast(Tensor, self.norm(x)) if self.shape.norm_at == "before" else x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of a few hidden states [..., h], for decoding."""
        return F.linear(hidden, self.head_weight)
