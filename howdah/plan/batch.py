"""Batch sizes: two of global batch, micro-batch and accumulation determine the third.

Accumulation is the layout's number of micro-batches per step (x4). The size of the global batch
changes the result of training; how the batch is divided over ranks and micro-batches does not. A
global batch that does not divide evenly is padded with masked samples, so that every rank makes the
same calls:

    global 10, micro 2, dp 3        micro-step 0: 2 2 2     micro-step 1: 2 2 (2 masked)

A ramp grows the global batch linearly over the first steps (GPT-3: from 32K to 3.2M tokens). The
early steps then have fewer micro-batches; the layout's x is that of the full batch.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from howdah.base.bounds import Bound, Samples, Steps
from howdah.base.errors import UserError
from howdah.base.tables import out_of_bounds
from howdah.plan.layout import Layout

MASKED = -100  # the label of a token that is not to be predicted, as in torch's cross-entropy


@dataclass(frozen=True)
class Batch:
    """The batch sizes of a run, in samples (sequences).

    global_batch  samples per step over all ranks; None: computed from the other two numbers
    micro_batch   samples that one rank runs at once; None: computed from the other two numbers
    ramp_from     global batch of the first step; 0: no ramp
    ramp_steps    number of steps until the global batch is full
    """

    global_batch: Samples | None = None
    micro_batch: Samples | None = None
    ramp_from: Annotated[int, Bound(0, 1 << 31)] = 0
    ramp_steps: Steps = 0

    def size(self, step: int) -> int:
        """The global batch of step `step`, counted from 0. The batch must be resolved."""
        assert self.global_batch is not None
        if self.ramp_from == 0 or step >= self.ramp_steps:
            return self.global_batch
        grown = (self.global_batch - self.ramp_from) * step // self.ramp_steps
        return self.ramp_from + grown


def micro_steps(samples: int, *, micro: int, replicas: int) -> int:
    """Number of micro-batches of `micro` samples that each replica runs for `samples` in all."""
    return -(-samples // (micro * replicas))


def resolve_batch(batch: Batch, layout: Layout) -> tuple[Batch, Layout]:
    """The batch and the layout, with all their numbers filled in. The layout's dp must be known.

    If only one batch size is given, a missing x is 1. Raises UserError if neither is given, if a
    number is out of bounds, or if the numbers contradict each other.
    """
    dp, micros = layout.dp, layout.micros
    assert dp is not None
    total, micro = batch.global_batch, batch.micro_batch
    for problem in out_of_bounds(batch, "batch"):
        raise UserError(problem)
    if total is None and micro is not None:
        total = micro * dp * (micros or 1)
    elif micro is None and total is not None:
        micro = -(-total // (dp * (micros or 1)))
    if total is None or micro is None:
        raise UserError(
            "the batch is open: give two of batch.global_batch, batch.micro_batch and the "
            "layout's x (micro-batches per step)"
        )
    most = -(-total // dp)
    if micro > most:
        raise UserError(
            f"batch.micro_batch {micro} is more than a replica's part of batch.global_batch "
            f"{total} on {dp} replicas, and the rest would be padding; use "
            f"batch.micro_batch={most}"
        )
    needed = micro_steps(total, micro=micro, replicas=dp)
    if micros is not None and micros != needed and batch.micro_batch is None:
        raise UserError(
            f"batch.global_batch {total} on {dp} replicas makes x{needed} micro-batches of one "
            f"size, but the layout says x{micros}; use x{needed}, or another batch.global_batch"
        )
    if micros is not None and micros != needed:
        raise UserError(
            f"batch.global_batch {total} on {dp} replicas with batch.micro_batch {micro} takes "
            f"x{needed}, but the layout says x{micros}; drop one of the three"
        )
    _check_ramp(batch, total)
    full = replace(batch, global_batch=total, micro_batch=micro)
    return full, replace(layout, micros=needed)


def _check_ramp(batch: Batch, total: int) -> None:
    if batch.ramp_from > total:
        raise UserError(f"batch.ramp_from {batch.ramp_from} is over the global batch {total}")
    if bool(batch.ramp_from) != bool(batch.ramp_steps):
        raise UserError("a ramp needs both batch.ramp_from and batch.ramp_steps")
