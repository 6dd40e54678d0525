"""Steps whose loss is far above those before (`method.spike`): which ones they are.

    losses    4.1 4.0 4.2 4.1 | 9.7           window of the losses before; 9.7 > mean + 6·deviation
    update    yes yes yes yes |  -            left out as one whose norm is not finite: so no rank
                                              and no host of a GPU must be asked

The loss of a step is one number, equal on all ranks, so each decides alike. The window is on their
device, and in the checkpoints (`Past`): a resumed run decides as one that never stopped, on any
number of ranks, which all have the same window. All losses go in, spikes too, so that a lasting
change of the loss is no spike for long (as in OLMo-core's SkipStepOptimizer).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from howdah.checkpoint.facts import Past
from howdah.plan.method import Spike

LEAST = 2  # losses of which there is a deviation


class Watched(NamedTuple):
    """What was decided of a step, on its device.

    square  the squared norm by which it is updated: not finite if the update is left out
    told    [2] whether the loss is a spike, and above which loss it would be
    """

    square: Tensor
    told: Tensor


class Spikes:
    """Watches the losses of a run.

    count   spikes so far, as far as they were told
    goes_back  whether a spike was told behind which the run is to go back
    """

    def __init__(self, policy: Spike, device: torch.device, past: Past | None = None) -> None:
        self.policy, self.count, self.goes_back = policy, 0, False
        self._losses = torch.zeros(policy.window, dtype=torch.float64, device=device)
        self._seen = 0
        self._backs: tuple[int, int] = -1, 0  # the checkpoint, and how often the run went there
        if past:
            self.restore(past)

    def restore(self, past: Past) -> None:
        """Takes the window of a checkpoint; one of another size keeps the latest losses."""
        window, seen, losses = self.policy.window, past.seen, past.losses
        wrapped = seen > len(losses)
        if (wrapped and len(losses) != window) or len(losses) > window:
            turn = seen % len(losses) if wrapped else 0
            losses = (*losses[turn:], *losses[:turn])[-window:]
            seen = len(losses)
        self._losses[: len(losses)] = torch.tensor(losses, dtype=torch.float64)
        self._seen, self.count = seen, past.count

    def past(self) -> Past:
        """What a checkpoint is to know, when all steps were told."""
        known = min(self._seen, self.policy.window)
        return Past(tuple(self._losses[:known].tolist()), self._seen, self.count)

    def watch(self, loss: Tensor, square: Tensor) -> Watched:
        """Decides of a step, and adds its loss to the window. Nothing waits for the device.

        loss    mean over the tokens of the global batch: a float64 scalar, equal on all ranks
        square  squared norm of the gradient
        """
        limit = self._limit(loss)
        spike = loss > limit
        self._losses[self._seen % self.policy.window] = loss
        self._seen += 1
        left_out = torch.where(spike, torch.full_like(square, torch.inf), square)
        return Watched(left_out, torch.stack([spike.to(torch.float64), limit]))

    def _limit(self, loss: Tensor) -> Tensor:
        """Above which loss a step is a spike."""
        limit, known = torch.full_like(loss, torch.inf), min(self._seen, self.policy.window)
        if known < max(LEAST, self.policy.window // 2):
            return limit
        deviation, mean = torch.std_mean(self._losses[:known])
        if self.policy.deviations:
            limit = torch.minimum(limit, mean + self.policy.deviations * deviation)
        if self.policy.ratio:
            limit = torch.minimum(limit, self.policy.ratio * mean)
        return limit

    def tell(self, step: int, loss: float, told: Sequence[float]) -> str:
        """The line on a step that was told; empty if it is no spike."""
        if not told or not told[0]:
            return ""
        self.count += 1
        self.goes_back = self.policy.action == "rollback"
        return f"spike       step {step}: loss {loss:.4f} is above {told[1]:.4f}: no update"

    def may_go_back(self, to: int) -> bool:
        """Whether the run may go back to the checkpoint of step `to`, and counts that it does.
        Below 0: there is none.
        """
        self.goes_back = False
        last, times = self._backs
        times = times + 1 if to == last else 1
        if to < 0 or times > self.policy.most:
            return False
        self._backs = to, times
        return True

    def back(self, past: Past) -> None:
        """Takes the window of the checkpoint to which the run went back; spikes stay counted."""
        self._seen = 0
        self.restore(replace(past, count=self.count))
