"""Applies a layout to a plain model. Only this file knows the order in which that is done:

1. build the model on the meta device: a weight that this rank does not hold never takes memory
2. allocate what this rank holds of the weights, in flat units
3. fill them: at random, or from a checkpoint or a folder
4. pass the masters to the optimizer, range by range
5. connect the sums of gradients over ranks
6. where each replica updates only its share, gather the weights; or pull them from servers
7. tell the sums when a gradient is ready. Hooks of torch parameters do so where possible; otherwise
   own operations replace those of torch, cut for tp, with a store that has the weights. Under fp8
   the linears of blocks multiply in 8 bits
8. where cp ranks share the tokens of a sample, give blocks an attention that crosses them
9. make blocks keep for the backward pass what the layout selects (recomputation)
10. where activations have another home, move what blocks keep
11. give all of it to the executor, which runs the stages of this rank

Where the layout has only dp, parameters stay those of torch: blocks can be compiled whole.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from howdah.base.named_code import load
from howdah.comm.group import Group
from howdah.model.adapter import adapt
from howdah.model.loss import Terms, cross_entropy_sum
from howdah.model.own_loss import OwnLoss
from howdah.model.transformer import Transformer
from howdah.optim.optimizers import Range, build_optimizer, make_states
from howdah.parallel.context import Ring, Trade, share_sequences
from howdah.parallel.executor import Executor
from howdah.parallel.expert import share_experts
from howdah.parallel.flat_params import DTYPES, Fill, FlatUnit, Whole, copied, fill_masters, flatten
from howdah.parallel.home_update import HomeUpdate
from howdah.parallel.homes import Homes, homes_of
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, head_loss, in_eight_bits, own_operations
from howdah.parallel.recompute import recompute
from howdah.parallel.saved_homes import keep_elsewhere
from howdah.parallel.served import Connect, Links, PulledOnce, PulledWeights, ServerLinks, with_sums
from howdah.parallel.stages import own_parts
from howdah.parallel.sums import GradientSums, gradient_sums, listen_to_parameters
from howdah.parallel.tensor import region_of, split, vocab_shards
from howdah.parallel.tensor_border import TpRegion
from howdah.parallel.unit_messages import messages_of
from howdah.parallel.weight_store import UnitWeightStore
from howdah.parallel.zero import UpdatedWeights, sharers_of
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.flat_buffers import BY_NUMBER, Order, Orders
from howdah.plan.homes import states_away
from howdah.plan.layout import needs_own
from howdah.plan.plan import Plan
from howdah.plan.sharding import counted_ranges, local_buffers, own_range
from howdah.plan.sums import keeps_shares, used_by_several

Gatherer = UpdatedWeights | ShardedWeights | PulledWeights


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
    homes     of what is not on the device; None where everything is
    update    of states that are not on the device, on the host; None where they are
    sharers   by unit whose states are shared out, the ranks that have the other shares
    orders    by block, the experts at the places of the ranks of ep, where these are not by number
    own_loss  of the user, in place of cross-entropy; None: there is none
    kinds     of passes that have run
    """

    plan: Plan
    mesh: Mesh
    model: Transformer
    units: dict[str, FlatUnit]
    ranges: tuple[Range, ...]
    optimizer: torch.optim.Optimizer
    sums: GradientSums
    gatherer: Gatherer | None
    store: UnitWeightStore | None
    region: TpRegion | None
    core: Ring | Trade | None
    executor: Executor
    homes: Homes | None
    update: HomeUpdate | None
    sharers: Mapping[str, Group]
    orders: dict[str, Order] = field(default_factory=dict)
    own_loss: OwnLoss | None = None
    kinds: set[str] = field(default_factory=set)

    @property
    def multiplied(self) -> list[Tensor]:
        """The tensors that hold the weights with which the model multiplies."""
        return _multiplied(self.units, self.gatherer)

    def gathered(self, unit: FlatUnit) -> Tensor:
        """All weights of a unit in one flat tensor. Sharded weights are gathered from the other
        ranks. All ranks call together.
        """
        if self.plan.layout.server:  # a worker has them; the servers have ranges, or nothing
            flat = unit.weights.new_zeros(unit.buffer.length)
            for a, b in counted_ranges(unit.buffer, self.plan, self.mesh.rank):
                flat[a:b] = unit.own_weights[a - unit.start : b - unit.start]
            self.mesh.world.all_reduce(flat)
            return flat if self.mesh.serves else unit.weights
        mine = self.own(unit, "weights") if unit.away else unit.weights
        if not unit.shared_out:
            return mine
        flat = torch.empty(unit.buffer.length, dtype=mine.dtype, device=self.mesh.device)
        self.sharers[unit.buffer.unit].all_gather(flat, mine.to(self.mesh.device))
        return flat

    def own(self, unit: FlatUnit, kind: str, first: int = 0, last: int | None = None) -> Tensor:
        """The elements [first, last) of a unit's own range of one kind: weights, masters, summed,
        or a state of the optimizer. They are read where their home is the disk.
        """
        if kind == "masters" and not unit.trains:
            kind = "weights"
        if self.homes is not None and self.update is not None:
            return self.homes.own(unit, kind, first, last)
        if kind not in self.plan.method.optimizer.states:
            kinds = {"weights": unit.own_weights, "masters": unit.masters, "summed": unit.summed}
            return kinds[kind][first:last]
        parts = [part for part in self.ranges if part.unit == unit.buffer.unit]
        states = [self.optimizer.state[part.master][kind] for part in parts if part.master.numel()]
        whole = torch.cat(states) if len(states) > 1 else [*states, unit.masters][0]
        return whole[first:last]

    @contextmanager
    def in_pass(self, kind: str) -> Iterator[None]:
        """Forward and backward passes run inside this block. All passes of one `kind` must use the
        weights in the same order. After the first of a kind, all ranks compare their calls.
        """
        if isinstance(self.gatherer, ShardedWeights):
            self.gatherer.begin(kind)
        elif self.gatherer:  # a later stage of a pipeline gathers while it waits for its input
            if self.homes:
                self.homes.settle()
            self.gatherer.start()
        yield
        if isinstance(self.gatherer, ShardedWeights):
            self.gatherer.end()
        if kind not in self.kinds:
            self.kinds.add(kind)
            self.mesh.compare_calls()

    def sync_weights(self) -> None:
        """Waits until the weights on this rank are those of the last update."""
        if self.homes:
            self.homes.settle()
        if self.gatherer:
            self.gatherer.wait()

    def loss(self, hidden: Tensor, labels: Tensor, tokens: float = 1.0) -> Tensor:
        """The summed loss of hidden states [b, s, h] and labels [b, s], with all terms of the
        method. `tokens` is what it will be divided by.
        """
        method = self.plan.method
        terms = Terms(method.label_smoothing, method.z_loss, tokens, self.own_loss)
        return self._loss(hidden, labels, terms)

    def plain_loss(self, hidden: Tensor, labels: Tensor, tokens: float = 1.0) -> Tensor:
        """The summed cross-entropy alone, which measures held-out text."""
        return self._loss(hidden, labels, Terms())

    def _loss(self, hidden: Tensor, labels: Tensor, terms: Terms) -> Tensor:
        islands = self.model.islands
        if self.store:
            weight, added = cast(Handle, self.model.head_weight), self.model.head_bias
            shards = vocab_shards(self.plan, self.region) if self.region else None
            bias = cast(Handle | None, added)
            return head_loss(
                hidden, weight, labels, bias=bias, shards=shards, terms=terms, islands=islands
            )
        head = self.model.head_weight, labels
        bias_of = self.model.head_bias
        return cross_entropy_sum(hidden, *head, bias=bias_of, terms=terms, islands=islands)

    def label_logits(self, hidden: Tensor) -> Tensor:
        """The logits [b, s, labels] of hidden states, of all positions where a rank of tp has a
        slice of them.
        """
        weight, bias = self.model.head_weight, self.model.head_bias
        if self.region:
            hidden = self.region.gather_in(hidden, now=True)()
        if self.store:
            weight = cast(Handle, weight).value()
            bias = bias if bias is None else cast(Handle, bias).value()
        return linear(hidden, weight, bias)

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


def apply(
    plan: Plan,
    *,
    mesh: Mesh,
    fill: Fill,
    connect: Connect | None = None,
    orders: Orders = BY_NUMBER,
) -> ParallelModel:
    """The model of a plan, laid out for this rank and filled. `fill` writes each piece of
    weight.

    orders   of the experts of blocks on the ranks of ep
    connect  makes the links to parameter servers outside of the mesh; None: there are none
    """
    layout = plan.layout
    model = _unfilled(plan, mesh.rank)  # 1
    homes = homes_of(plan, mesh)
    units = _allocated(model, plan, mesh, orders)  # 2
    put = homes.adopt(units.values()) if homes else copied
    fill_masters(units, fill, put, on=mesh.device)  # 3
    ranges = tuple(part for unit in units.values() for part in _ranges(unit))  # 4
    optimizer, update = _optimizer(plan, ranges, homes, [*units.values()])
    # 5
    links = _links(plan, mesh, units, connect)
    sums = gradient_sums(plan, mesh, units, links, homes=homes)
    # 6
    sharers = sharers_of(units, plan, mesh)
    gatherer = _gatherer(plan, mesh, units, sharers, links=links, homes=homes)
    # 7
    region = region_of(plan, mesh) if layout.tp > 1 else None
    store = _store(plan, mesh, units, sums, gatherer)
    if store:
        if region:
            split(model, plan, region, store)
        own_operations(model, store, plan.marks)
    elif sums.sums and not mesh.serves:
        listen_to_parameters(model, sums)
    if plan.method.precision == "fp8":
        in_eight_bits(model)
    # 8
    core = share_sequences(model, plan, mesh) if layout.cp > 1 else None
    if layout.ep > 1:
        share_experts(model, plan, mesh, orders)
    recompute(model, plan)  # 9
    shelf = keep_elsewhere(model, homes, _multiplied(units, gatherer)) if homes else None  # 10
    executor = Executor(  # 11
        plan, mesh, model=model, store=store, gatherer=gatherer, sums=sums, homes=homes, shelf=shelf
    )
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
        homes=homes,
        update=update,
        sharers=sharers,
        orders=dict(orders),
        own_loss=load("method.loss", plan.method.loss) if plan.method.loss else None,
    )


def _unfilled(plan: Plan, rank: int) -> Transformer:
    """The parts of the model that are this rank's, without memory."""
    method = plan.method
    drops = {"dropout": method.dropout, "attention_dropout": method.attention_dropout}
    with torch.device("meta"):
        model = Transformer(plan.shape, parts=own_parts(plan, rank), **drops)
        adapt(model, plan.marks, method.adapter)
    return model


def _shares_weights(plan: Plan, mesh: Mesh) -> bool:
    """Whether this rank keeps only its own range of the weights, too."""
    return (plan.layout.zero == 3 and mesh.shard.size > 1) or mesh.serves


def _allocated(model: Transformer, plan: Plan, mesh: Mesh, by: Orders) -> dict[str, FlatUnit]:
    """The flat units of this rank, into which the parameters of the model are views."""
    whole = not _shares_weights(plan, mesh)
    units = flatten(
        model,
        local_buffers(plan, mesh.rank, by),
        dtype=DTYPES[plan.method.precision],
        device=mesh.device,
        own=lambda buffer: own_range(buffer, plan.layout, mesh.rank),
        whole=lambda buffer: Whole(
            gradients=not (keeps_shares(plan, buffer.unit) or mesh.serves), weights=whole
        ),
        homes=plan.layout,
    )
    return with_sums(units, mesh)


def _links(
    plan: Plan, mesh: Mesh, units: dict[str, FlatUnit], connect: Connect | None
) -> Links | None:
    """The links to parameter servers; None where there are none."""
    if connect:
        return PulledOnce(connect(units), plan, mesh, units)
    return ServerLinks(plan, mesh, units) if plan.layout.server else None


def _gatherer(
    plan: Plan,
    mesh: Mesh,
    units: dict[str, FlatUnit],
    sharers: Mapping[str, Group],
    *,
    links: Links | None,
    homes: Homes | None,
) -> Gatherer | None:
    """What brings updated weights to this rank; None where it updates all of its own."""
    layout = plan.layout
    if links:
        return PulledWeights(units, links, mesh.waited) if layout.servers_update else None
    if _shares_weights(plan, mesh) or layout.weights != "device":
        keep, cast = layout.release == "step", layout.gather == "broadcast"
        given = units, mesh.shard, mesh.waited, messages_of(plan, mesh, units)
        return ShardedWeights(
            *given, keep=keep, cast=cast, width=plan.storage.window, sharers=sharers, homes=homes
        )
    if layout.zero > 0 and mesh.shard.size > 1:
        return UpdatedWeights(units, sharers, mesh.waited)
    return None


def _store(
    plan: Plan,
    mesh: Mesh,
    units: dict[str, FlatUnit],
    sums: GradientSums,
    gatherer: Gatherer | None,
) -> UnitWeightStore | None:
    """The store of own operations; None where operations are those of torch, or there are none."""
    if mesh.serves or not needs_own(plan.layout):
        return None
    come = gatherer if isinstance(gatherer, ShardedWeights) else None
    several = used_by_several(plan, mesh.rank)
    shared = frozenset(name for unit in several for name in units[unit].buffer.names)
    return UnitWeightStore(
        units, sums.target, sums.order.ready, come, shared, take_rows=sums.take_rows
    )


def _optimizer(
    plan: Plan, ranges: Sequence[Range], homes: Homes | None, units: Sequence[FlatUnit]
) -> tuple[torch.optim.Optimizer, HomeUpdate | None]:
    """The optimizer of the ranges, and what runs it on the host if states are not on the device."""
    if homes and states_away(plan.layout):
        update = HomeUpdate(plan, homes, units)
        return update.turns.optimizer, update
    optimizer = build_optimizer(plan.method.optimizer, ranges)
    make_states(plan.method.optimizer, optimizer, ranges, step=0)
    return optimizer, None


def _multiplied(units: Mapping[str, FlatUnit], gatherer: Gatherer | None) -> list[Tensor]:
    """The tensors that hold the weights with which a model multiplies."""
    window = gatherer.memory if isinstance(gatherer, ShardedWeights) else []
    return [*window, *(unit.weights for unit in units.values())]


def _ranges(unit: FlatUnit) -> list[Range]:
    """The own range of a unit in parts that are updated alike: with and without weight decay, and
    by learning rate. Frozen weights have none.
    """
    found = []
    for first, last, decay, rate in unit.buffer.runs if unit.trains else ():
        a, b = (min(max(edge, unit.start), unit.stop) for edge in (first, last))
        mine = slice(a - unit.start, b - unit.start)
        tensors = unit.masters[mine], unit.summed[mine]
        found.append(Range(unit.buffer.unit, a, b, decay, *tensors, rate=rate))
    return found
