"""The one place that knows the order in which a layout is applied to a plain model.

1. build the model on the meta device: no weight exists yet, so none is ever whole in vain
2. lay what this rank holds of its weights in flat units
3. fill them: fresh, or from a checkpoint or a folder
4. hand the masters to the optimizer, range by range
5. where parameters of torch will not do, put own operations in their place
6. make it a replica: gradients are summed over dp, whole or share by share, and where each
   replica updates its share alone, weights are gathered
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from howdah.model.loss import cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.optim.optimizers import Range, build_optimizer, make_states
from howdah.parallel.data import Reducer, Replicas, listen_to_parameters, whole_gradients
from howdah.parallel.flatten import Fill, FlatUnit, fill_masters, flatten
from howdah.parallel.keeper import Resident
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, head_loss, own_operations
from howdah.parallel.zero import Gatherer, ShareReducer, gather_weights
from howdah.plan.layout import Layout
from howdah.plan.method import Precision
from howdah.plan.plan import Plan
from howdah.plan.sharding import counted_ranges, local_buffers, own_range

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Placed:
    """A model on its place in the layout, ready to train.

    plan      what runs where
    mesh      where it is
    units     the flat tensors, unit by unit
    ranges    what this rank's optimizer updates
    reducer   sums gradients over the replicas; None where there is one
    gatherer  brings updated weights to all replicas; None where each updates everything
    keeper    knows the weights of own operations; None where they are parameters of the model
    """

    plan: Plan
    mesh: Mesh
    model: Transformer
    units: dict[str, FlatUnit]
    ranges: tuple[Range, ...]
    optimizer: torch.optim.Optimizer
    reducer: Reducer | ShareReducer | None
    gatherer: Gatherer | None
    keeper: Resident | None

    @property
    def exposed(self) -> float:
        """Seconds that computation has waited for gradients and weights, over the whole run."""
        waiting = (part.exposed for part in (self.reducer, self.gatherer) if part)
        return sum(waiting, 0.0)

    def settle(self) -> None:
        """The weights are those of the last update, on every rank, when this returns."""
        if self.gatherer:
            self.gatherer.wait()

    def loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The summed loss of hidden states [b, s, h]; labels [b, s]."""
        if self.keeper:
            return head_loss(hidden, cast(Handle, self.model.head_weight), labels)
        return cross_entropy_sum(hidden, self.model.head_weight, labels)

    def counted(self) -> Iterator[tuple[FlatUnit, int, int]]:
        """What this rank counts: ranges of units, in which each element of the model is once, over
        all ranks.
        """
        for unit in self.units.values():
            for start, stop in counted_ranges(unit.buffer, self.plan, self.mesh.rank):
                yield unit, start, stop

    def gradients(self) -> list[Tensor]:
        """The gradients of what this rank updates."""
        return [unit.summed for unit in self.units.values()]


def apply(plan: Plan, *, mesh: Mesh, fill: Fill) -> Placed:
    """The model of a plan, laid out and filled. `fill` writes each piece of weight."""
    layout, rank, method = plan.layout, mesh.rank, plan.method
    with torch.device("meta"):
        model = Transformer(plan.shape, dropout=method.dropout)
    replicas = Replicas(mesh.shard, mesh.across)
    shares = layout.accumulate == "shard" and not replicas.alone
    units = flatten(
        model,
        local_buffers(plan, rank),
        dtype=DTYPES[method.precision],
        device=mesh.device,
        own=lambda buffer: own_range(buffer, layout, rank),
        whole_gradients=not shares,
    )
    fill_masters(units, fill)
    ranges = tuple(part for unit in units.values() for part in _ranges(unit))
    optimizer = build_optimizer(method.optimizer, ranges)
    make_states(method.optimizer, optimizer, ranges, step=0)
    reducer: Reducer | ShareReducer | None = None
    if shares:
        reducer = ShareReducer(units, replicas)
    elif not replicas.alone:
        reducer = Reducer(units, replicas, scatter=layout.zero > 0)
    keeper = None
    if needs_own(layout):
        target = reducer.target if reducer else whole_gradients(units).__getitem__
        keeper = Resident(units, target, reducer.ready if reducer else lambda _: None)
        own_operations(model, keeper)
    elif reducer:
        listen_to_parameters(model, reducer)
    gathers = layout.zero > 0 and mesh.shard.size > 1
    gatherer = gather_weights(model, units, mesh.shard) if gathers else None
    return Placed(plan, mesh, model, units, ranges, optimizer, reducer, gatherer, keeper)


def needs_own(layout: Layout) -> bool:
    """Whether the model's operations must know their weights by handle (`parallel/ops.py`)."""
    return layout.tp > 1 or layout.pp > 1 or layout.zero == 3 or layout.recompute != "none"


def _ranges(unit: FlatUnit) -> list[Range]:
    """The own range of a unit, in two decay groups."""
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
