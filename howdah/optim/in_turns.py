"""One optimizer that updates range after range, with masters and states that are elsewhere.

torch's optimizers hold all of their parameters at once. Where these come to the host one unit after
the other, the same kernel is called for one unit at a time, with the tensors that are there just
then. It is elementwise, so the bits are those of a single call.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howdah.optim.optimizers import Range, build_optimizer
from howdah.plan.method import Optimizer

Kind = tuple[bool, float]  # weight decay, and what the learning rate is multiplied by


@dataclass(frozen=True)
class Turn:
    """A range of one unit: master, gradient and states as flat tensors of the host; whether weight
    decay applies, and what the learning rate is multiplied by.
    """

    kind: Kind
    master: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]


class InTurns:
    """An optimizer of `settings` for ranges of some kinds.

    optimizer  torch's, whose groups have the learning rate
    updates    number of updates that were made
    """

    def __init__(self, settings: Optimizer, kinds: Iterable[Kind]) -> None:
        self.settings, self.updates = settings, 0
        self._groups: dict[Kind, dict[str, Any]] = {}
        ranges = []
        for decay, rate in sorted(set(kinds)):
            one = torch.zeros(1)  # only its group is used
            ranges.append(Range("", 0, 1, decay, one, one.clone(), rate=rate))
        self.optimizer = build_optimizer(settings, ranges)
        for group in self.optimizer.param_groups:
            for part in ranges:
                if any(part.master is x for x in group["params"]):
                    self._groups[part.decay, part.rate] = group

    @torch.no_grad()
    def step(self, turns: Sequence[Turn]) -> None:
        """Updates the ranges of one unit, as part of the update after `updates`."""
        for kind, group in self._groups.items():
            mine = [turn for turn in turns if turn.kind == kind and turn.master.numel()]
            group["params"] = [turn.master for turn in mine]
            for turn in mine:
                turn.master.grad = turn.gradient
                state = dict(turn.states)
                if self.settings.name != "sgd":
                    state["step"] = torch.full((), float(self.updates))
                self.optimizer.state[turn.master] = state
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for master in group["params"]:
                master.grad = None
            group["params"] = []
        self.optimizer.state.clear()
