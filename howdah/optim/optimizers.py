"""Optimizers that update ranges of flat buffers.

A range is a contiguous run of elements of a unit's master weights, with the same run of its
gradient. torch's optimizers do the arithmetic, in fused kernels where torch has them. Their
parameters are the ranges, two per unit: one with weight decay, one without. They do not see the
model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howdah.plan.method import AVERAGE, Optimizer

FACTOR = "factor"  # of a group's learning rate


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a unit's flat buffer, as flat views of master and gradient.

    unit      name of the unit
    decay     whether weight decay applies
    master    the master weights
    gradient  their gradient
    rate      what the learning rate is multiplied by
    """

    unit: str
    start: int
    stop: int
    decay: bool
    master: Tensor
    gradient: Tensor
    rate: float = 1.0


def build_optimizer(settings: Optimizer, ranges: Sequence[Range]) -> torch.optim.Optimizer:
    """Builds the optimizer that `settings` names, with `ranges` as its parameters."""
    groups: list[dict[str, Any]] = []
    alike = sorted({(not one.decay, -one.rate) for one in ranges})
    for plain, negative in alike:
        some = [r for r in ranges if (not r.decay, -r.rate) == (plain, negative)]
        if members := [r.master for r in some if r.master.numel()]:
            amount = 0.0 if plain else settings.weight_decay
            groups.append({"params": members, "weight_decay": amount, FACTOR: -negative})
    for part in ranges:
        part.master.grad = part.gradient
    groups = groups or [{"params": [torch.zeros(0)], "weight_decay": 0.0}]  # torch wants one
    b1, b2 = settings.betas
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=(b1, b2), eps=settings.epsilon, fused=True)
    if settings.name == "adam":
        return torch.optim.Adam(groups, betas=(b1, b2), eps=settings.epsilon, fused=True)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, fused=True)
    return SkippingRMSprop(
        groups, alpha=b2, eps=settings.epsilon, momentum=settings.momentum, foreach=False
    )


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether one kernel of torch does the update; it can then divide the gradients, too."""
    return bool(optimizer.defaults.get("fused"))


class SkippingRMSprop(torch.optim.RMSprop):
    """RMSprop with the `found_inf` of torch's fused optimizers: a scalar of the device that is 1
    if an update must change nothing. It keeps a copy of one range at a time.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update, of all ranges."""
        if self.found_inf is None:
            return super().step(closure)
        skips, groups = self.found_inf.bool(), self.param_groups
        for group in groups:
            for part in group["params"]:
                tensors = [part, *self.state[part].values()]
                before = [tensor.clone() for tensor in tensors]
                self.param_groups = [{**group, "params": [part]}]
                super().step()
                for tensor, old in zip(tensors, before, strict=True):
                    tensor.copy_(torch.where(skips, old, tensor))
        self.param_groups = groups
        return None


def make_states(
    settings: Optimizer, optimizer: torch.optim.Optimizer, ranges: Sequence[Range], *, step: int
) -> None:
    """Creates the optimizer state of every range that has none: zeros, after `step` updates; an
    average of the weights starts from them.

    torch creates states at the first update; loading a checkpoint and inspecting need them before.
    """
    for part in ranges:
        if not part.master.numel() or part.master in optimizer.state:
            continue
        state = {name: torch.zeros_like(part.master) for name in settings.states}
        if AVERAGE in state:
            state[AVERAGE].copy_(part.master)
        if settings.name != "sgd":
            state["step"] = torch.full((), float(step), device=part.master.device)
        optimizer.state[part.master] = state


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the learning rate of the next update; that of a group is so many times as high."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get(FACTOR, 1.0)
