"""The state of a ParallelModel as named pieces: what a rank saves, and how it is restored.

The ranks that hold copies of a unit divide it among themselves. Each rank writes the range that it
counts, so every element is written once, however many replicas there are:

    unit layers.0   |q.weight      |k.weight   |v.weight   |norm.weight|
                    |<----- rank 0 ----->|<----- rank 1 ----->|

Masters and optimizer states are divided in the same way. To restore, a rank reads the pieces that
it holds now; any layout may have written them.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from howdah.checkpoint.load import Checkpoint
from howdah.optim.optimizers import Range
from howdah.parallel.apply import ParallelModel
from howdah.plan.boxes import Piece
from howdah.plan.flat_buffers import pieces

Entry = tuple[str, Piece, Tensor]


def entries(placed: ParallelModel) -> Iterator[Entry]:
    """The pieces that this rank saves: masters and optimizer states of the ranges that it counts.
    Yields (kind, piece, its elements in 1-D); the kind is "weight" or the name of an optimizer
    state.
    """
    counted = list(placed.counted())
    for unit, first, last in counted:
        for piece, start, stop in pieces(unit.buffer, first, last):
            yield "weight", piece, unit.masters[start - unit.start : stop - unit.start]
    for part, state, flat in _states(placed):
        for unit, first, last in counted:
            if unit.buffer.unit == part.unit:
                mine = max(first, part.start), min(last, part.stop)
                for piece, start, stop in pieces(unit.buffer, *mine):
                    yield state, piece, flat[start - part.start : stop - part.start]


def restore_states(placed: ParallelModel, checkpoint: Checkpoint) -> None:
    """Fills this rank's optimizer states from a checkpoint of the same optimizer."""
    for part, state, flat in _states(placed):
        for piece, start, stop in pieces(placed.units[part.unit].buffer, part.start, part.stop):
            checkpoint.read(state, piece, flat[start - part.start : stop - part.start])
    for state in placed.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], float(checkpoint.step))


def _states(placed: ParallelModel) -> Iterator[tuple[Range, str, Tensor]]:
    for part in placed.ranges:
        if part.master.numel():
            for name in placed.plan.method.optimizer.states:
                yield part, name, placed.optimizer.state[part.master][name]
