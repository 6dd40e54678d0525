"""A Transformer in plain PyTorch: a decoder, an encoder, or both (T5).

    tokens → embedding (+ positions, token types, norm) → L blocks → norm → hidden states

    source → embedding → blocks of the encoder → norm ──────────┐             both
    tokens → embedding → blocks, which also attend to the source → norm → hidden states

The forward pass ends at the hidden states: the head and the loss are one operation (`loss.py`),
because the logits of a long sequence should never be in memory all at once. The model knows no
ranks, no layouts and no random state. Weights are named as in `shapes/weights.py`; a test compares
the names.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.attention import Cache, both_ways, rotary_angles
from howdah.model.block import Block, BlockContext
from howdah.model.documents import Cuts, Mask, cut_documents, dense_mask, document_numbers
from howdah.model.embedding import Embedding
from howdah.model.feedforward import activated
from howdah.model.islands import PLAIN, promoted
from howdah.model.moe import Balancing
from howdah.model.noise import Noise, dropout
from howdah.model.norm import build_norm
from howdah.model.relative import RelativeTable, Seen
from howdah.shapes.part import Part
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts as all_parts


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
        if first or "target" in own or (last and shape.tie_embeddings):
            self.embedding = Embedding(shape.vocab, shape.width)
        if first and shape.positions == "learned":
            self.positions = Embedding(shape.context + shape.first_position, shape.width)
        if first and shape.token_types:
            self.token_types = Embedding(shape.token_types, shape.width)
        if first and shape.embedding_norm:
            self.embedding_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        self.encoder, self.layers = (
            nn.ModuleDict(
                {
                    str(i): Block(shape, str(i), dropout, stack=stack)
                    for i in range(count)
                    if f"{stack}.{i}" in own
                }
            )
            for stack, count in (("encoder", shape.encoder_layers), ("layers", shape.layers))
        )
        if shape.family == "encoder-decoder":
            tables = {"encoder": self.encoder, "decoder": self.layers}
            self.relative = nn.ModuleDict(
                {
                    name: RelativeTable(shape.relative_buckets, shape.heads)
                    for name, blocks in tables.items()
                    if len(blocks)
                }
            )
        if f"encoder.{shape.encoder_layers - 1}" in own and shape.norm_at == "before":
            self.encoder_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        if last and shape.norm_at == "before":
            self.norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        if last and shape.transform:
            self.transform = nn.Linear(shape.width, shape.width)
            self.transform_norm = build_norm(shape.norm, shape.width, shape.norm_eps)
        if last and shape.pooler:
            self.pooler = nn.Linear(shape.width, shape.width)
        if last and not shape.tie_embeddings:
            self.head: nn.Module = nn.Linear(shape.width, shape.outputs, bias=shape.head_bias)
        elif shape.tie_embeddings and shape.transform and (first or last):
            self.head = HeadBias(shape.vocab)  # in the unit of the matrix

    @property
    def last_of_encoder(self) -> Part | None:
        """The block of the encoder behind which its norm stands; None without an encoder."""
        last = self.shape.encoder_layers - 1
        return Part("encoder", last) if last >= 0 else None

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all stacks that are here, in forward order."""
        return [cast(Block, one) for one in (*self.encoder.values(), *self.layers.values())]

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, h] that maps hidden states to logits; [labels, h] of a classifier."""
        return cast(Tensor, (self.embedding if self.shape.tie_embeddings else self.head).weight)

    @property
    def head_bias(self) -> Tensor | None:
        """What is added to the logits [V], or [labels]; None: nothing."""
        return cast(Tensor, self.head.bias) if self.shape.head_bias else None

    def forward(  # noqa: PLR0913
        self,
        tokens: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        *,
        types: Tensor | None = None,
        source: Tensor | None = None,
        seen: Tensor | None = None,
        noise: Noise | None = None,
        cache: Cache | None = None,
        balancing: Balancing | None = None,
    ) -> Tensor:
        """The hidden states [b, s, h] of tokens [b, s].

        positions  [b, s] position of each token in its document
        documents  [b, s] document numbers, as `cut_documents` takes them; None: one per row
        types      [b, s] token types, of a model that has them; None: 0
        source     [b, t] tokens that an encoder reads, of a model that has one in front
        seen       [b, t] 1 where they are text, 0 where they are padding; None: all are text
        noise      of dropout; None turns dropout off
        cache      keeps keys and values between calls: first for a prompt, then one token each
        balancing  what training asks of the routers of experts
        """
        if self.shape.encoder_layers:
            assert source is not None, "an encoder reads a source"
            states = self.encode(source, seen, noise=noise)
            return self.decode(tokens, states, seen, noise=noise, cache=cache)
        x = self.embed(tokens, positions, types, noise=noise)
        context = self.context(x, positions, documents, noise=noise, cache=cache)
        context = replace(context, balancing=balancing)
        for block in self.layers.values():
            x = block(x, context)
        return self.final_norm(x, noise)

    # -- an encoder and a decoder behind it

    def encode(self, source: Tensor, seen: Tensor | None, *, noise: Noise | None = None) -> Tensor:
        """What the encoder makes [b, t, h] of source tokens [b, t]; `seen` as for `forward`."""
        x = self.embed(source, source, noise=noise)
        context = self.source_context(x.device, source.shape[1], seen, noise=noise)
        for block in self.encoder.values():
            x = block(x, context)
        return cast(Tensor, self.encoder_norm(x))

    def decode(
        self,
        tokens: Tensor,
        source: Tensor,
        seen: Tensor | None,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The hidden states [b, s, h] of tokens [b, s] that follow those of the cache, behind what
        `encode` has made of the source [b, t, h]. A cache keeps what it needs of that, too.
        """
        x = self.embed(tokens, tokens, noise=noise, place="target")
        context = self.target_context(source, tokens.shape[1], seen, noise=noise, cache=cache)
        for block in self.layers.values():
            x = block(x, context)
        return self.final_norm(x)

    def source_context(
        self, device: torch.device, length: int, seen: Tensor | None, *, noise: Noise | None = None
    ) -> BlockContext:
        """The context of the encoder's blocks, for sources of `length` tokens."""
        table = cast(RelativeTable, self.relative["encoder"])
        bias = table.bias(range(length), length, both_ways=True, device=device)
        dropping = self._dropping(noise, length)
        return BlockContext(None, Seen(_of_rows(seen), bias), noise, None, dropping=dropping)

    def target_context(
        self,
        source: Tensor,
        length: int,
        seen: Tensor | None,
        *,
        noise: Noise | None = None,
        cache: Cache | None = None,
    ) -> BlockContext:
        """The context of the decoder's blocks, for `length` more tokens than the cache has."""
        before, device = cache.length if cache else 0, source.device
        table, keys = cast(RelativeTable, self.relative["decoder"]), before + length
        bias = table.bias(range(before, keys), keys, both_ways=False, device=device)
        earlier = torch.ones(length, keys, dtype=torch.bool, device=device).tril(before)
        across = Seen(_of_rows(seen))
        own, dropping = Seen(earlier, bias), self._dropping(noise, length)
        return BlockContext(
            None, own, noise, cache, dropping=dropping, source=source, across=across
        )

    def _dropping(self, noise: Noise | None, length: int) -> tuple[float, int] | None:
        """What drops attention's probabilities in samples of `length` tokens; None: nothing."""
        return (self.dropping, length) if noise is not None and self.dropping else None

    # -- the pieces of a forward pass, for layouts that run them on several ranks

    def embed(
        self,
        tokens: Tensor,
        positions: Tensor,
        types: Tensor | None = None,
        *,
        noise: Noise | None = None,
        place: str = "embedding",
    ) -> Tensor:
        """The input of the first block [b, s, h], for tokens, positions and token types [b, s].
        `place` names its dropout.
        """
        x = self.embedding(tokens)
        if self.shape.positions == "learned":
            first = self.shape.first_position
            x = x + self.positions(positions + first if first else positions)
        if self.shape.token_types:
            x = x + self.token_types(torch.zeros_like(tokens) if types is None else types)
        if self.shape.embedding_norm:
            x = self.embedding_norm(x)
        return dropout(x, place, share=self.dropout, noise=noise)

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
        dropping = self._dropping(noise, length)
        mask: Mask = None
        seen = cache.seen(positions.shape[1]) if cache else None
        if cache and cache.length and seen is not None:
            mask = seen[:, None, None]
        elif seen is not None:  # padding is a document of its own
            documents = seen.to(torch.int32)
        if documents is not None:
            mask = self.cut(documents, x.device, length)
            if dropping and mask is not None:
                numbers = documents
                if isinstance(mask, Cuts):
                    numbers = document_numbers(mask, len(positions))
                mask = dense_mask(numbers.to(x.device))
            if isinstance(mask, Tensor) and not self.shape.causal:
                mask = both_ways(mask)
        return BlockContext(rotary, mask, noise, cache, dropping=dropping)

    def final_norm(self, x: Tensor, noise: Noise | None = None) -> Tensor:
        """The input of the head, from the output x of the last block. Which tokens of a text stand
        for all of it, the labels say: only these have one.
        """
        if self.shape.norm_at == "before":
            x = self.norm(x)
        if self.shape.pooler:
            x = dropout(self.pooler(x).tanh(), "pooler", share=self.dropout, noise=noise)
        if self.shape.family == "encoder-decoder" and self.shape.tie_embeddings:
            x = x * self.shape.width**-0.5  # T5 1.0: an embedding is larger than a head
        if self.shape.transform:
            x = self.transform_norm(activated(self.transform(x), self.shape.feedforward))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of a few hidden states [..., h], for decoding."""
        return F.linear(hidden, self.head_weight, self.head_bias)

    # -- texts that are read as a whole, each as its tokens

    @torch.no_grad()
    def states(self, text: Sequence[int]) -> Tensor:
        """The last hidden states [1, s, h] of a text, in front of the head; of an encoder-decoder
        those of the encoder.
        """
        if self.shape.encoder_layers:
            return self.encode(self._row(text), None)
        x = self._read(text)
        return cast(Tensor, self.norm(x)) if self.shape.norm_at == "before" else x

    @torch.no_grad()
    def scores(self, text: Sequence[int], places: Sequence[int]) -> Tensor:
        """What the head says [n, V] of some places of a text."""
        return self.logits(self.final_norm(self._read(text)[0, places]))

    def _row(self, text: Sequence[int]) -> Tensor:
        return torch.tensor([text], device=self.embedding.weight.device)

    def _read(self, text: Sequence[int]) -> Tensor:
        """What the last block makes [1, s, h] of a text."""
        tokens = self._row(text)
        positions = torch.arange(len(text), device=tokens.device)[None]
        x = self.embed(tokens, positions)
        context = self.context(x, positions, None)
        for block in self.layers.values():
            x = block(x, context)
        return x


def _of_rows(seen: Tensor | None) -> Tensor | None:
    """[b, t] as a mask of pairs [b, 1, 1, t]."""
    return None if seen is None else seen.bool()[:, None, None]
