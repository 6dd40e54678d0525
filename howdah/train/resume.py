"""Where a run begins: from its own newest checkpoint, from a folder of weights, or fresh.

The run folder wins: what it has saved goes on, whatever layout saved it. Rank 0 looks, checks
the checksums, and tells the others which step it chose; then every rank reads the pieces it
holds.

A checkpoint is kept in pieces: each rank writes its share of every flat unit.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from howdah.checkpoint.folders import clean, numbered, step_folder
from howdah.checkpoint.load import Checkpoint, newest, open_checkpoint
from howdah.model.hub import read_hub
from howdah.optim.optimizers import Range, state_names
from howdah.parallel.apply import Placed
from howdah.parallel.flatten import Fill, fresh
from howdah.parallel.mesh import Mesh
from howdah.plan.boxes import Piece
from howdah.plan.flat import Buffer, pieces, share
from howdah.plan.method import Method, Optimizer
from howdah.plan.problems import BadInput
from howdah.plan.shapes import ModelShape
from howdah.plan.sharding import weights
from howdah.text.batches import order_of
from howdah.text.order import Order
from howdah.text.tokens import Corpus
from howdah.train.job import Job
from howdah.train.show import Say

# What the order of samples depends on, in the user's words.
ORDER = {
    "seed": "seed",
    "sequence": "data.sequence",
    "samples": "samples of each source",
    "shares": "shares of the sources",
}

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
        newest_whole = choose(checkpoints, say)
        chosen = newest_whole.step if newest_whole else -1
    (total,) = mesh.dp.sum_scalars([chosen + 1 if mesh.rank == 0 else 0])
    if total:
        checkpoint = open_checkpoint(step_folder(checkpoints, int(total) - 1))
        say(f"going on from step {checkpoint.step}, saved on {checkpoint.layout}")
        return Start(read_weights(checkpoint), checkpoint, checkpoint.step, checkpoint.samples)
    if job.init_from is not None:
        return Start(read_folder(job.init_from, job.shape), None, 0, 0)
    return Start(fresh(weights(job.shape), job.seed), None, 0, 0)


def choose(checkpoints: Path, say: Say) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where nothing was ever saved.

    Raises BadInput when all there are, are damaged: a run that began anew would write over
    what might still be saved.
    """
    found = newest(checkpoints, say)
    if found is None and numbered(checkpoints):
        raise BadInput(
            f"every checkpoint in {checkpoints} is damaged; restore one from a copy, or start "
            "anew with another folder=PATH"
        )
    return found


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


# -- does the checkpoint belong to this run? ---------------------------------------


def check_match(checkpoint: Checkpoint, job: Job, corpus: Corpus) -> None:
    """Raises BadInput when `job` cannot go on from a checkpoint: it would be another training.

    The checkpoint must not be past the job's last step. Model, tokenizer, order of samples and
    optimizer must be those of the checkpoint; layout, batch, precision and rate may change.
    """
    way_out = "restore it, or give another folder=PATH"
    if checkpoint.step > job.pace.steps:
        raise BadInput(
            f"{checkpoint.path} is past pace.steps {job.pace.steps}; make it {checkpoint.step} or "
            "more, or give another folder=PATH"
        )
    shape = as_plain(job.shape)
    for name in _different(shape, checkpoint.meta["model"]):
        raise BadInput(
            f"{checkpoint.path} holds a model with {name} {checkpoint.meta['model'].get(name)}, "
            f"this run has {shape[name]}; {way_out}"
        )
    if checkpoint.meta["tokenizer"] != corpus.fingerprint:
        raise BadInput(
            f"{checkpoint.path} was trained with another tokenizer: its text sources or its "
            "vocabulary have changed; restore them, or give another folder=PATH"
        )
    order = as_plain(order_of(corpus, sequence=job.data.sequence, seed=job.seed))
    for name in _different(order, checkpoint.meta["order"]):
        raise BadInput(
            f"{checkpoint.path} was trained with {ORDER[name]} {checkpoint.meta['order'][name]}, "
            f"this run has {order[name]}, so the next sample would be another; {way_out}"
        )
    _check_optimizer(checkpoint, job.method.optimizer)


def _check_optimizer(checkpoint: Checkpoint, optimizer: Optimizer) -> None:
    saved = checkpoint.meta["optimizer"]
    if saved != optimizer.name:
        raise BadInput(
            f"{checkpoint.path} holds the state of {saved}, this run uses {optimizer.name}; "
            f"go on with {saved}, or start anew from an export"
        )
    for state in state_names(optimizer):
        if state not in checkpoint.kinds:
            raise BadInput(
                f"{checkpoint.path} holds no {state} of {saved}, which method.optimizer.momentum "
                f"{optimizer.momentum} needs; go on with momentum 0, or start anew from an export"
            )


def _different(mine: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    return [name for name in mine if mine[name] != saved.get(name)]


def as_plain(facts: ModelShape | Order) -> dict[str, Any]:
    """A dataclass as JSON gives it back: tuples are lists."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(facts)))
    return plain


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
    """Fills every range's optimizer state from a checkpoint of the same optimizer."""
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
