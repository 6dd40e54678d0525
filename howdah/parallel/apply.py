"""The one place that knows the order in which a layout is applied to a plain model.

1. build the model on the meta device: no weight exists yet, so none is ever whole in vain
2. lay its weights in flat units
3. fill them: fresh, or from a checkpoint or a folder
4. hand the masters to the optimizer, range by range
5. make it a replica: gradients are summed over dp
"""

from dataclasses import dataclass

import torch

from howdah.model.transformer import Transformer
from howdah.optim.optimizers import Range, build_optimizer, make_states
from howdah.parallel.data import Reducer, replicate
from howdah.parallel.flatten import Fill, FlatUnit, fill_masters, flatten
from howdah.parallel.mesh import Mesh
from howdah.plan.flat import buffers
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
    """A model on its place in the layout, ready to train."""

    model: Transformer
    units: dict[str, FlatUnit]
    ranges: tuple[Range, ...]
    optimizer: torch.optim.Optimizer
    reducer: Reducer | None


def apply(shape: ModelShape, *, mesh: Mesh, method: Method, fill: Fill) -> Placed:
    """The model of `shape`, laid out and filled. `fill` writes each piece of weight."""
    with torch.device("meta"):
        model = Transformer(shape, dropout=method.dropout)
    dtype = DTYPES[method.precision]
    units = flatten(model, buffers(weights(shape)), dtype=dtype, device=mesh.device)
    fill_masters(units, fill)
    ranges = tuple(part for unit in units.values() for part in _ranges(unit))
    optimizer = build_optimizer(method.optimizer, ranges)
    make_states(method.optimizer, optimizer, ranges, step=0)
    return Placed(model, units, ranges, optimizer, replicate(model, units, mesh.dp))


def _ranges(unit: FlatUnit) -> list[Range]:
    """What this rank's optimizer updates of a unit: all of it, in two decay groups."""
    cuts = [(0, unit.buffer.decay_stop, True), (unit.buffer.decay_stop, unit.buffer.length, False)]
    return [
        Range(unit.buffer.unit, a, b, decay, unit.masters[a:b], unit.gradients[a:b])
        for a, b, decay in cuts
    ]
