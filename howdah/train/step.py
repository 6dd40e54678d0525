"""One training step. Its phases are the same for every layout:

  1. count    the tokens of the global batch that have a label, over all ranks
  2. run      each micro-batch forward and backward; its summed loss is divided by that count,
              so gradients are sums to which every token adds equally
  3. reduce   the gradients, mostly while backward still runs
  4. norm     of the full gradient, each element counted once; then clip
  5. update   the masters, and copy them to the weights, for which other ranks may wait
  6. report   the summed loss over all ranks

Averages are never averaged, neither over micro-batches nor over ranks.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from howdah.comm.recorder import Recorder
from howdah.model.noise import Noise
from howdah.optim.clip import clip, squared_norm, total_norm
from howdah.optim.optimizers import set_rate
from howdah.parallel.apply import ParallelModel
from howdah.parallel.mesh import Mesh
from howdah.parallel.stages import Given
from howdah.plan.batch import MASKED
from howdah.plan.layout import has_whole_norm
from howdah.plan.method import Method
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb
from howdah.text.batches import Micro


def count_tokens(micros: Sequence[Micro]) -> int:
    """The number of tokens in micro-batches of this rank that have a label."""
    return sum(int((micro.labels != MASKED).sum()) for micro in micros)


def counted(context: "StepContext", micros: Sequence[Micro]) -> int:
    """The number of labelled tokens that this rank adds to the global count: 0, except on the one
    rank of each replica that counts the batch.
    """
    return context.count(micros) if context.mesh.counts_batch else 0


@dataclass(frozen=True)
class StepContext:
    """What a training step works on. `count` and `square` are fields, so that `verify` can break
    them on purpose and check that it notices.

    placed  the model, laid out for this rank
    count   counts the labelled tokens of micro-batches
    square  computes the squared norm of gradients
    """

    placed: ParallelModel
    mesh: Mesh
    method: Method
    seed: int
    count: Callable[[Sequence[Micro]], int] = count_tokens
    square: Callable[[Iterable[Tensor]], float] = squared_norm

    @property
    def recorder(self) -> Recorder:
        """Records what this rank does at which time."""
        return self.mesh.counters.recorder


@dataclass(frozen=True)
class StepResult:
    """What a step measured; equal on all ranks.

    loss    mean over the labelled tokens of the global batch
    norm    of the full gradient, before clipping
    tokens  number of labelled tokens in the global batch
    stop    whether some rank was asked to stop
    """

    loss: float
    norm: float
    tokens: int
    stop: bool


def train_step(
    context: StepContext, micros: Sequence[Micro], *, step: int, rate: float, stop: bool = False
) -> StepResult:
    """Updates the model once, from this rank's micro-batches of the global batch. All ranks call
    together.

    step  number of updates done before
    rate  learning rate of this update
    stop  whether this rank was asked to stop
    """
    placed, world = context.placed, context.mesh.world
    tokens, stops = world.sum_scalars([counted(context, micros), float(stop)])  # 1
    with context.recorder.step(step + 1):
        loss = accumulate(context, micros, step=step, tokens=tokens)  # 2, 3
        norm = total_norm([_square(context)])  # 4
        with context.recorder.span(_update(len(micros))):  # 5
            clip(placed.gradients(), norm=norm, limit=context.method.grad_clip)
            set_rate(placed.optimizer, rate)
            placed.optimizer.step()
            for unit in placed.units.values():
                unit.copy_to_weights()
            if placed.gatherer:
                placed.gatherer.updated()
        (total,) = world.sum_scalars([loss if context.mesh.index_of("tp") == 0 else 0.0])  # 6
    return StepResult(total / max(tokens, 1), norm, int(tokens), stops > 0)


def _update(micros: int) -> Instruction:
    return Instruction(Verb.UPDATE, Action(Kind.UPDATE, 0, micros - 1))


def _square(context: StepContext) -> float:
    """The squared norm of the full gradient."""
    placed = context.placed
    if has_whole_norm(placed.plan.layout):
        return context.square(placed.gradients())
    counted = (
        unit.summed[start - unit.start : stop - unit.start]
        for unit, start, stop in placed.counted()
    )
    (square,) = context.mesh.world.sum_scalars([context.square(counted)])
    return square


def accumulate(context: StepContext, micros: Sequence[Micro], *, step: int, tokens: float) -> float:
    """Sets the gradients to those of the global batch. Returns the summed loss of this rank.

    tokens  number of labelled tokens in the global batch, by which the gradients are divided
    """
    placed = context.placed
    for unit in placed.units.values():
        (unit.summed if unit.gradients is None else unit.gradients).zero_()
    with placed.in_pass(f"a step of {len(micros)} micro-batches"):
        given = [to_device(context, micro, step=step) for micro in micros]
        return placed.executor.train(given, placed.loss, tokens=tokens)


def to_device(context: StepContext, micro: Micro, *, step: int) -> Given:
    """A micro-batch as tensors on this rank's device, with the noise of `step`."""
    noise = Noise(context.seed, step, torch.from_numpy(micro.samples))
    region = context.placed.region
    if region and region.sliced:  # dropout drops here what one device drops at these positions
        noise = replace(noise, positions=torch.arange(*region.slice), length=region.length)
    return replace(arrays_of(micro, context.mesh.device), noise=noise)


def arrays_of(micro: Micro, device: torch.device) -> Given:
    """A micro-batch as tensors on `device`, without noise; documents stay on the host."""
    tokens, labels, positions = (
        torch.from_numpy(array).to(device, non_blocking=True)
        for array in (micro.tokens, micro.labels, micro.positions)
    )
    return Given(tokens, labels, positions, torch.from_numpy(micro.documents), noise=None)


@torch.no_grad()
def held_out_loss(context: StepContext, micros: Iterable[Micro]) -> tuple[float, int]:
    """Mean loss per token over held-out micro-batches without dropout, and the number of tokens.
    Both are over all ranks, which call together.
    """
    context.placed.sync_weights()
    with context.mesh.counters.aside():
        return _held_out_loss(context, micros)


def _held_out_loss(context: StepContext, micros: Iterable[Micro]) -> tuple[float, int]:
    total, tokens, placed = 0.0, 0, context.placed
    for some in chunks(micros, placed.plan.micros):
        given = [arrays_of(micro, context.mesh.device) for micro in some]
        with placed.in_pass(f"a held-out loss of {len(some)} micro-batches"):
            total += placed.executor.evaluate(given, placed.plain_loss)
        tokens += count_tokens(some) if context.mesh.counts_batch else 0
    total = total if context.mesh.index_of("tp") == 0 else 0.0  # all tp ranks have the same
    total, count = context.mesh.world.sum_scalars([total, tokens])
    return total / max(count, 1), int(count)


def chunks(micros: Iterable[Micro], size: int) -> Iterator[list[Micro]]:
    """Yields lists of `size` micro-batches; the last may be shorter."""
    rest = iter(micros)
    while some := list(islice(rest, size)):
        yield some
