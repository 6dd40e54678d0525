"""Text from a model: samples one token after another; the same seed gives the same tokens.

    prompt → model → logits of the next token → keep the likely ones → draw → model → ...

The prompt passes through the model once, which stores its keys and values in a cache. After that,
each new token is one row. Each draw is a counter-based hash of (seed, position in the text), as is
all noise in howdah: no generator has a state, and a text that is cut and continued with the same
seed continues as it would have without the cut.

The text ends after `length` tokens, at the end token, or at the model's context length: there are
no learned positions beyond it, and rotary ones were never trained there.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.seeds import key, mix
from howdah.model.attention import Cache
from howdah.model.transformer import Transformer
from howdah.text.tokenizer import prompt_ids
from howdah.train.inputs import NO_TEXT

UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character


@dataclass(frozen=True)
class Draw:
    """How the next token is chosen.

    temperature  divides the logits; 0 takes the likeliest token
    top_k        only the k likeliest tokens (Fan et al. 2018); 0 keeps all
    top_p        only the likeliest tokens that together reach p (Holtzman et al. 2020)
    seed         seed of the draws
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def check_draw(draw: Draw) -> None:
    """Raises UserError when a setting is out of range."""
    if not 0 <= draw.temperature < float("inf"):
        raise UserError(
            f"temperature is {draw.temperature}; it must be 0 (the likeliest token) or more"
        )
    if draw.top_k < 0:
        raise UserError(f"top_k is {draw.top_k}; it must be at least 0 (all tokens)")
    if not 0 < draw.top_p <= 1:
        raise UserError(f"top_p is {draw.top_p}; it must be above 0 and at most 1")


def generate(
    model: Transformer, tokens: list[int], *, length: int, draw: Draw, end: int | None
) -> Iterator[int]:
    """Yields the tokens that follow `tokens`, one by one.

    length  most tokens to generate
    end     the token that ends the text; it is not yielded. None: there is no such token

    Raises UserError at the call when the prompt is empty, too long, or has tokens outside of the
    vocabulary.
    """
    check_draw(draw)
    if not model.shape.causal:
        raise UserError(f"this model cannot continue a text: {NO_TEXT}; sample from a decoder")
    if length < 0:
        raise UserError(f"length is {length}; it must be at least 0")
    shape = model.shape
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
    return _continue(model, tokens, length=length, draw=draw, end=end)


def _continue(
    model: Transformer, tokens: list[int], *, length: int, draw: Draw, end: int | None
) -> Iterator[int]:
    cache, fresh, start = Cache(), tokens, 0
    stop = min(len(tokens) + length, model.shape.context)
    for place in range(len(tokens), stop):
        logits = next_logits(model, fresh, start=start, cache=cache)
        token = choose(logits, draw, place=place)
        if token == end:
            return
        yield token
        fresh, start = [token], place


@torch.no_grad()
def next_logits(model: Transformer, tokens: list[int], *, start: int, cache: Cache) -> Tensor:
    """Logits [V] of the token after `tokens`, the first of which is at position `start`.

    cache  keys and values of the tokens before `start`; those of `tokens` are added
    """
    device = model.embedding.weight.device
    row = torch.tensor([tokens]).to(device)
    positions = torch.arange(start, start + len(tokens), device=device)[None]
    hidden = model(row, positions, cache=cache)
    return model.logits(hidden[0, -1])


def choose(logits: Tensor, draw: Draw, *, place: int) -> int:
    """Draws the token at position `place` of the text from `logits` [V], in float64.

    The probabilities that are compared with top_p are relative to the tokens that top_k keeps.
    """
    if draw.temperature == 0:
        return int(logits.argmax())
    wide = logits.to("cpu", torch.float64)
    scaled, order = ((wide - wide.max()) / draw.temperature).sort(descending=True, stable=True)
    shares = scaled[: draw.top_k or None].softmax(0)
    likelier = shares.cumsum(0) - shares  # total probability of likelier tokens
    edges = shares[likelier < draw.top_p].cumsum(0)
    index = int(torch.searchsorted(edges, edges[-1] * uniform(draw.seed, place), right=True))
    return int(order[min(index, len(edges) - 1)])


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for a position of the text: 53 bits of a counter-based hash."""
    (bits,) = mix(key(seed, "sample"), np.array([place], dtype=np.uint64))
    return float(int(bits) >> 11) / 2**53


def sample_text(
    model: Transformer, tokenizer: Tokenizer, prompt: str, *, length: int, draw: Draw, end: int
) -> Iterator[str]:
    """Yields the text that follows `prompt`, in pieces of whole characters.

    Raises UserError for a prompt that cannot be continued.
    """
    tokens = prompt_ids(tokenizer, prompt, end)
    return decode(tokenizer, generate(model, tokens, length=length, draw=draw, end=end))


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of `tokens`, piece by piece, as the tokens arrive.

    A character may be spread over several tokens, and a decoder may treat the first token of a text
    differently. So each piece is decoded together with the piece before it:

        tokens   | shown before | last piece | new |
                                ^ start      ^ shown
    """
    all_tokens: list[int] = []
    start = shown = 0
    piece = ""
    for token in tokens:
        all_tokens.append(token)
        before = tokenizer.decode(all_tokens[start:shown])
        piece = tokenizer.decode(all_tokens[start:])[len(before) :]
        if piece and not piece.endswith(UNFINISHED):
            yield piece
            start, shown, piece = shown, len(all_tokens), ""
    if piece:
        yield piece
