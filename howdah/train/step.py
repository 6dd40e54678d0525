"""One training step. Its phases are the same for every layout:

  1. count    the tokens of the global batch that have a label, over all ranks
  2. run      each micro-batch forward and backward; its summed loss is divided by that count,
              so gradients are sums to which every token adds equally
  3. reduce   the gradients, mostly while backward still runs
  4. sum      the loss over all ranks, and the squares of the full gradient, each element counted
              once
  5. update   (left out if the loss is a spike, where the method asks for that)
              the masters, by the clipped gradient, behind a snapshot of them, and copy them to
              the weights, for which other ranks may wait; and the biases of routers, by the tokens
              that each expert had on all ranks
  6. tell     loss and norm: the host asks for them when it needs them

Averages are never averaged, neither over micro-batches nor over ranks.

On a GPU the host only launches all this: nothing between 1 and 6 reads a number of the device, and
what 1 needs is there before the step begins (`feed.py`). With homes (`parallel/homes.py`) it waits
for moves, and for the norm of an update on the host.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import sqrt

import torch
from torch import Tensor

from howdah.checkpoint.snapshot import Snapshots
from howdah.comm.lane import streams_of
from howdah.comm.recorder import Recorder
from howdah.optim.average import move_averages, new_share
from howdah.optim.clip import clipped_update, squared_norm
from howdah.optim.optimizers import set_rate
from howdah.parallel.apply import ParallelModel
from howdah.parallel.executor import Loss
from howdah.parallel.expert_counts import expert_counts, move_biases
from howdah.parallel.flat_params import FlatUnit, publish
from howdah.parallel.mesh import Mesh
from howdah.parallel.stages import Given
from howdah.plan.batch import MASKED
from howdah.plan.layout import has_whole_norm
from howdah.plan.method import Method
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb
from howdah.text.batches import Micro
from howdah.train.feed import Counts, Fed, OnDevice, arrays_of, columns_of, on_device, with_noise
from howdah.train.spikes import Spikes
from howdah.train.state import count_updates
from howdah.train.tell import Told, over_ranks, tell


def count_tokens(micros: Sequence[Micro]) -> int:
    """The number of tokens in micro-batches of this rank that have a label."""
    return sum(int((micro.labels != MASKED).sum()) for micro in micros)


def counted(context: "StepContext", micros: Sequence[Micro]) -> int:
    """The number of labelled tokens that this rank adds to the global count: 0, except on the one
    rank of each replica that counts the batch.
    """
    return context.count(micros) if context.mesh.counts_batch else 0


def has_packed_rows(micro: Micro) -> bool:
    """Whether some row of a micro-batch has several documents."""
    return bool((micro.documents[:, 0] != micro.documents[:, -1]).any())


@dataclass(frozen=True)
class StepContext:
    """What a training step works on. `count` and `square` are fields, so that `verify` can break
    them on purpose and check that it notices.

    placed     the model, laid out for this rank
    count      counts the labelled tokens of micro-batches
    square     computes the squared norm of gradients, as a float64 scalar on their device
    snapshots  copies of masters and states for which an update must wait
    spikes     decides which losses are spikes, whose updates are left out
    ahead      updates that the optimizer's states have seen beyond one a step (`Start.ahead`)
    """

    placed: ParallelModel
    mesh: Mesh
    method: Method
    seed: int
    count: Callable[[Sequence[Micro]], int] = count_tokens
    square: Callable[[Iterable[Tensor]], Tensor] = squared_norm
    snapshots: Snapshots = field(default_factory=Snapshots)
    spikes: Spikes | None = None
    ahead: int = 0

    @property
    def recorder(self) -> Recorder:
        """Records what this rank does at which time."""
        return self.mesh.counters.recorder


@dataclass(frozen=True)
class StepResult:
    """What a step measured; equal on all ranks.

    told    the summed loss and the squared norm, which may still be on their way
    tokens  number of labelled tokens in the global batch
    stop    whether some rank was asked to stop
    sparse  names of the blocks with experts
    spikes  numbers of `Spikes` behind loss and norm
    """

    told: Told
    tokens: int
    stop: bool
    sparse: tuple[str, ...] = ()
    spikes: int = 0

    @property
    def loss(self) -> float:
        """The mean over the labelled tokens of the global batch. On a GPU, asking waits until the
        step has been computed.
        """
        return self.told.values()[0] / max(self.tokens, 1)

    @property
    def norm(self) -> float:
        """The norm of the full gradient, before clipping; asking waits as for the loss."""
        return sqrt(self.told.values()[1])

    @property
    def spike(self) -> list[float]:
        """What `Spikes.tell` asks for; empty where nothing is watched."""
        return self.told.values()[2 : 2 + self.spikes]

    @property
    def expert_tokens(self) -> dict[str, list[int]]:
        """By name of a block with experts: the tokens of each, and last how many were dropped."""
        every = [int(count) for count in self.told.values()[2 + self.spikes :]]
        each = len(every) // max(len(self.sparse), 1)
        return {name: every[i * each :][:each] for i, name in enumerate(self.sparse)}


def train_step(
    context: StepContext, micros: Sequence[Micro], *, step: int, rate: float, stop: bool = False
) -> StepResult:
    """Updates the model once, from this rank's micro-batches of the global batch. All ranks call
    together. When the norm of the gradient is not finite, nothing is updated.

    step  number of updates done before
    rate  learning rate of this update
    stop  whether this rank was asked to stop; `micros` that the ranks have exchanged know it
    """
    placed, streams = context.placed, streams_of(context.mesh.device)
    fed = _fed(context, micros)
    tokens, stops = fed.counts or exchange(context, micros, stop=stop)  # 1
    fed.wait(streams)
    with context.recorder.step(step + 1):
        if context.spikes:
            count_updates(placed, step + context.ahead)
        if placed.update and placed.update.delay:
            context.snapshots.settle()
            set_rate(placed.optimizer, rate)
            placed.update.begin()
        total = accumulate(context, fed, step=step, tokens=tokens)  # 2, 3
        loss, norm = _sums(context, total)  # 4
        square, told = watched(context, loss, norm, tokens=tokens)
        counts = expert_counts(placed)
        with context.recorder.span(_update(len(micros))):  # 5
            context.snapshots.settle()
            set_rate(placed.optimizer, rate)
            limit = context.method.grad_clip
            most = context.method.routing.bias_rate * square.isfinite().double()
            biases = partial(move_biases, counts=counts, rate=most)
            share = new_share(context.method.optimizer, step=step)
            if placed.update:
                placed.update.run(square=square, limit=limit, beside=biases, share=share)
            else:
                clipped_update(placed.optimizer, placed.gradients(), square=square, limit=limit)
                biases(placed.units.values())
                if share:
                    move_averages(placed.optimizer, placed.ranges, share=share, square=square)
                publish(placed.units.values())
            if placed.gatherer:
                placed.gatherer.updated()
        numbers = torch.cat([torch.stack([loss, norm]), told, *counts.values()])
        later = tell(numbers, context.mesh.world, streams=streams, keep=fed)  # 6
    return StepResult(later, int(tokens), stops, tuple(counts), len(told))


def watched(
    context: StepContext, loss: Tensor, square: Tensor, *, tokens: float
) -> tuple[Tensor, Tensor]:
    """The squared norm by which the step is updated, not finite where the update is left out; and
    what is told of spikes.
    """
    if context.spikes is None:
        return square, loss.new_empty(0)
    found = context.spikes.watch(loss / max(tokens, 1), square)
    return found.square, found.told


def exchange(context: StepContext, micros: Sequence[Micro], *, stop: bool) -> Counts:
    """What all ranks must know of a step. All ranks call together."""
    mine = [counted(context, micros), float(stop)]
    tokens, stops = context.mesh.world.sum_scalars(mine)
    return Counts(tokens, stops > 0)


def _update(micros: int) -> Instruction:
    return Instruction(Verb.UPDATE, Action(Kind.UPDATE, 0, micros - 1))


def _sums(context: StepContext, total: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss of all ranks, and the squared norm of the full gradient: float64 scalars on
    the device.

    total  the summed loss of this rank, which all tp ranks have alike
    """
    placed, mesh = context.placed, context.mesh
    loss = total.to(torch.float64)
    if mesh.index_of("tp") > 0:
        loss = torch.zeros_like(loss)
    if has_whole_norm(placed.plan.layout):
        square = _square(context, [(u, u.start, u.stop) for u in placed.units.values()])
        (loss,) = over_ranks(mesh.world, loss.view(1)).unbind()
    else:
        both = torch.stack([loss, _square(context, [*placed.counted()])])
        loss, square = over_ranks(mesh.world, both).unbind()
    return loss, square


def _square(context: StepContext, ranges: Sequence[tuple[FlatUnit, int, int]]) -> Tensor:
    """The sum of the squares of this rank's gradients in some ranges of units. Those on the disk
    come one unit after the other.
    """
    placed = context.placed
    if placed.plan.layout.gradients != "disk":
        return context.square(
            u.summed[start - u.start : stop - u.start] for u, start, stop in ranges
        ).to(context.mesh.device)
    assert placed.homes is not None
    total = torch.zeros((), dtype=torch.float64)
    for unit in placed.units.values():
        flat = placed.homes.fetch_gradient(unit)
        for one, start, stop in ranges:
            if one is unit:
                total = total + context.square([flat[start - unit.start : stop - unit.start]])
    return total.to(context.mesh.device)


def accumulate(
    context: StepContext, micros: Sequence[Micro], *, step: int, tokens: float
) -> Tensor:
    """Sets the gradients to those of the global batch. Returns the summed loss of this rank, a
    scalar on the device.

    tokens  number of labelled tokens in the global batch, by which the gradients are divided
    """
    placed = context.placed
    units = placed.units.values()
    kept = (unit.summed if unit.gradients is None else unit.gradients for unit in units)
    if flats := [flat for flat in kept if not flat.is_meta]:
        torch._foreach_zero_(flats)
    if placed.homes:
        placed.homes.clear_gradients(units)
    with placed.in_pass(f"a step of {len(micros)} micro-batches"):
        fed = _fed(context, micros)
        placed.executor.packed.update(map(has_packed_rows, fed.micros))
        given = [_given(context, one, step=step) for one in fed.tensors]
        return placed.executor.train(given, placed.loss, tokens=tokens)


def _fed(context: StepContext, micros: Sequence[Micro]) -> Fed:
    """Micro-batches with their tensors on this rank's device; copied now if they are not there."""
    if isinstance(micros, Fed):
        return micros
    return Fed(micros, [_there(context, micro) for micro in micros])


def _given(context: StepContext, one: OnDevice, *, step: int) -> Given:
    return with_noise(one, seed=context.seed, step=step, region=context.placed.region)


def to_device(context: StepContext, micro: Micro, *, step: int) -> Given:
    """A micro-batch as tensors on this rank's device, with the noise of `step`."""
    return _given(context, _there(context, micro), step=step)


def _there(context: StepContext, micro: Micro) -> OnDevice:
    return on_device(micro, context.mesh.device, columns_of(context.mesh))


@torch.no_grad()
def held_out_loss(
    context: StepContext, micros: Iterable[Micro], loss: Loss | None = None
) -> tuple[float, int]:
    """Mean loss per token over held-out micro-batches without dropout, and the number of tokens.
    Both are over all ranks, which call together. `loss` takes the place of the plain loss.
    """
    context.placed.sync_weights()
    with context.mesh.counters.aside():
        return _held_out_loss(context, micros, loss or context.placed.plain_loss)


def _held_out_loss(context: StepContext, micros: Iterable[Micro], loss: Loss) -> tuple[float, int]:
    tokens, placed, mesh = 0, context.placed, context.mesh
    losses = torch.zeros((), dtype=torch.float64, device=mesh.device)
    for some in chunks(micros, placed.plan.micros):
        given = [arrays_of(micro, mesh.device, columns_of(mesh)) for micro in some]
        with placed.in_pass(f"a held-out loss of {len(some)} micro-batches"):
            losses += placed.executor.evaluate(given, loss)
        tokens += count_tokens(some) if mesh.counts_batch else 0
    total = float(losses) if mesh.index_of("tp") == 0 else 0.0  # all tp ranks have the same
    total, count = mesh.world.sum_scalars([total, tokens])
    return total / max(count, 1), int(count)


def chunks(micros: Iterable[Micro], size: int) -> Iterator[list[Micro]]:
    """Yields lists of `size` micro-batches; the last may be shorter."""
    rest = iter(micros)
    while some := list(islice(rest, size)):
        yield some
