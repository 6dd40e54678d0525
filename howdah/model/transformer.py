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
from dataclasses import dataclass
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.attention import Attention, Cache, Mask, cut_documents, rotary_angles
from howdah.model.embedding import Embedding
from howdah.model.feedforward import FeedForward
from howdah.model.noise import Noise, dropout
from howdah.model.norm import build_norm, promoted
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts as all_parts


@dataclass(frozen=True)
class BlockContext:
    """The inputs that all blocks of one forward pass share.

    rotary  angles (`rotary_angles`), or None
    mask   attention mask (`cut_documents`)
    noise  of dropout; None turns dropout off
    cache  keys and values for decoding, or None
    """

    rotary: Tensor | None
    mask: Mask
    noise: Noise | None
    cache: Cache | None


BlockRun = Callable[[Tensor, BlockContext], Tensor]
Drop = Callable[["Block", Tensor, str, BlockContext], Tensor]


class Block(nn.Module):
    """One block: attention and feed-forward, each with norm, residual connection and dropout.

    run  runs the sublayers in a layout's own way (`parallel/recompute.py`); None: plainly
    """

    def __init__(self, shape: ModelShape, layer: str, dropout: float) -> None:
        super().__init__()
        self.name, self.before, self.dropout = f"layers.{layer}", shape.norm_at == "before", dropout
        self.attention_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        self.attention = Attention(shape, layer)
        self.feedforward_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        self.feedforward = FeedForward(shape)
        self.run: BlockRun | None = None
        self.drop: Drop = drop  # compiled blocks replace it

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Map x [b, s, h] → [b, s, h]."""
        return self.run(x, context) if self.run else self.sublayers(x, context)

    def sublayers(self, x: Tensor, context: BlockContext) -> Tensor:
        """Attention, then feed-forward."""
        inside = self.attention_norm(x) if self.before else x
        mixed = self.attention(inside, context.rotary, context.mask, context.cache)
        x = x + self._drop(mixed, "attention", context)
        x = x if self.before else self.attention_norm(x)
        inside = self.feedforward_norm(x) if self.before else x
        x = x + self._drop(self.feedforward(inside), "feedforward", context)
        return x if self.before else self.feedforward_norm(x)

    def _drop(self, x: Tensor, place: str, context: BlockContext) -> Tensor:
        return self.drop(self, x, place, context) if self.dropout else x


def drop(block: Block, x: Tensor, place: str, context: BlockContext) -> Tensor:
    """The dropout of a block at a place in it: its noise depends on the names of both."""
    return dropout(x, f"{block.name}.{place}", share=block.dropout, noise=context.noise)


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
    ) -> Tensor:
        """The hidden states [b, s, h] of tokens [b, s].

        positions  [b, s] position of each token in its document
        documents  [b, s] document numbers, as `cut_documents` takes them; None: one per row
        noise      of dropout; None turns dropout off
        cache      keeps keys and values between calls: first for a prompt, then one token each
        """
        x = self.embed(tokens, positions, noise=noise)
        context = self.context(x, positions, documents, noise=noise, cache=cache)
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
        rotary = None
        if self.shape.positions == "rotary":
            rotary = rotary_angles(self.shape, positions, promoted(x.dtype))
        mask = None if documents is None else cut_documents(documents, x.device)
        return BlockContext(rotary, mask, noise, cache)

    def final_norm(self, x: Tensor) -> Tensor:
        """The input of the head, from the output x of the last block."""
        return cast(Tensor, self.norm(x)) if self.shape.norm_at == "before" else x

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of a few hidden states [..., h], for decoding."""
        return F.linear(hidden, self.head_weight)
