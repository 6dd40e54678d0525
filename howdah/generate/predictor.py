"""What decoding asks of a model, on one device or on several; and prompts as its input.

Prompts of different length share a batch: the shorter ones have padding in front, to which no token
attends, and their positions begin behind it.

    tokens     0 0 7 4       positions  0 0 0 1       hidden  2
               5 1 9 2                  0 1 2 3               0

Behind an encoder the prompts are its sources, and each text begins with the start token.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.model.attention import Cache
from howdah.model.transformer import Transformer
from howdah.shapes.shape import ModelShape
from howdah.text.masking import NO_TEXT


class Predictor(Protocol):
    """A model that predicts the next token. Where several ranks have its parts, all call together,
    and get the same.
    """

    shape: ModelShape
    device: torch.device

    def next_logits(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [b, V] of the token behind `tokens` [b, s], which are at `positions` [b, s].

        cache  of the tokens before; those of `tokens` are added
        """
        ...


class OneDevice:
    """A model that is whole on one device. Raises UserError for one that reads a source first."""

    def __init__(self, model: Transformer) -> None:
        if model.shape.encoder_layers:
            raise UserError("an encoder-decoder reads sources first; use BehindEncoder")
        self.model, self.shape = model, model.shape
        self.device = model.embedding.weight.device

    @torch.no_grad()
    def next_logits(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [b, V] of the token behind `tokens` [b, s]."""
        hidden = self.model(tokens, positions, cache=cache)
        return self.model.logits(hidden[:, -1])


class Stacks(Protocol):
    """An encoder, and a decoder behind it. Where several ranks have their parts, all call together,
    and get the same logits.
    """

    shape: ModelShape
    device: torch.device

    def encode(self, source: Tensor, seen: Tensor | None) -> Tensor:
        """What the encoder makes [b, t, h] of source tokens [b, t].

        seen  [b, t] 1 where they are text, 0 where they are padding; None: all are text
        """
        ...

    def behind(self, tokens: Tensor, source: Tensor, seen: Tensor | None, cache: Cache) -> Tensor:
        """Logits [b, V] of the token behind `tokens` [b, s], which follow those of the cache, where
        `encode` has made `source`.
        """
        ...


class WholeStacks:
    """An encoder-decoder that is whole on one device."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.shape = model, model.shape
        self.device = model.embedding.weight.device

    @torch.no_grad()
    def encode(self, source: Tensor, seen: Tensor | None) -> Tensor:
        """What the encoder makes [b, t, h] of source tokens [b, t]."""
        return self.model.encode(source, seen)

    @torch.no_grad()
    def behind(self, tokens: Tensor, source: Tensor, seen: Tensor | None, cache: Cache) -> Tensor:
        """Logits [b, V] of the token behind `tokens` [b, s], which read `source`."""
        return self.model.logits(self.model.decode(tokens, source, seen, cache=cache)[:, -1])


class BehindEncoder:
    """The decoder of an encoder-decoder, and the sources of the texts that it decodes together: one
    for each, in their order. Raises UserError for a source that cannot be read.
    """

    def __init__(self, stacks: Stacks, sources: Sequence[Sequence[int]]) -> None:
        self.stacks, self.shape, self.device = stacks, stacks.shape, stacks.device
        for source in sources:
            check_prompt(stacks.shape, source, length=0)
        tokens, _, cache = padded(sources, self.device)
        seen = cache.seen(tokens.shape[1])
        self._source = stacks.encode(tokens, seen), seen

    def next_logits(self, tokens: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Logits [b, V] of the token behind `tokens` [b, s], which read their sources."""
        cache.source = cache.source or self._source
        return self.stacks.behind(tokens, *cache.source, cache=cache)


def padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor, Cache]:
    """(tokens [b, s], positions [b, s], an empty cache that knows the padding) of prompts."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    hidden = torch.tensor([longest - len(prompt) for prompt in prompts])
    positions = (torch.arange(longest) - hidden[:, None]).clamp(min=0)
    ragged = bool(hidden.any())
    cache = Cache(hidden.to(device) if ragged else None)
    return tokens.to(device), positions.to(device), cache


def together(shape: ModelShape, count: int) -> list[list[int]]:
    """The numbers of the texts that may share a batch. Wavelengths that depend on the length of a
    text are those of one text alone.
    """
    scaling = shape.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        return [[number] for number in range(count)]
    return [[*range(count)]] if count else []


def check_prompt(shape: ModelShape, tokens: Sequence[int], *, length: int) -> None:
    """Raises UserError when a model cannot continue `tokens`: there are none or too many, or some
    are not in its vocabulary. `length` is the number of tokens to add.
    """
    require_text(shape)
    if length < 0:
        raise UserError(f"length is {length}; it must be at least 0")
    if not tokens:
        raise UserError("there is nothing to continue; begin with the end token or some text")
    if len(tokens) > shape.context:
        raise UserError(
            f"the prompt has {len(tokens)} tokens, and the model's context is {shape.context}; "
            "shorten it"
        )
    for token in tokens:
        if not 0 <= token < shape.vocab:
            raise UserError(
                f"the prompt has token {token}, and the model knows {shape.vocab}; "
                "use the tokenizer it was trained with"
            )


OF_LABELS = (
    "it tells texts apart, by howdah.pipeline('text-classification', FOLDER); sample from a "
    "language model"
)


def require_decoder(shape: ModelShape) -> None:
    """Raises UserError when a model is no decoder alone."""
    if shape.family == "encoder-decoder":
        raise UserError("texts are scored by a decoder, and this model is an encoder-decoder")
    require_text(shape)


def require_text(shape: ModelShape) -> None:
    """Raises UserError when a model writes no text."""
    if shape.labels:
        raise UserError(f"this model cannot continue a text: {OF_LABELS}")
    if not shape.causal:
        raise UserError(f"this model cannot continue a text: {NO_TEXT}; sample from a decoder")
