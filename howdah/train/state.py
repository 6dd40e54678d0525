"""The state of a placed model as named pieces: what a rank saves, and how it is filled again.

The ranks that hold copies of a unit share it out between them; each writes its
share, so the whole is written once however many replicas there are:

    unit layers.0   |q.weight      |k.weight   |v.weight   |norm.weight|
                    |<----- rank 0 ----->|<----- rank 1 ----->|

Masters and optimizer states are cut alike. Reading asks for the pieces that this rank holds now,
whoever wrote them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from howdah.checkpoint.load import Checkpoint
from howdah.optim.optimizers import Range
from howdah.parallel.apply import Placed
from howdah.parallel.flatten import FlatUnit
from howdah.parallel.mesh import Mesh
from howdah.plan.boxes import Piece
from howdah.plan.flat import pieces, share
from howdah.plan.method import Method
from howdah.plan.ranks import axis
from howdah.plan.sharding import replicas_of

Entry = tuple[str, Piece, Tensor]


def entries(placed: Placed, mesh: Mesh, method: Method) -> Iterator[Entry]:
    """What this rank saves: its share of every unit's masters and optimizer states."""
    shares = {name: _own_share(mesh, unit) for name, unit in placed.units.items()}
    for name, unit in placed.units.items():
        for piece, start, stop in pieces(unit.buffer, *shares[name]):
            yield "weight", piece, unit.masters[start - unit.start : stop - unit.start]
    for part, state, flat in _states(placed, method):
        first, last = shares[part.unit]
        mine = max(first, part.start), min(last, part.stop)
        for piece, start, stop in pieces(placed.units[part.unit].buffer, *mine):
            yield state, piece, flat[start - part.start : stop - part.start]


def restore_states(placed: Placed, method: Method, checkpoint: Checkpoint) -> None:
    """Fills every range's optimizer state from a checkpoint of the same optimizer."""
    for part, state, flat in _states(placed, method):
        for piece, start, stop in pieces(placed.units[part.unit].buffer, part.start, part.stop):
            checkpoint.read(state, piece, flat[start - part.start : stop - part.start])
    for state in placed.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], float(checkpoint.step))


def _own_share(mesh: Mesh, unit: FlatUnit) -> tuple[int, int]:
    """The range of a unit that is this rank's, among the ranks that hold copies of it."""
    copies = axis(mesh.layout, replicas_of(unit.buffer.unit))
    return share(unit.buffer.length, copies.size, copies.place(mesh.rank))


def _states(placed: Placed, method: Method) -> Iterator[tuple[Range, str, Tensor]]:
    for part in placed.ranges:
        if part.master.numel():
            for name in method.optimizer.states:
                yield part, name, placed.optimizer.state[part.master][name]
