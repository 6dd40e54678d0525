"""An exponential moving average of the weights: one more state of the optimizer.

    A ← c·A + (1 - c)·W      after each update that changes W;  c = min(decay, (1 + t)/(10 + t))

t is the number of steps before (tf.train.ExponentialMovingAverage). The small c of early steps
forgets the weights from which training starts. A is of at least float32, as masters are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from howdah.optim.optimizers import Range
from howdah.plan.method import AVERAGE, Optimizer


def new_share(settings: Optimizer, *, step: int) -> float:
    """1 - c behind `step` steps; 0 where no average is kept."""
    if not settings.average:
        return 0.0
    return 1 - min(settings.average, (1 + step) / (10 + step))


@torch.no_grad()
def move_averages(
    optimizer: torch.optim.Optimizer, ranges: Sequence[Range], *, share: float, square: Tensor
) -> None:
    """Moves the averages of all ranges toward their masters, by `share` of the difference; nothing
    moves when the update was left out.

    square  squared norm of the gradient, a float64 scalar, not finite if it was
    """
    parts = [part.master for part in ranges if part.master.numel()]
    averages = [optimizer.state[master][AVERAGE] for master in parts]
    if not square.is_cpu:  # the host does not know
        moved = torch.where(square.isfinite(), share, 0.0)
        for average, master in zip(averages, parts, strict=True):
            average.lerp_(master, moved.to(average.dtype))
    elif averages and square.isfinite():
        torch._foreach_lerp_(averages, parts, share)
