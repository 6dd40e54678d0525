"""Checkpoints of a foreign model: the one format of howdah, so pieces that any layout reads.

    kind                weight      masters of all parameters, also of frozen ones
                        exp_avg …   states of the optimizer that have a number for each element
                        buffer      module buffers; `buffer of rank 1`: those declared local
    meta                the optimizer's name, and of each of its groups settings and step counts

Names, shapes and optimizer are compared before anything is changed.
"""

from collections.abc import Iterator
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from howdah.base.errors import Unfinished, UserError, nearest, shown
from howdah.checkpoint.folders import INDEX, clean, numbered, remove, step_folder, steps
from howdah.checkpoint.index import MOST_STEPS, About
from howdah.checkpoint.load import Checkpoint, newest, open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.checkpoint.sites import find_sites
from howdah.plan.boxes import Piece, whole_piece
from howdah.plan.flat_buffers import pieces

if TYPE_CHECKING:
    from howdah.foreign.job import Job

RUN = "own model"
MARK = ".ranks-see"


def save(job: "Job", folder: Path, *, keep: int, extra: Any) -> Path:
    """Writes the checkpoint of this step into `folder`, which all machines share; all ranks call
    together, and return when it is complete.

    keep   number of checkpoints that stay in the folder
    extra  any JSON value, such as the state of a scheduler, which `load` returns

    Raises UserError for a folder that is none or another run's, and for an `extra` that is no JSON;
    Unfinished when the checkpoint could not be written. Older ones stay as they are.
    """
    try:
        dumps(extra)
    except (TypeError, ValueError):
        raise UserError(f"extra is {shown(extra)}, which JSON cannot hold; give JSON") from None
    mesh, world = job.laid.mesh, job.laid.mesh.world
    problem = ""
    if mesh.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            problem = _clear(job, folder)
        except OSError as error:
            problem = f"cannot save in {folder}: {error.strerror}; choose another folder"
    (failed,) = world.sum_scalars([float(bool(problem))])
    if failed:
        raise UserError(problem or f"process 0 cannot save in {folder}; choose another folder")
    if any(find_sites(folder / MARK, world, mesh.wires.nodes)):
        raise UserError(f"{folder} is on one machine alone; save into a folder that all share")
    kept: list[str] = []
    saver = Saver(
        folder,
        rank=mesh.rank,
        world=mesh.layout.world,
        keep=keep,
        say=kept.append,
        start=job.folders.get(folder.absolute(), MOST_STEPS),
    )
    about = About(RUN, str(job.layout), job.seen, _meta(job, extra))
    saver.save(step=job.steps, entries=entries(job), about=about, beside=False)
    (missing,) = world.sum_scalars([float(not saver.part())])
    if missing:
        saver.cancel()
    saver.wait()
    (lost,) = world.sum_scalars([float(saver.failed is not None)])
    if mesh.rank == 0:
        (folder / MARK).unlink(missing_ok=True)
    if not lost:
        job.folders[folder.absolute()] = job.steps
    else:
        raise Unfinished(f"step {job.steps} is not saved: {saver.failed or 'process 0 says why'}")
    return step_folder(folder, job.steps)


def _clear(job: "Job", folder: Path) -> str:
    """Removes what killed processes have left, and a checkpoint of this step that is from before
    the job went back to an earlier one: a whole checkpoint of a step is not written again. Returns
    why the folder cannot be used, if it has checkpoints of another run.
    """
    there, own = numbered(folder), job.folders.get(folder.absolute())
    if there and own is None:
        return (
            f"{folder} has checkpoints of another run (step {there[-1]}); go on from them with "
            "job.load, or save into another folder"
        )
    clean(folder)
    if job.steps in there and own != job.steps:
        remove(step_folder(folder, job.steps))
    return ""


def entries(job: "Job") -> Iterator[tuple[str, Piece, Tensor]]:
    """The pieces that this rank saves."""
    counted = {}
    for unit, first, last in job.counted():
        counted[unit.buffer.unit] = first, last
        for piece, start, stop in pieces(unit.buffer, first, last):
            yield "weight", piece, unit.masters[start - unit.start : stop - unit.start]
    yield from job.laid.states.entries(counted)
    yield from job.laid.statistics.entries()
    if job.rank == 0:
        for name, parameter in _frozen(job):
            yield "weight", whole_piece(name, tuple(parameter.shape)), parameter.reshape(-1)


def _frozen(job: "Job") -> Iterator[tuple[str, Tensor]]:
    for name, parameter in job.model.named_parameters():
        if name not in job.laid.table.groups:
            yield name, parameter.detach()


def _meta(job: "Job", extra: Any) -> dict[str, Any]:
    states = job.laid.states
    return {
        "kind": RUN,
        "optimizer": type(states.optimizer).__name__,
        "states": states.kinds(),
        "groups": states.facts(),
        "skipped": job.skipped,
        "extra": extra,
    }


def load(job: "Job", folder: Path) -> Any:
    """Fills weights, states and buffers from a checkpoint that any layout of the same model has
    written; all ranks call together. Returns what was saved as `extra`.

    Raises UserError for a folder without a sound checkpoint, and for one of another model or
    optimizer; the job is then as it was.
    """
    checkpoint = _chosen(job, folder)
    _require_same(job, checkpoint)
    meta, laid = checkpoint.meta, job.laid
    for unit in laid.units.values():
        for piece, start, stop in pieces(unit.buffer, unit.start, unit.stop):
            checkpoint.read("weight", piece, unit.masters[start - unit.start : stop - unit.start])
        unit.copy_to_weights()
    laid.weights.updated()
    for name, parameter in _frozen(job):
        flat = torch.empty(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        checkpoint.read("weight", whole_piece(name, tuple(parameter.shape)), flat)
        parameter.copy_(flat.view(parameter.shape))
    laid.states.restore(checkpoint, meta["groups"], meta["states"])
    laid.statistics.restore(checkpoint)
    job.folders[checkpoint.path.absolute().parent] = checkpoint.step
    job.steps, job.seen, job.skipped = checkpoint.step, checkpoint.samples, meta["skipped"]
    return meta["extra"]


def _chosen(job: "Job", folder: Path) -> Checkpoint:
    """The checkpoint that rank 0 chooses."""
    world, told, step = job.laid.mesh.world, list[str](), -1.0
    if job.rank == 0:
        if (folder / INDEX).exists():
            told += _wrong(folder)
            step = -1.0 if told else -2.0
        elif found := newest(folder, told.append):
            step = float(found.step)
    (step,) = world.sum_scalars([step if job.rank == 0 else 0.0])
    if step == -1:
        there = steps(folder)
        why = f": {told[0]}" if told else f", which has {len(there)} of them"
        raise UserError(f"no sound checkpoint is in {folder}{why}; name the folder of job.save")
    return open_checkpoint(folder if step == -2 else step_folder(folder, int(step)))


def _wrong(path: Path) -> list[str]:
    """What is wrong with a checkpoint that the user names."""
    try:
        return open_checkpoint(path).verify()
    except UserError as error:
        return [str(error)]


def _require_same(job: "Job", checkpoint: Checkpoint) -> None:
    """Raises UserError unless the checkpoint is of this model and optimizer."""
    path, meta = checkpoint.path, checkpoint.meta
    if meta.get("kind") != RUN:
        raise UserError(
            f"{path} is a checkpoint of howdah train; go on with: howdah train RUN_FOLDER"
        )
    theirs, model = set(checkpoint.names("weight")), job.model
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name, shape in shapes.items():
        if name not in theirs:
            raise UserError(
                f"{path} is of another model: it has no weight of {shown(name)}"
                f"{nearest(name, theirs)}"
            )
        if checkpoint.shape("weight", name) != shape:
            raise UserError(
                f"{path} is of another model: {name} is {list(checkpoint.shape('weight', name))} "
                f"there and {list(shape)} here"
            )
    if more := sorted(theirs - {*shapes}):
        raise UserError(f"{path} is of another model: it has {shown(more[0])}, which is not here")
    buffers = dict(model.named_buffers())
    for name, buffer in buffers.items():
        if name not in checkpoint.names("buffer"):
            raise UserError(f"{path} is of another model: it has no buffer {shown(name)}")
        if checkpoint.shape("buffer", name) != tuple(buffer.shape):
            raise UserError(f"{path} is of another model: the buffer {name} has another shape")
    own = type(job.laid.states.optimizer).__name__
    groups = len(job.laid.states.pilots)
    if meta["optimizer"] != own or len(meta["groups"]) != groups:
        raise UserError(
            f"{path} has states of {meta['optimizer']} with {len(meta['groups'])} groups and this "
            f"optimizer is {own} with {groups}; build the one that was trained with"
        )
