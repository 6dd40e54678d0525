"""Controls of routers and experts: breaks of runs with a mixture of experts (`mutations.py`).

a router's loss averaged   each micro-batch divides by its own tokens; the means are averaged
experts' rows shifted      in one block, each row is that of the token before
experts counted twice      with ep, their squares enter the global norm twice
an expert's sum skipped    with ep, the ranks that hold the same experts keep their own terms
other chunks not heard     with cp, a rank knows its own chunks of a sequence alone
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import cast

from torch import Tensor

from howdah.model.block import Block
from howdah.model.grouped import Sizes
from howdah.model.moe import Balancing
from howdah.optim.clip import squared_norm
from howdah.parallel.context_counts import SharedSequences
from howdah.parallel.stages import Given
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.train.step import StepContext
from howdah.verify.evidence import Mutate


def breaks_of(plan: Plan) -> dict[str, Mutate]:
    """The breaks that are possible on a plan, by name. A mean of means is wrong only where
    micro-batches have different numbers of tokens.
    """
    if plan.shape.experts is None:
        return {}
    found: dict[str, Mutate] = {"experts' rows shifted": shift_rows}
    if plan.layout.ep > 1:
        found["experts counted twice"] = count_experts_twice
        if axis(plan.layout, "expert_replicas").size > 1:
            found["an expert's sum skipped"] = skip_sums
    if plan.layout.cp > 1 and plan.method.routing.asks_sequences:
        found["other chunks not heard"] = hear_nobody
    if plan.method.routing.adds_loss and _short(plan):
        found["a router's loss averaged"] = average_losses
    return found


def _short(plan: Plan) -> bool:
    """Whether some micro-batch has padding, and others have none."""
    return 0 < _places(plan) - (plan.batch.global_batch or 0) < plan.micro_batch < _places(plan)


def _places(plan: Plan) -> int:
    return plan.layout.readers * plan.micros * plan.micro_batch


def count_experts_twice(context: StepContext) -> StepContext:
    """The squares of the gradients of experts enter the norm twice."""
    units = context.placed.units.values()
    experts = {
        unit.summed.untyped_storage().data_ptr()
        for unit in units
        if unit.buffer.unit.endswith(".experts")
    }

    def square(gradients: Iterable[Tensor]) -> Tensor:
        every = list(gradients)
        again = [flat for flat in every if flat.untyped_storage().data_ptr() in experts]
        return squared_norm([*every, *again])

    return replace(context, square=square)


def skip_sums(context: StepContext) -> StepContext:
    """The sums over the replicas of experts are not performed."""
    sums = context.placed.sums
    sums.skipped |= {
        number
        for number, row in enumerate(sums.sums)
        if any(span.unit.endswith(".experts") for span in row.spans)
    }
    return context


def hear_nobody(context: StepContext) -> StepContext:
    """Balance and capacity are those of each rank's chunks."""
    placed = context.placed
    placed.executor.sequences = _OwnChunks(placed.plan, context.mesh)
    return context


class _OwnChunks(SharedSequences):
    def hear(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        before = runs.cumsum(0, dtype=runs.dtype) - runs
        return before, runs.sum(0, dtype=runs.dtype)


def average_losses(context: StepContext) -> StepContext:
    """The losses of routers are means of means."""
    executor, plan = context.placed.executor, context.placed.plan
    kept, micros = executor.balancing, plan.layout.readers * plan.micros

    def averaged(given: Given, tokens: float) -> Balancing | None:
        found = kept(given, tokens)
        if found is None:
            return None
        mine = found.rows.sum().clamp(min=1)
        return replace(found, rows=found.rows * (tokens / (micros * mine)))

    executor.balancing = averaged  # type: ignore[method-assign]
    return context


def shift_rows(context: StepContext) -> StepContext:
    """In the first block with experts of each rank, each row is that of the token before."""
    for block in cast(Iterable[Block], context.placed.model.layers.values()):
        if block.sparse:
            block.experts.forward = _shifting(block.experts.forward)  # type: ignore[method-assign]
            break
    return context


def _shifting(experts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, sizes: Sizes) -> Tensor:
        return experts(x.roll(1, 0), sizes)

    return run
