"""Controls: breaks that a verification must notice, each the size of a real mistake.

A comparison that passes proves something only if it fails when it should. Each mutation breaks
the working code at one place; `verify` runs them beside the real thing and is itself in doubt if
one goes unnoticed.

    a sum skipped         one weight's gradient is not summed over the replicas
    a wrong count         one token too many per rank divides the loss
    a norm counted twice  one unit's squares enter the global norm twice
    a shifted micro-batch the last rank's first micro-batch has its labels moved by one
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from howdah.optim.clip import squared_norm
from howdah.plan.layout import Layout
from howdah.text.batches import Micro
from howdah.train.step import Stepper, count_tokens
from howdah.verify.evidence import Mutate, Shift


@dataclass(frozen=True)
class Mutation:
    """A break, by name: of the stepper, or of the batch."""

    name: str
    mutate: Mutate | None = None
    shift: Shift | None = None


def mutations(layout: Layout) -> list[Mutation]:
    """The breaks that are possible on a layout."""
    found = [
        Mutation("a wrong count", mutate=count_one_more),
        Mutation("a norm counted twice", mutate=count_a_unit_twice),
        Mutation("a shifted micro-batch", shift=shift_first_micro),
    ]
    return [Mutation("a sum skipped", mutate=skip_a_sum), *found] if layout.world > 1 else found


def count_one_more(stepper: Stepper) -> Stepper:
    """Every rank counts a token that is not there."""
    return replace(stepper, count=lambda micros: count_tokens(micros) + 1)


def count_a_unit_twice(stepper: Stepper) -> Stepper:
    """The first unit's squares enter the norm twice."""

    def square(gradients: Iterable[Tensor]) -> float:
        first, *rest = gradients
        return squared_norm([first, first, *rest])

    return replace(stepper, square=square)


def skip_a_sum(stepper: Stepper) -> Stepper:
    """The first weight's gradient is rank 0's own: what the others would add is left out."""
    first = next(stepper.placed.model.parameters())
    rank = stepper.mesh.rank
    first.register_hook(lambda gradient: gradient if rank == 0 else torch.zeros_like(gradient))
    return stepper


def shift_first_micro(batch: list[Micro], rank: int) -> list[Micro]:
    """Labels of one micro-batch of rank 0, moved by one."""
    if rank != 0:
        return batch
    first = batch[0]
    return [replace(first, labels=np.roll(first.labels, 1, axis=1)), *batch[1:]]
