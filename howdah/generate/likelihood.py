"""How likely a decoder finds given texts: the sum of the log-probabilities of their tokens.

    context   <end> The sky is        tokens   <end> The  sky  is
    wanted    blue                    asked                   blue    log P(blue | ...)

Texts of different length share a batch, the shorter ones with padding behind, which no token of
theirs attends to. Logits are made for wanted tokens alone, some rows at a time.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.generate.predictor import require_decoder, together
from howdah.model.islands import promoted
from howdah.model.transformer import Transformer

TOKENS = 8192  # of a batch, padding included
ROWS = 256  # wanted tokens whose logits are made at once


class Asked(NamedTuple):
    """Tokens `wanted` behind the tokens `context`; neither is empty."""

    context: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def read(self) -> int:
        """Tokens that the model reads: the last is wanted alone."""
        return len(self.context) + len(self.wanted) - 1


class Likelihood(NamedTuple):
    """The sum of the wanted tokens' log-probabilities, in nats, and whether each of them was the
    likeliest.
    """

    log_prob: float
    greedy: bool


def likelihoods(model: Transformer, asked: Sequence[Asked]) -> list[Likelihood]:
    """The likelihood of each of `asked`.

    Raises UserError for a model that is no decoder, and for one that is longer than the context.
    """
    require_decoder(model.shape)
    for one in asked:
        if one.read > model.shape.context:
            raise UserError(
                f"a text has {one.read} tokens, and the model's context is {model.shape.context}; "
                "shorten it"
            )
    found: list[Likelihood] = [Likelihood(0.0, True)] * len(asked)
    for numbers in together(model.shape, len(asked)):
        for batch in _batches(asked, numbers):
            some = _likelihoods(model, [asked[n] for n in batch])
            for number, likelihood in zip(batch, some, strict=True):
                found[number] = likelihood
    return found


def _batches(asked: Sequence[Asked], numbers: Sequence[int]) -> Iterator[list[int]]:
    """The numbers of texts of about equal length, the longest first."""
    left = sorted(numbers, key=lambda number: -asked[number].read)
    while left:
        rows = max(TOKENS // asked[left[0]].read, 1)
        yield left[:rows]
        left = left[rows:]


@torch.no_grad()
def _likelihoods(model: Transformer, asked: Sequence[Asked]) -> list[Likelihood]:
    device, longest = model.embedding.weight.device, max(one.read for one in asked)
    rows = [[*one.context, *one.wanted] for one in asked]
    tokens = torch.tensor([row[:-1] + [0] * (longest + 1 - len(row)) for row in rows]).to(device)
    positions = torch.arange(longest).expand_as(tokens).to(device)
    hidden = model(tokens, positions)
    places = [
        (row, at) for row, one in enumerate(asked) for at in range(len(one.context) - 1, one.read)
    ]
    row, at = torch.tensor(places).to(device).unbind(1)
    wanted = torch.tensor([token for one in asked for token in one.wanted]).to(device)
    chosen, best = _each(model, hidden[row, at], wanted)
    sizes = [len(one.wanted) for one in asked]
    pairs = zip(torch.split(chosen, sizes), torch.split(best, sizes), strict=True)
    return [Likelihood(float(scores.sum()), bool(hits.all())) for scores, hits in pairs]


def _each(model: Transformer, hidden: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """For hidden states [n, h] the log-probability of each wanted token [n], in float64 on the CPU,
    and whether it is the likeliest.
    """
    scores, hits = [], []
    for some, tokens in zip(torch.split(hidden, ROWS), torch.split(wanted, ROWS), strict=True):
        logits = model.logits(some)
        wide = logits.to(promoted(logits.dtype)).log_softmax(-1)
        scores.append(wide.gather(1, tokens[:, None])[:, 0].cpu().to(torch.float64))
        hits.append((logits.argmax(-1) == tokens).cpu())
    return torch.cat(scores), torch.cat(hits)
