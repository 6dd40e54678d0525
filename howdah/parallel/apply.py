"""Applies a layout to a plain model. Only this file knows the order in which that is done:

1. build the model on the meta device: a weight that this rank does not hold never takes memory
2. allocate what this rank holds of the weights, in flat units
3. fill them: at random, or from a checkpoint or a folder
4. pass the masters to the optimizer, range by range
5. connect the sums of gradients over ranks
6. where each replica updates only its share, gather the weights
7. tell the sums when a gradient is ready. Hooks of torch parameters do so where possible; otherwise
   own operations replace those of torch, cut for tp, with a store that has the weights. Under fp8
   the linears of blocks multiply in 8 bits
8. where cp ranks share the tokens of a sample, give blocks an attention that crosses them
9. make blocks keep for the backward pass what the layout selects (recomputation)
10. give all of it to the executor, which runs the stages of this rank

Where the layout has only dp, parameters stay those of torch: blocks can be compiled whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from howdah.comm.group import Group
from howdah.model.loss import Terms, cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.optim.optimizers import Range, build_optimizer, make_states
from howdah.parallel.context import Ring, Trade, share_sequences
from howdah.parallel.executor import Executor
from howdah.parallel.expert import share_experts
from howdah.parallel.flat_params import DTYPES, Fill, FlatUnit, Whole, fill_masters, flatten
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, head_loss, in_eight_bits, own_operations
from howdah.parallel.recompute import recompute
from howdah.parallel.stages import own_parts
from howdah.parallel.sums import GradientSums, gradient_sums, listen_to_parameters
from howdah.parallel.tensor import region_of, split, vocab_shards
from howdah.parallel.tensor_border import TpRegion
from howdah.parallel.weight_store import UnitWeightStore
from howdah.parallel.zero import UpdatedWeights
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.layout import needs_own
from howdah.plan.plan import Plan
from howdah.plan.sharding import counted_ranges, local_buffers, own_range, shard_axes
from howdah.plan.sums import keeps_shares, used_by_several


@dataclass(frozen=True)
class ParallelModel:
    """A model laid out for this rank, ready to train.

    plan      what runs where
    mesh      the groups of this rank
    units     the flat tensors, unit by unit
    ranges    the ranges that this rank's optimizer updates
    sums      sums the gradients over ranks
    gatherer  brings updated weights to all replicas, once in a step or unit by unit when they are
              used; None where each replica updates everything
    store     has the weights of own operations; None where they are parameters of the model
    region    communicates at the boundary of tensor-parallel regions; None without tp
    core      attention over the tokens of all cp ranks; None without cp
    executor  runs the forward and backward passes
    sharers   by unit whose states are shared out, the ranks that have the other shares
    kinds     of passes that have run
    """

    plan: Plan
    mesh: Mesh
    model: Transformer
    units: dict[str, FlatUnit]
    ranges: tuple[Range, ...]
    optimizer: torch.optim.Optimizer
    sums: GradientSums
    gatherer: UpdatedWeights | ShardedWeights | None
    store: UnitWeightStore | None
    region: TpRegion | None
    core: Ring | Trade | None
    executor: Executor
    sharers: Mapping[str, Group]
    kinds: set[str] = field(default_factory=set)

    @property
    def multiplied(self) -> list[Tensor]:
        """The tensors that hold the weights with which the model multiplies."""
        window = [self.gatherer.window] if isinstance(self.gatherer, ShardedWeights) else []
        return [*window, *(unit.weights for unit in self.units.values())]

    def gathered(self, unit: FlatUnit) -> Tensor:
        """All weights of a unit in one flat tensor. Sharded weights are gathered from the other
        ranks. All ranks call together.
        """
        if not unit.shared_out:
            return unit.weights
        flat = unit.weights.new_empty(unit.buffer.length)
        self.sharers[unit.buffer.unit].all_gather(flat, unit.weights)
        return flat

    @contextmanager
    def in_pass(self, kind: str) -> Iterator[None]:
        """Forward and backward passes run inside this block. All passes of one `kind` must use the
        weights in the same order. After the first of a kind, all ranks compare their calls.
        """
        if isinstance(self.gatherer, ShardedWeights):
            self.gatherer.begin(kind)
        elif self.gatherer:  # a later stage of a pipeline gathers while it waits for its input
            self.gatherer.start()
        yield
        if isinstance(self.gatherer, ShardedWeights):
            self.gatherer.end()
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.mesh.compare_calls()

    def sync_weights(self) -> None:
        """Waits until the weights on this rank are those of the last update."""
        if self.gatherer:
            self.gatherer.wait()

    def loss(self, hidden: Tensor, labels: Tensor, tokens: float = 1.0) -> Tensor:
        """The summed loss of hidden states [b, s, h] and labels [b, s], with all terms of the
        method. `tokens` is what it will be divided by.
        """
        method = self.plan.method
        return self._loss(hidden, labels, Terms(method.label_smoothing, method.z_loss, tokens))

    def plain_loss(self, hidden: Tensor, labels: Tensor, tokens: float = 1.0) -> Tensor:
        """The summed cross-entropy alone, which measures held-out text."""
        return self._loss(hidden, labels, Terms())

    def _loss(self, hidden: Tensor, labels: Tensor, terms: Terms) -> Tensor:
        islands = self.model.islands
        if self.store:
            weight = cast(Handle, self.model.head_weight)
            shards = vocab_shards(self.plan, self.region) if self.region else None
            return head_loss(hidden, weight, labels, shards=shards, terms=terms, islands=islands)
        return cross_entropy_sum(
            hidden, self.model.head_weight, labels, terms=terms, islands=islands
        )

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
    cut = layout.zero == 3 and mesh.shard.size > 1  # weights are sharded, too
    units = flatten(
        model,
        local_buffers(plan, rank),
        dtype=DTYPES[method.precision],
        device=mesh.device,
        own=lambda buffer: own_range(buffer, layout, rank),
        whole=lambda buffer: Whole(gradients=not keeps_shares(plan, buffer.unit), weights=not cut),
    )
    fill_masters(units, fill)  # 3
    # 4
    ranges = tuple(part for unit in units.values() for part in _ranges(unit))
    optimizer = build_optimizer(method.optimizer, ranges)
    make_states(method.optimizer, optimizer, ranges, step=0)
    sums = gradient_sums(plan, mesh, units)  # 5
    # 6
    gatherer: UpdatedWeights | ShardedWeights | None = None
    sharers = sharers_of(units, plan, mesh)
    if cut:
        keep, cast = layout.release == "step", layout.gather == "broadcast"
        gatherer = ShardedWeights(
            units, mesh.shard, mesh.waited, keep=keep, cast=cast, sharers=sharers
        )
    elif layout.zero > 0 and mesh.shard.size > 1:
        gatherer = UpdatedWeights(units, sharers, mesh.waited)
    # 7
    region = region_of(plan, mesh) if layout.tp > 1 else None
    store: UnitWeightStore | None = None
    if needs_own(layout):
        value = gatherer.value if isinstance(gatherer, ShardedWeights) else None
        shared = [name for unit in used_by_several(plan, rank) for name in units[unit].buffer.names]
        store = UnitWeightStore(units, sums.target, sums.order.ready, value, frozenset(shared))
        if region:
            split(model, plan, region, store)
        own_operations(model, store)
    elif sums.sums:
        listen_to_parameters(model, sums)
    if method.precision == "fp8":
        in_eight_bits(model)
    core = share_sequences(model, plan, mesh) if layout.cp > 1 else None  # 8
    if layout.ep > 1:
        share_experts(model, plan, mesh)
    recompute(model, plan)  # 9
    # 10
    executor = Executor(plan, mesh, model=model, store=store, gatherer=gatherer, sums=sums)
    return ParallelModel(
        plan=plan,
        mesh=mesh,
        model=model,
        units=units,
        ranges=ranges,
        optimizer=optimizer,
        sums=sums,
        gatherer=gatherer,
        store=store,
        region=region,
        core=core,
        executor=executor,
        sharers=sharers,
    )


def sharers_of(units: Mapping[str, FlatUnit], plan: Plan, mesh: Mesh) -> dict[str, Group]:
    """By unit of which ranks have shares, the group of these ranks. All ranks call together."""
    if plan.layout.zero == 0:
        return {}
    along = {unit: shard_axes(plan.layout, unit)[0] for unit in units}
    groups = {
        one: mesh.group_of(one.group(mesh.rank), label="dp")
        for one in dict.fromkeys(along.values())
        if one.size > 1
    }
    return {unit: groups[one] for unit, one in along.items() if one in groups}


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
