"""One optimizer that updates range after range, with masters and states that are elsewhere.

torch's optimizers hold all of their parameters at once. Where these come to the host one unit after
the other, the same kernel is called for one unit at a time, with the tensors that are there just
then. It is elementwise, so the bits are those of a single call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howdah.optim.optimizers import Range, build_optimizer
from howdah.plan.method import Optimizer


@dataclass(frozen=True)
class Turn:
    """A range of one unit: master, gradient and states as flat tensors of the host; and whether
    weight decay applies.
    """

    decay: bool
    master: Tensor
    gradient: Tensor
    states: Mapping[str, Tensor]


class InTurns:
    """An optimizer of `settings`.

    optimizer  torch's, whose groups have the learning rate
    updates    number of updates that were made
    """

    def __init__(self, settings: Optimizer) -> None:
        self.settings, self.updates = settings, 0
        one = [torch.zeros(1), torch.zeros(1)]
        both = [
            Range("", 0, 1, decay, x, x.clone())
            for decay, x in zip((True, False), one, strict=True)
        ]
        self.optimizer = build_optimizer(settings, both)  # of nothing: only its groups are used

    @torch.no_grad()
    def step(self, turns: Sequence[Turn]) -> None:
        """Updates the ranges of one unit, as part of the update after `updates`."""
        for group, decay in zip(self.optimizer.param_groups, (True, False), strict=True):
            mine = [turn for turn in turns if turn.decay is decay and turn.master.numel()]
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
