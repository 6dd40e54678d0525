"""How well a model tells held-out texts apart: accuracy, and the F1 of its labels.

    F1 of a label   2·right / (texts of that label + texts that were given it)
    macro           the mean over all labels that some text has, or was given

as scikit-learn's `f1_score(average="macro")` has it. Each rank counts its own texts, by label; the
counts are added up, and averages are made of the sums.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from howdah.parallel.apply import ParallelModel
from howdah.plan.batch import MASKED


class Scores(NamedTuple):
    """The share of texts that got their own label, and the mean F1 of the labels."""

    accuracy: float
    f1: float

    def __str__(self) -> str:
        return f"accuracy {self.accuracy:.2%}, macro F1 {self.f1:.4f}"


class LabelCounts:
    """Counts what a model makes of texts, where it measures their loss.

    texts, given, right  [labels] how many have each label, got it, and got it rightly
    """

    def __init__(self, placed: ParallelModel) -> None:
        self._placed, device = placed, placed.mesh.device
        count = len(placed.plan.shape.labels)
        self.counts = torch.zeros(3, count, dtype=torch.float64, device=device)

    def loss(self, hidden: Tensor, labels: Tensor, tokens: float = 1.0) -> Tensor:
        """The summed cross-entropy of hidden states [b, s, h] and labels [b, s], as `plain_loss`
        has it; it also counts.
        """
        logits = self._placed.label_logits(hidden)
        place = labels != MASKED
        own, found = labels[place], logits[place].argmax(-1)
        size = self.counts.shape[1]
        every = [some.bincount(minlength=size) for some in (own, found, own[own == found])]
        self.counts += torch.stack(every)
        return self._placed.plain_loss(hidden, labels, tokens)

    def scores(self) -> Scores:
        """The scores over the texts of all ranks, which call together. Every tp rank counts the
        same texts, which changes no score.
        """
        mesh = self._placed.mesh
        with mesh.counters.aside():
            every = mesh.world.sum_scalars(self.counts.flatten().tolist())
        size = self.counts.shape[1]
        return scores(every[:size], every[size : 2 * size], every[2 * size :])


def scores(texts: Sequence[float], given: Sequence[float], right: Sequence[float]) -> Scores:
    """The scores of counts by label.

    >>> scores([3, 1, 0], [2, 2, 0], [2, 1, 0])
    Scores(accuracy=0.75, f1=0.7333333333333334)
    """
    met = [(2 * r, t + g) for t, g, r in zip(texts, given, right, strict=True) if t + g > 0]
    f1 = sum(twice / both for twice, both in met) / max(len(met), 1)
    return Scores(sum(right) / max(sum(texts), 1), f1)
