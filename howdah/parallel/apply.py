"""The one place that knows the order in which a layout is applied to a plain model.

1. build the model on the meta device: no weight exists yet, so none is ever whole in vain
2. lay its weights in flat units
3. fill them: fresh, or from a checkpoint or a folder
4. hand the masters to the optimizer, range by range
5. make it a replica: gradients are summed over dp, whole or share by share, and where each
   replica updates its share alone, weights are gathered
"""

from dataclasses import dataclass

import torch

from howdah.model.transformer import Transformer
from howdah.optim.optimizers import Range, build_optimizer, make_states
from howdah.parallel.data import Reducer, replicate
from howdah.parallel.flatten import Fill, FlatUnit, Own, everything, fill_masters, flatten
from howdah.parallel.mesh import Mesh
from howdah.parallel.zero import Gatherer, ShareReducer, gather_weights, reduce_shares
from howdah.plan.flat import buffers, share
from howdah.plan.method import Method, Precision
from howdah.plan.shapes import ModelShape
from howdah.plan.weights import weights

DTYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Placed:
    """A model on its place in the layout, ready to train.

    mesh      where it is
    units     the flat tensors, unit by unit
    ranges    what this rank's optimizer updates
    reducer   sums gradients over the replicas; None where there is one
    gatherer  brings updated weights to all replicas; None where each updates everything
    """

    mesh: Mesh
    model: Transformer
    units: dict[str, FlatUnit]
    ranges: tuple[Range, ...]
    optimizer: torch.optim.Optimizer
    reducer: Reducer | ShareReducer | None
    gatherer: Gatherer | None

    @property
    def exposed(self) -> float:
        """Seconds that computation has waited for gradients and weights, over the whole run."""
        waiting = (part.exposed for part in (self.reducer, self.gatherer) if part)
        return sum(waiting, 0.0)

    def settle(self) -> None:
        """The weights are those of the last update, on every rank, when this returns."""
        if self.gatherer:
            self.gatherer.wait()


def apply(shape: ModelShape, *, mesh: Mesh, method: Method, fill: Fill) -> Placed:
    """The model of `shape`, laid out and filled. `fill` writes each piece of weight."""
    with torch.device("meta"):
        model = Transformer(shape, dropout=method.dropout)
    layout, alone = mesh.layout, mesh.dp.size == 1
    shares = layout.accumulate == "shard" and not alone
    units = flatten(
        model,
        buffers(weights(shape)),
        dtype=DTYPES[method.precision],
        device=mesh.device,
        own=_own(mesh),
        whole_gradients=not shares,
    )
    fill_masters(units, fill)
    ranges = tuple(part for unit in units.values() for part in _ranges(unit))
    optimizer = build_optimizer(method.optimizer, ranges)
    make_states(method.optimizer, optimizer, ranges, step=0)
    reducer: Reducer | ShareReducer | None
    if shares:
        reducer = reduce_shares(model, units, mesh.dp)
    else:
        reducer = replicate(model, units, mesh.dp, scatter=layout.zero > 0)
    gatherer = gather_weights(model, units, mesh.dp) if layout.zero and not alone else None
    return Placed(mesh, model, units, ranges, optimizer, reducer, gatherer)


def _own(mesh: Mesh) -> Own:
    """What this rank updates of a unit: its share under ZeRO, else everything."""
    if mesh.layout.zero == 0:
        return everything
    return lambda buffer: share(buffer.length, mesh.dp.size, mesh.dp.rank)


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
