"""Beam search: the texts of highest score among those that a few beams find, without a draw.

    step 1   the    a                       the best of all first tokens
    step 2   the cat    the dog             the best of what follows any of them: both from `the`
    step 3   the cat sat    the cat .       what ends is put aside, and another goes on for it

The score of a text is the sum of its log-probabilities; one that has ended is divided by its length
to the power `length_penalty`, or short texts would win (Wu et al. 2016,
https://arxiv.org/abs/1609.08144, section 7, has another form of it). Penalties of repetition change
the log-probabilities, and what they leave is not normalised again.

Each prompt is searched by itself, and many share a batch. Scores are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.generate.draw import Repeated, check_penalty
from howdah.generate.predictor import Predictor, check_prompt, padded, together

WORST = -1e9  # of a place that no text has taken


@dataclass(frozen=True)
class Beams:
    """How a text is searched for.

    count           texts that are followed at once, and kept of those that have ended
    length_penalty  the power of the length by which the score of a text is divided
    early_stopping  True: stop when `count` texts have ended. False: when the best that goes on is
                    worse than they are, were it to end here. "never": when it is worse at any
                    length that it may reach
    repetition_penalty  as of `Draw`, on log-probabilities
    """

    count: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0


class Found(NamedTuple):
    """A text that was found: its tokens, with the one that ended it, and its score."""

    tokens: tuple[int, ...]
    score: float


def check_beams(beams: Beams, *, vocab: int) -> None:
    """Raises UserError when a setting is out of range."""
    if not 1 <= beams.count <= vocab // 2:
        raise UserError(
            f"beams is {beams.count}; it must be at least 1, and at most half of the {vocab} tokens"
        )
    if not abs(beams.length_penalty) < float("inf"):
        raise UserError(f"length_penalty is {beams.length_penalty}; give a number, such as 1")
    check_penalty(beams.repetition_penalty)


def beam_search(
    model: Predictor,
    prompts: Sequence[Sequence[int]],
    *,
    length: int,
    beams: Beams,
    ends: Sequence[int],
) -> list[list[Found]]:
    """For each prompt the texts that follow it, best first: as many as there are beams, or fewer.

    length  most tokens to add
    ends    tokens that end a text

    Raises UserError when a setting is out of range, or a prompt cannot be continued.
    """
    check_beams(beams, vocab=model.shape.vocab)
    for prompt in prompts:
        check_prompt(model.shape, prompt, length=length)
    found: dict[int, list[Found]] = {n: [Found((), 0.0)] for n in range(len(prompts))}
    for numbers in together(model.shape, len(prompts)):
        room = {n: min(length, model.shape.context - len(prompts[n])) for n in numbers}
        searches = {n: _Search(beams, ends, limit=most) for n, most in room.items() if most > 0}
        if searches:
            _search(model, prompts, searches, beams=beams)
        found |= {n: search.found for n, search in searches.items()}
    return [found[n] for n in range(len(prompts))]


def _search(
    model: Predictor,
    prompts: Sequence[Sequence[int]],
    searches: dict[int, "_Search"],
    *,
    beams: Beams,
) -> None:
    """Runs the searches of some prompts together until all have ended."""
    own, going = [prompts[n] for n in searches], [*searches.values()]
    tokens, positions, cache = padded(own, model.device)
    repeated = Repeated(own, vocab=model.shape.vocab, penalty=beams.repetition_penalty)
    logits = model.next_logits(tokens, positions, cache)
    rows = torch.arange(len(own)).repeat_interleave(beams.count)  # every beam begins alike
    new = torch.empty(len(rows), 0, dtype=torch.int64)
    while True:
        there = rows.to(model.device)
        cache.keep(there)
        repeated.keep(rows)
        positions = positions.index_select(0, there)
        if new.shape[1]:
            repeated.add(new[:, 0].tolist())
            positions = positions[:, -1:] + 1
            logits = model.next_logits(new.to(model.device), positions, cache)
        else:
            logits = logits.index_select(0, there)
        scores = repeated.lower(logits.to(torch.float32).log_softmax(-1))
        parts = scores.view(-1, beams.count, scores.shape[1])
        steps = [search.advance(part) for search, part in zip(going, parts, strict=True)]
        on = [at for at, search in enumerate(going) if not search.done]
        if not on:
            return
        rows = torch.tensor([at * beams.count + origin for at in on for origin, _ in steps[at]])
        new = torch.tensor([[token] for at in on for _, token in steps[at]])
        going = [going[at] for at in on]


class _Search:
    """The beams of one prompt.

    limit   most tokens of a text
    length  tokens of the texts that go on
    found   texts that have ended, best first
    done    whether no more will be looked for
    """

    def __init__(self, beams: Beams, ends: Sequence[int], *, limit: int) -> None:
        self.beams, self.ends, self.limit = beams, frozenset(ends), limit
        self.length, self.found, self.done = 0, list[Found](), False
        self._texts: list[tuple[int, ...]] = [()] * beams.count
        self._scores = torch.full((beams.count,), WORST)
        self._scores[0] = 0.0  # of equal texts, one goes on

    def advance(self, log_probs: Tensor) -> list[tuple[int, int]]:
        """Goes on by one token, given log-probabilities [count, V]. Returns for each text that goes
        on (the number of the text that it continues, its new token), best first.
        """
        count, vocab = log_probs.shape
        total = (log_probs + self._scores.to(log_probs.device)[:, None]).flatten()
        # As many more as may end, so that enough go on.
        best = total.topk(min(max(2, 1 + len(self.ends)) * count, len(total)))
        scores, places = best.values.cpu(), [divmod(at, vocab) for at in best.indices.tolist()]
        self.length += 1
        ended = [self.length == self.limit or token in self.ends for _, token in places]
        self._put_aside(
            [
                Found((*self._texts[origin], token), self._valued(scores[at]))
                for at, (origin, token) in enumerate(places[:count])
                if ended[at]
            ]
        )
        on = [at for at, has_ended in enumerate(ended) if not has_ended][:count]
        self._scores = scores[on]
        self._texts = [(*self._texts[places[at][0]], places[at][1]) for at in on]
        self.done = not on or self._is_over()
        return [places[at] for at in on]

    def _valued(self, score: Tensor, length: int | None = None) -> float:
        """The score of a text that ends, or would end, with so many tokens."""
        return float(score / (length or self.length) ** self.beams.length_penalty)

    def _put_aside(self, ended: list[Found]) -> None:
        self.found = sorted([*self.found, *ended], key=lambda one: -one.score)[: self.beams.count]

    def _is_over(self) -> bool:
        if len(self.found) < self.beams.count:
            return False
        if self.beams.early_stopping is True:
            return True
        longest = self.beams.early_stopping == "never" and self.beams.length_penalty > 0
        hoped = self._valued(self._scores[0], self.limit if longest else None)
        return hoped <= self.found[-1].score
