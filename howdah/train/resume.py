"""Where a run begins: from its own newest checkpoint, from a folder of weights, or fresh.

The run folder wins: what it has saved goes on, whatever layout saved it. Rank 0 looks, checks
the checksums, and tells the others which step it chose; then every rank reads the pieces it
holds.

A checkpoint is kept in pieces: each rank writes its share of every flat unit.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howdah.checkpoint.folders import clean, step_folder
from howdah.checkpoint.load import Checkpoint, newest, open_checkpoint
from howdah.model.hub import read_hub
from howdah.optim.optimizers import Range, state_names
from howdah.parallel.apply import Placed
from howdah.parallel.flatten import Fill, fresh
from howdah.parallel.mesh import Mesh
from howdah.plan.boxes import Piece
from howdah.plan.flat import Buffer, pieces, share
from howdah.plan.method import Method
from howdah.plan.problems import BadInput
from howdah.plan.shapes import ModelShape
from howdah.plan.sharding import weights
from howdah.train.job import Job
from howdah.train.show import Say

Entry = tuple[str, Piece, Tensor]


@dataclass(frozen=True)
class Start:
    """What training begins with.

    fill        writes the first weights
    checkpoint  what is resumed, or None
    step        updates done so far
    samples     samples of the order used so far
    """

    fill: Fill
    checkpoint: Checkpoint | None
    step: int
    samples: int


def find_start(job: Job, mesh: Mesh, say: Say) -> Start:
    """Where this run begins; all ranks call together and get the same."""
    checkpoints = job.folder / "checkpoints"
    chosen = -1
    if mesh.rank == 0:
        clean(checkpoints)
        newest_whole = newest(checkpoints, say)
        chosen = newest_whole.step if newest_whole else -1
    (total,) = mesh.dp.sum_scalars([chosen + 1 if mesh.rank == 0 else 0])
    if total:
        checkpoint = open_checkpoint(step_folder(checkpoints, int(total) - 1))
        return Start(read_weights(checkpoint), checkpoint, checkpoint.step, checkpoint.samples)
    if job.init_from is not None:
        return Start(read_folder(job.init_from, job.shape), None, 0, 0)
    return Start(fresh(weights(job.shape), job.seed), None, 0, 0)


def read_weights(checkpoint: Checkpoint) -> Fill:
    """Fills pieces of weight from a checkpoint."""
    return lambda piece, out: checkpoint.read("weight", piece, out)


def read_folder(folder: Path, shape: ModelShape) -> Fill:
    """Fills pieces of weight from a Hugging Face folder."""
    found, tensor = read_hub(folder)
    if found != shape:
        different = [name for name, size in asdict(found).items() if asdict(shape)[name] != size]
        raise BadInput(
            f"the model in {folder} differs from this run's in {', '.join(different)}; "
            "leave the [model] table out to take the folder's"
        )

    def fill(piece: Piece, out: Tensor) -> None:
        out.copy_(tensor(piece.name).reshape(-1)[piece.start : piece.stop])

    return fill


def check_match(checkpoint: Checkpoint, *, shape: ModelShape, fingerprint: str) -> None:
    """Raises BadInput when a checkpoint was made with another model or tokenizer."""
    saved = checkpoint.meta["model"]
    mine = as_plain(shape)
    different = [name for name in mine if mine[name] != saved.get(name)]
    if different:
        name = different[0]
        raise BadInput(
            f"{checkpoint.path} holds a model with {name} {saved.get(name)}, this run has "
            f"{mine[name]}; give another folder=PATH, or the model it was saved with"
        )
    if checkpoint.meta["tokenizer"] != fingerprint:
        raise BadInput(
            f"{checkpoint.path} was trained with another tokenizer; its text sources or its "
            "vocabulary have changed: restore them, or give another folder=PATH"
        )


def as_plain(shape: ModelShape) -> dict[str, Any]:
    """A shape as JSON can hold it."""
    return asdict(shape)


# -- pieces of a placed model ----------------------------------------------------


def entries(placed: Placed, mesh: Mesh, method: Method) -> Iterator[Entry]:
    """What this rank saves: its share of every unit's masters and optimizer states."""
    for unit in placed.units.values():
        mine = share(unit.buffer.length, mesh.dp.size, mesh.dp.rank)
        for piece, start, stop in pieces(unit.buffer, *mine):
            yield "weight", piece, unit.masters[start:stop]
    for part, state, flat in _states(placed, method):
        buffer = placed.units[part.unit].buffer
        mine = _overlap(part, buffer, mesh)
        for piece, start, stop in pieces(buffer, *mine):
            yield state, piece, flat[start - part.start : stop - part.start]


def restore_states(placed: Placed, method: Method, checkpoint: Checkpoint) -> None:
    """Fills every range's optimizer state from a checkpoint.

    Raises BadInput when it was saved by another kind of optimizer.
    """
    saved = checkpoint.meta["optimizer"]
    if saved != method.optimizer.name:
        raise BadInput(
            f"{checkpoint.path} holds the state of {saved}, this run uses "
            f"{method.optimizer.name}; go on with {saved}, or start anew from an export"
        )
    for part, state, flat in _states(placed, method):
        for piece, start, stop in pieces(placed.units[part.unit].buffer, part.start, part.stop):
            checkpoint.read(state, piece, flat[start - part.start : stop - part.start])
    for state in placed.optimizer.state.values():
        if "step" in state:
            state["step"] = torch.full_like(state["step"], float(checkpoint.step))


def _states(placed: Placed, method: Method) -> Iterator[tuple[Range, str, Tensor]]:
    for part in placed.ranges:
        if part.master.numel():
            for name in state_names(method.optimizer):
                yield part, name, placed.optimizer.state[part.master][name]


def _overlap(part: Range, buffer: Buffer, mesh: Mesh) -> tuple[int, int]:
    start, stop = share(buffer.length, mesh.dp.size, mesh.dp.rank)
    return max(start, part.start), min(stop, part.stop)
