"""Controls: breaks that a verification must notice, each the size of a real mistake.

A comparison that passes proves something only if it fails when it should. Each mutation breaks
the working code at one place; `verify` runs them beside the real thing and is itself in doubt if
one goes unnoticed.

    a sum skipped         one weight's gradient is not summed over the replicas
    a wrong count         one token too many per rank divides the loss
    a norm counted twice  one unit's squares enter the global norm twice
    a shifted micro-batch the first replica's first micro-batch has its labels moved by one

and where matrices are cut:

    an input's sum skipped  the gradient behind one region is not summed over the parts of tp
    a part left out         of one weight's gradient that each part has a part of
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from howdah.model.loss import Add
from howdah.optim.clip import squared_norm
from howdah.parallel.keeper import Resident
from howdah.parallel.sequence import Border, Coming
from howdah.parallel.tensor import Column
from howdah.plan.plan import Plan
from howdah.plan.sharding import placement, summed_over_tp
from howdah.text.batches import Micro
from howdah.train.step import Stepper, count_tokens
from howdah.verify.evidence import Mutate, Shift


@dataclass(frozen=True)
class Mutation:
    """A break, by name: of the stepper, or of the batch."""

    name: str
    mutate: Mutate | None = None
    shift: Shift | None = None


def mutations(plan: Plan) -> list[Mutation]:
    """The breaks that are possible on a plan: a sum, where ranks add to the first weight's."""
    found = [
        Mutation("a wrong count", mutate=count_one_more),
        Mutation("a norm counted twice", mutate=count_a_unit_twice),
        Mutation("a shifted micro-batch", shift=shift_first_micro),
    ]
    if plan.layout.tp > 1:
        found.append(Mutation("an input's sum skipped", mutate=skip_an_input_s_sum))
        if _partial(plan):
            found.append(Mutation("a part left out", mutate=leave_a_part_out))
    held = placement(plan.weights[0], plan, rank=0)
    sums = held is not None and len(held.summed) > 1
    return [Mutation("a sum skipped", mutate=skip_a_sum), *found] if sums else found


def count_one_more(stepper: Stepper) -> Stepper:
    """Every rank counts a token that is not there."""
    return replace(stepper, count=lambda micros: count_tokens(micros) + 1)


def count_a_unit_twice(stepper: Stepper) -> Stepper:
    """The first unit's squares enter the norm twice."""

    def square(gradients: Iterable[Tensor]) -> float:
        every = list(gradients)
        return squared_norm([*every[:1], *every])

    return replace(stepper, square=square)


def skip_a_sum(stepper: Stepper) -> Stepper:
    """The first weight's gradient is rank 0's own: what the others would add is left out."""
    rank, keeper = stepper.mesh.rank, stepper.placed.keeper
    if keeper:
        _leave_out(keeper, stepper.placed.plan.weights[0].name, rank)
        return stepper
    first = next(stepper.placed.model.parameters())
    first.register_hook(lambda gradient: gradient if rank == 0 else torch.zeros_like(gradient))
    return stepper


def _leave_out(keeper: Resident, name: str, rank: int) -> None:
    """On all ranks but 0, adds nothing to one weight's gradient."""
    kept, left_out = keeper.add, name

    def leave_out(name: str, add: Add, *, now: bool = False) -> None:
        kept(name, add if rank == 0 or name != left_out else lambda out: None, now=now)

    keeper.add = leave_out  # type: ignore[method-assign]


def skip_an_input_s_sum(stepper: Stepper) -> Stepper:
    """Every part keeps its own term of the gradient behind its first region."""
    columns = (m for m in stepper.placed.model.modules() if isinstance(m, Column))
    for column in columns:
        border = column.together.border
        column.together.border = _Deaf(border.group, border.length, border.sliced)
        break
    return stepper


class _Deaf(Border):
    """Hears nothing of the other parts' terms."""

    def sum(self, x: Tensor) -> Coming:
        return lambda: self.own(x).contiguous()


def leave_a_part_out(stepper: Stepper) -> Stepper:
    """Of one weight's gradient, only what the first part of tp adds is there."""
    keeper, plan = stepper.placed.keeper, stepper.placed.plan
    assert keeper is not None, "parts of tp have a keeper"
    _leave_out(keeper, _partial(plan)[0], stepper.mesh.place("tp"))
    return stepper


def _partial(plan: Plan) -> list[str]:
    """The weights of whose gradients each part of tp has a part."""
    return [w.name for w in plan.weights if len(summed_over_tp(w, plan, 0)) > 1]


def shift_first_micro(batch: list[Micro], replica: int) -> list[Micro]:
    """Labels of one micro-batch of replica 0, moved by one."""
    if replica != 0:
        return batch
    first = batch[0]
    return [replace(first, labels=np.roll(first.labels, 1, axis=1)), *batch[1:]]
