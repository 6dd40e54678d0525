"""Applies a layout to a plain model. Only this file knows the order in which that is done:

1. build the model on the meta device: a weight that this rank does not hold never takes memory
2. allocate what this rank holds of the weights, in flat units
3. fill them: at random, or from a checkpoint or a folder
4. pass the masters to the optimizer, range by range
5. make the model a replica: gradients are summed over the tp ranks and over dp, whole or share by
   share, in a pipeline stage by stage
6. notify those sums when a gradient is ready. Hooks of torch parameters do so where possible;
   otherwise own operations replace those of torch, cut for tp, with a store that has the weights
7. make blocks keep for the backward pass what the layout selects (recomputation)
8. where each replica updates only its share, gather the weights
9. where there are stages, make them a pipeline

Where the layout has only dp, parameters stay those of torch, which `torch.compile` supports.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from howdah.model.loss import Terms, cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.optim.optimizers import Range, build_optimizer, make_states
from howdah.parallel.data import Reducer, Replicas, listen_to_parameters, whole_gradients
from howdah.parallel.executor import Pipeline, Stages
from howdah.parallel.flat_params import Fill, FlatUnit, Whole, fill_masters, flatten
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, head_loss, own_operations
from howdah.parallel.part_sums import PartSums, sum_parts
from howdah.parallel.recompute import recompute
from howdah.parallel.stage_sums import StageSums
from howdah.parallel.stages import own_parts
from howdah.parallel.tensor import region_of, split, vocab_shards
from howdah.parallel.tensor_border import TpRegion
from howdah.parallel.weight_store import UnitWeightStore
from howdah.parallel.zero import ShareReducer, UpdatedWeights, Window, gather_weights
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.buckets import used_by_several
from howdah.plan.layout import needs_own
from howdah.plan.method import Precision
from howdah.plan.plan import Plan
from howdah.plan.sharding import counted_ranges, local_buffers, own_range

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class ParallelModel:
    """A model laid out for this rank, ready to train.

    plan      what runs where
    mesh      the groups of this rank
    units     the flat tensors, unit by unit
    ranges    the ranges that this rank's optimizer updates
    reducer   sums gradients over the tp ranks and the replicas; None without these sums, or with pp
    gatherer  brings updated weights to all replicas, once in a step or unit by unit when they are
              used; None where each replica updates everything
    window    memory for whole gradients where only shares are kept
    store     has the weights of own operations; None where they are parameters of the model
    region    communicates at the boundary of tensor-parallel regions; None without tp
    pipeline  runs the stages, and sums their gradients in place of the reducer; None without pp
    """

    plan: Plan
    mesh: Mesh
    model: Transformer
    units: dict[str, FlatUnit]
    ranges: tuple[Range, ...]
    optimizer: torch.optim.Optimizer
    reducer: Reducer | ShareReducer | PartSums | None
    gatherer: UpdatedWeights | ShardedWeights | None
    window: Window | None
    store: UnitWeightStore | None
    region: TpRegion | None
    pipeline: Pipeline | None

    @property
    def exposed(self) -> float:
        """Seconds that computation has waited for other ranks, over the whole run: for gradients
        and weights, at the boundaries of tp regions, and in a pipeline for messages.
        """
        line = self.pipeline
        parts = (self.reducer, self.gatherer, self.region, line, line.sums if line else None)
        return sum((part.exposed for part in parts if part), 0.0)

    @property
    def multiplied(self) -> list[Tensor]:
        """The tensors that hold the weights with which the model multiplies."""
        window = [self.gatherer.window] if isinstance(self.gatherer, ShardedWeights) else []
        return [*window, *(unit.weights for unit in self.units.values())]

    def whole(self, unit: FlatUnit) -> Tensor:
        """All weights of a unit in one flat tensor. Sharded weights are gathered from the other
        ranks. All ranks call together.
        """
        if not unit.shared_out:
            return unit.weights
        flat = unit.weights.new_empty(unit.buffer.length)
        self.mesh.shard.all_gather(flat, unit.weights)
        return flat

    @contextmanager
    def in_pass(self, kind: str) -> Iterator[None]:
        """Forward and backward passes run inside this block. All passes of one `kind` must use the
        weights in the same order.
        """
        if not isinstance(self.gatherer, ShardedWeights):
            yield
            return
        self.gatherer.begin(kind)
        yield
        self.gatherer.end()

    def sync_weights(self) -> None:
        """Waits until the weights on this rank are those of the last update."""
        if self.gatherer:
            self.gatherer.wait()

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of hidden states [b, s, h] and labels [b, s], with all terms of the
        method.
        """
        method = self.plan.method
        return self._loss(hidden, labels, Terms(method.label_smoothing, method.z_loss))

    def plain_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The summed cross-entropy alone, which measures held-out text."""
        return self._loss(hidden, labels, Terms())

    def _loss(self, hidden: Tensor, labels: Tensor, terms: Terms) -> Tensor:
        if self.store:
            weight = cast(Handle, self.model.head_weight)
            parts = vocab_shards(self.plan, self.region) if self.region else None
            return head_loss(hidden, weight, labels, parts=parts, terms=terms)
        return cross_entropy_sum(hidden, self.model.head_weight, labels, terms=terms)

    def counted(self) -> Iterator[tuple[FlatUnit, int, int]]:
        """Yields (unit, start, stop) for the ranges that this rank counts. Over all ranks, they
        contain each element of the model once.
        """
        for unit in self.units.values():
            for start, stop in counted_ranges(unit.buffer, self.plan, self.mesh.rank):
                yield unit, start, stop

    def gradients(self) -> list[Tensor]:
        """The gradients of the ranges that this rank updates, one flat tensor for each unit."""
        return [unit.summed for unit in self.units.values()]


def apply(plan: Plan, *, mesh: Mesh, fill: Fill) -> ParallelModel:
    """The model of a plan, laid out for this rank and filled. `fill` writes each piece of
    weight.
    """
    layout, rank, method = plan.layout, mesh.rank, plan.method
    # 1
    with torch.device("meta"):
        model = Transformer(plan.shape, dropout=method.dropout, parts=own_parts(plan, rank))
    # 2
    replicas = Replicas(mesh.shard, mesh.across)
    shares = layout.accumulate == "shard" and not replicas.alone
    cut = layout.zero == 3 and mesh.shard.size > 1  # weights are sharded, too
    units = flatten(
        model,
        local_buffers(plan, rank),
        dtype=DTYPES[method.precision],
        device=mesh.device,
        own=lambda buffer: own_range(buffer, layout, rank),
        whole=Whole(gradients=not shares, weights=not cut),
    )
    fill_masters(units, fill)  # 3
    # 4
    ranges = tuple(part for unit in units.values() for part in _ranges(unit))
    optimizer = build_optimizer(method.optimizer, ranges)
    make_states(method.optimizer, optimizer, ranges, step=0)
    # 5
    like = next(iter(units.values())).summed
    window = Window(plan, rank, like) if shares else None
    sums = StageSums(plan, mesh, units, window) if layout.pp > 1 else None
    reducer = None if sums else _reducer(plan, mesh, units, window)
    # 6
    region = region_of(plan, mesh) if layout.tp > 1 else None
    store, gathering = None, _gathering(plan, mesh, units) if cut else None
    if needs_own(layout):
        store = _store(plan, rank, units, sums or reducer, gathering)
        if region:
            split(model, plan, region, store)
        own_operations(model, store)
    elif reducer:
        listen_to_parameters(model, reducer)
    recompute(model, plan)  # 7
    # 8
    gathers = layout.zero > 0 and mesh.shard.size > 1 and not gathering
    gatherer = gather_weights(model, units, mesh.shard) if gathers else gathering
    # 9
    pipeline = None
    if sums and store:
        stages = Stages(model, DTYPES[method.precision], store, gatherer)
        pipeline = Pipeline(plan, mesh, stages, sums)
    return ParallelModel(
        *(plan, mesh, model, units, ranges, optimizer),
        *(reducer, gatherer, window, store, region, pipeline),
    )


def _store(
    plan: Plan,
    rank: int,
    units: dict[str, FlatUnit],
    sums: StageSums | Reducer | ShareReducer | PartSums | None,
    gathering: ShardedWeights | None,
) -> UnitWeightStore:
    """The store that gives own operations their weights, and notifies `sums`, if any, of
    gradients.
    """
    target = sums.target if sums else whole_gradients(units).__getitem__
    ready = sums.ready if sums else lambda _: None
    value = gathering.value if gathering else None
    return UnitWeightStore(units, target, ready, value, shared=used_by_several(plan, rank))


def _gathering(plan: Plan, mesh: Mesh, units: dict[str, FlatUnit]) -> ShardedWeights:
    return ShardedWeights(units, mesh.shard, keep=plan.layout.release == "step")


def _reducer(
    plan: Plan, mesh: Mesh, units: dict[str, FlatUnit], window: Window | None
) -> Reducer | ShareReducer | PartSums | None:
    """The sum of gradients over the tp ranks, then over the replicas; None if there are neither."""
    replicas = Replicas(mesh.shard, mesh.across)
    over: Reducer | ShareReducer | None = None
    if window:
        over = ShareReducer(units, replicas, window)
    elif not replicas.alone:
        over = Reducer(units, replicas, scatter=plan.layout.zero > 0)
    return sum_parts(plan, mesh, units, over) if plan.layout.tp > 1 else over


def _ranges(unit: FlatUnit) -> list[Range]:
    """The own range of a unit in two parts: with and without weight decay."""
    turn = min(max(unit.buffer.decay_stop, unit.start), unit.stop)
    cuts = [(unit.start, turn, True), (turn, unit.stop, False)]
    return [
        Range(
            unit.buffer.unit,
            a,
            b,
            decay,
            unit.masters[a - unit.start : b - unit.start],
            unit.summed[a - unit.start : b - unit.start],
        )
        for a, b, decay in cuts
    ]
