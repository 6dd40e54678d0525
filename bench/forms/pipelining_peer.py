"""torch.distributed.pipelining: ScheduleGPipe and Schedule1F1B over stages that are cut by hand.

The stages are howdah's: the same parts of the same Transformer. What torch leaves to its users
is done as cheaply as we know how: the two stages that hold the embedding sum its gradient by one
all-reduce, and the norm to clip by takes a scalar one.

Shapes at the border of the stages are given, so none are inferred or sent. Losses are divided
where they arise (`scale_grads=False`), which saves a pass over all gradients.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from cases import method
from howdahs import CPU, Place
from layouts import Form
from ours import plan_of
from peers import Step, adamw, fill
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from howdah.model.loss import cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.parallel.stages import Given, run_stage
from howdah.text.batches import Micro

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
ARRAYS = ("tokens", "labels", "positions", "documents")  # of a micro-batch


class Stage(nn.Module):
    """Some parts of the model; the last stage ends at the hidden states that the head takes."""

    def __init__(self, case: Form, rank: int) -> None:
        super().__init__()
        self.parts = plan_of(case).stages.parts[rank]
        with torch.device("meta"):
            self.model = Transformer(case.shape, parts=self.parts)
        self.to_empty(device=CPU)
        fill(case, self.model)

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """x: tokens [b, s] for the first stage, hidden states [b, s, h] for others."""
        first = "embedding" in self.parts
        given = Given(tokens=x, labels=x, positions=positions, documents=documents, noise=None)
        return run_stage(self.model, self.parts, {} if first else {"hidden": x}, given)["hidden"]


def pipelining(case: Form, place: Place, *, schedule: Literal["gpipe", "1f1b"]) -> Step:
    """One of torch's schedules."""
    stage, tokens = Stage(case, place.rank), case.rows * case.sequence
    first, last = place.rank == 0, place.rank == place.size - 1
    rows = case.rows // case.micros
    hidden = torch.empty(rows, case.sequence, case.shape.width)
    ids = torch.empty(rows, case.sequence, dtype=torch.int64)
    line = SCHEDULES[schedule](
        PipelineStage(
            stage,
            place.rank,
            place.size,
            CPU,
            input_args=ids if first else hidden.clone().requires_grad_(),
            output_args=hidden.clone().requires_grad_(),
        ),
        case.micros,
        loss_fn=lambda out, labels: (
            cross_entropy_sum(out, stage.model.head_weight, labels) / tokens
        ),
        scale_grads=False,
    )
    optimizer, limit = adamw(case, stage.model), method(case).grad_clip
    tied = stage.model.embedding.weight if first or last else None

    def step(micros: Sequence[Micro]) -> float | None:
        whole = {name: _joined(micros, name) for name in ARRAYS}
        around = {"positions": whole["positions"], "documents": whole["documents"]}
        losses: list[Tensor] = []
        arguments = (whole["tokens"],) if first else ()
        target = {"target": whole["labels"], "losses": losses} if last else {}
        line.step(*arguments, **target, **around, return_outputs=False)
        if tied is not None:
            dist.all_reduce(tied.grad)
        clip_stage(stage.model, limit, counted_elsewhere=None if first else tied)
        optimizer.step()
        optimizer.zero_grad()
        return sum(loss.item() for loss in losses) if last else None

    return step


def _joined(micros: Sequence[Micro], name: str) -> Tensor:
    return torch.from_numpy(np.concatenate([getattr(micro, name) for micro in micros]))


@torch.no_grad()
def clip_stage(model: nn.Module, limit: float, *, counted_elsewhere: Tensor | None) -> None:
    """To the norm of the whole gradient over all stages, the tied embedding counted once."""
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters]
    counted = [p.grad for p in parameters if p is not counted_elsewhere]
    square = torch.stack(torch._foreach_norm(counted)).square().sum()
    dist.all_reduce(square)
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, scale)
