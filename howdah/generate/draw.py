"""How the next token is drawn from the logits.

    logits → lower those of tokens that are there already → divide by the temperature
           → keep the likely ones → draw

Each draw is a counter-based hash of (seed, position in the text), as is all noise in howdah: no
generator has a state, and a text that is cut and continued with the same seed continues as it would
have without the cut. A text does not depend on the others that are drawn beside it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.seeds import key, mix


@dataclass(frozen=True)
class Draw:
    """How the next token is chosen.

    temperature  divides the logits; 0 takes the likeliest token
    top_k        only the k likeliest tokens (Fan et al. 2018); 0 keeps all
    top_p        only the likeliest tokens that together reach p (Holtzman et al. 2020)
    seed         seed of the draws
    repetition_penalty  divides the logits above 0 of tokens that are in the text, and multiplies
                 those below (Keskar et al. 2019, https://arxiv.org/abs/1909.05858)
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0


GREEDY = Draw(temperature=0)


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
    check_penalty(draw.repetition_penalty)


def check_penalty(penalty: float) -> None:
    """Raises UserError when a repetition penalty is out of range."""
    if not 0 < penalty < float("inf"):
        raise UserError(
            f"repetition_penalty is {penalty}; it must be above 0 (1 leaves tokens as they are)"
        )


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


def choose_each(logits: Tensor, draw: Draw, places: Sequence[int]) -> list[int]:
    """Draws a token for each row of `logits` [b, V], at its position of `places`."""
    if draw.temperature == 0:
        return [int(token) for token in logits.argmax(-1).tolist()]
    return [choose(row, draw, place=n) for row, n in zip(logits, places, strict=True)]


def uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for a position of the text: 53 bits of a counter-based hash."""
    (bits,) = mix(key(seed, "sample"), np.array([place], dtype=np.uint64))
    return float(int(bits) >> 11) / 2**53


class Repeated:
    """The tokens that are in each text, for the penalty of repeating one.

    Padding is not counted, so the penalty of a text does not depend on the others beside it.
    """

    def __init__(self, texts: Sequence[Sequence[int]], *, vocab: int, penalty: float) -> None:
        self.penalty = penalty
        self._found = torch.zeros(len(texts) if penalty != 1 else 0, vocab, dtype=torch.bool)
        for row, text in zip(self._found, texts, strict=False):
            row[torch.tensor(text)] = True

    def lower(self, scores: Tensor) -> Tensor:
        """`scores` [b, V], lower where a token is in the text."""
        if self.penalty == 1:
            return scores
        lowered = torch.where(scores < 0, scores * self.penalty, scores / self.penalty)
        return torch.where(self._found.to(scores.device), lowered, scores)

    def add(self, tokens: Sequence[int]) -> None:
        """One more token for each text."""
        if self.penalty != 1:
            self._found[torch.arange(len(tokens)), torch.tensor(tokens)] = True

    def keep(self, rows: Tensor) -> None:
        """Keeps these texts, in this order; one may be kept several times."""
        if self.penalty != 1:
            self._found = self._found.index_select(0, rows.cpu())


def listed(steps: Iterator[list[tuple[int, int]]], rows: int) -> list[list[int]]:
    """The tokens of each of `rows` texts, from what `rows.generate_rows` yields."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for step in steps:
        for row, token in step:
            found[row].append(token)
    return found
