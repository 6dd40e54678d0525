"""Optimizers that update ranges of flat buffers.

A range is a run of elements of a unit's master weights, with the same run of its gradient.
torch's optimizers do the arithmetic, fused where torch has it; they see two parameters per unit,
the range that decays and the range that does not, and never the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from howdah.plan.method import Optimizer


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a unit: master weights and gradients, both flat views."""

    unit: str
    start: int
    stop: int
    decay: bool
    master: Tensor
    gradient: Tensor


def build_optimizer(settings: Optimizer, ranges: Sequence[Range]) -> torch.optim.Optimizer:
    """The optimizer that `settings` names, over `ranges`."""
    groups = []
    for decay in (True, False):
        members = [r.master for r in ranges if r.decay is decay and r.master.numel()]
        if members:
            groups.append({"params": members, "weight_decay": settings.decay if decay else 0.0})
    for part in ranges:
        part.master.grad = part.gradient
    b1, b2 = settings.betas
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=(b1, b2), eps=settings.epsilon, fused=True)
    if settings.name == "adam":
        return torch.optim.Adam(groups, betas=(b1, b2), eps=settings.epsilon, fused=True)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum, fused=True)
    return torch.optim.RMSprop(
        groups, alpha=b2, eps=settings.epsilon, momentum=settings.momentum, foreach=False
    )


def make_states(
    settings: Optimizer, optimizer: torch.optim.Optimizer, ranges: Sequence[Range], *, step: int
) -> None:
    """Gives every range its state as after `step` updates, zero until it is loaded.

    torch makes states at the first update; a checkpoint, and an inspection, need them before.
    """
    for part in ranges:
        if not part.master.numel() or part.master in optimizer.state:
            continue
        state = {name: torch.zeros_like(part.master) for name in settings.states}
        if settings.name != "sgd":
            state["step"] = torch.tensor(float(step), device=part.master.device)
        optimizer.state[part.master] = state


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The learning rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
