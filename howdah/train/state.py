"""The state of a ParallelModel as named pieces: what a rank saves, and how it is restored.

What sums in 4 bits have rounded away is no part of the model but of each rank, and is saved so.

The ranks that hold copies of a unit divide it among themselves. Each rank writes the range that it
counts, so every element is written once, however many replicas there are:

    unit layers.0   |q.weight      |k.weight   |v.weight   |norm.weight|
                    |<----- rank 0 ----->|<----- rank 1 ----->|

Masters and optimizer states are divided in the same way. To restore, a rank reads the pieces that
it holds now; any layout may have written them.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from howdah.checkpoint.facts import updates_of
from howdah.checkpoint.load import Checkpoint
from howdah.checkpoint.snapshot import Elsewhere, Entry
from howdah.optim.optimizers import Range
from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import Fill, FlatUnit, copied, fill_masters
from howdah.plan.boxes import whole_piece
from howdah.plan.flat_buffers import pieces
from howdah.plan.quantised import FEEDBACK


def entries(placed: ParallelModel) -> Iterator[Entry]:
    """The pieces that this rank saves: masters and optimizer states of the ranges that it counts.
    Yields (kind, piece, its elements in 1-D); the kind is "weight" or the name of an optimizer
    state. Beside an adapter, frozen weights are left out.
    """
    for name, error in _errors(placed):
        yield FEEDBACK, whole_piece(name, (len(error),)), error
    beside = placed.plan.method.adapter is not None  # a base, which is in a folder of its own
    counted = [one for one in placed.counted() if one[0].trains or not beside]
    for unit, first, last in counted:
        for piece, start, stop in pieces(unit.buffer, first, last):
            yield "weight", piece, _kept(placed, unit, "masters", start, stop)
    if placed.update:
        for state in placed.plan.method.optimizer.states:
            for unit, first, last in (one for one in counted if one[0].trains):
                for piece, start, stop in pieces(unit.buffer, first, last):
                    yield state, piece, _kept(placed, unit, state, start, stop)
        return
    for part, state, flat in _states(placed):
        for unit, first, last in counted:
            if unit.buffer.unit == part.unit:
                mine = max(first, part.start), min(last, part.stop)
                for piece, start, stop in pieces(unit.buffer, *mine):
                    yield state, piece, flat[start - part.start : stop - part.start]


def restore_states(placed: ParallelModel, checkpoint: Checkpoint) -> None:
    """Fills this rank's optimizer states from a checkpoint of the same optimizer; what was rounded
    away, if that is of the same ranks.
    """
    takes, updates = has_feedback(placed, checkpoint), updates_of(checkpoint)
    for name, error in _errors(placed):
        if takes:
            checkpoint.read(FEEDBACK, whole_piece(name, (len(error),)), error)
        else:
            error.zero_()
    if placed.update:
        placed.update.turns.updates = max(updates - placed.update.delay, 0)
        for state in placed.plan.method.optimizer.states:
            for unit in (one for one in placed.units.values() if one.trains):
                _restore(placed, unit, state, checkpoint)
        return
    for part, state, flat in _states(placed):
        for piece, start, stop in pieces(placed.units[part.unit].buffer, part.start, part.stop):
            checkpoint.read(state, piece, flat[start - part.start : stop - part.start])
    for state in placed.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], float(updates))


def has_feedback(placed: ParallelModel, checkpoint: Checkpoint) -> bool:
    """Whether what was rounded away, as a checkpoint has it, is of this rank of this layout.
    Another layout adds other terms; it begins with nothing.
    """
    mine, theirs = dict(_errors(placed)), checkpoint.names(FEEDBACK)
    return len(theirs) == len(mine) * placed.mesh.world.size and all(
        name in theirs and checkpoint.shape(FEEDBACK, name) == (len(error),)
        for name, error in mine.items()
    )


def _errors(placed: ParallelModel) -> Iterator[tuple[str, Tensor]]:
    """By name, what this rank's sums have rounded away."""
    for unit, every in placed.sums.errors.items():
        for hop, error in enumerate(every, 1):
            yield f"{unit} hop {hop} rank {placed.mesh.rank}", error


def count_updates(placed: ParallelModel, updates: int) -> None:
    """Sets the optimizer's count of updates: a step whose update was left out counts too, or a
    resumed run would correct the bias of its moments by another count.
    """
    if placed.update:
        placed.update.turns.updates = max(updates - placed.update.delay, 0)
        return
    for state in placed.optimizer.state.values():
        if "step" in state:
            state["step"].fill_(float(updates))


def refill(placed: ParallelModel, fill: Fill) -> None:
    """Fills the weights of a model that has trained with others, such as those of a checkpoint."""
    placed.sync_weights()
    put = placed.homes.put if placed.homes else copied
    fill_masters(placed.units, fill, put, on=placed.mesh.device)
    if placed.gatherer:
        placed.gatherer.updated()


def _kept(
    placed: ParallelModel, unit: FlatUnit, kind: str, start: int, stop: int
) -> Tensor | Elsewhere:
    """The elements [start, stop) of a unit's buffer, of one kind; those on the disk stay there."""
    first, last, layout = start - unit.start, stop - unit.start, placed.plan.layout
    home, flat = layout.optimizer, unit.masters
    if not unit.trains:  # it has weights alone
        home, flat = layout.weights, unit.weights
    if placed.homes is None or home != "disk":
        return placed.own(unit, kind, first, last)
    return Elsewhere((last - first,), flat.dtype, partial(placed.own, unit, kind, first, last))


def _restore(placed: ParallelModel, unit: FlatUnit, state: str, checkpoint: Checkpoint) -> None:
    """Fills one state of one unit, which may be off the device."""
    assert placed.homes is not None
    flat = torch.zeros(len(unit.masters), dtype=unit.masters.dtype)
    for piece, start, stop in pieces(unit.buffer, unit.start, unit.stop):
        checkpoint.read(state, piece, flat[start - unit.start : stop - unit.start])
    placed.homes.put(unit, state, flat)


def _states(placed: ParallelModel) -> Iterator[tuple[Range, str, Tensor]]:
    for part in placed.ranges:
        if part.master.numel():
            for name in placed.plan.method.optimizer.states:
                yield part, name, placed.optimizer.state[part.master][name]
