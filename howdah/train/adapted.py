"""Runs that train adapters beside a base: checkpoints hold what was trained, and not the base.

    checkpoint   lora_a, lora_b of each target, with DoRA lora_magnitude; other weights that are
                 trained; their states
                 base: the folder, and a checksum of the weights that are frozen
    resume       what is trained from the checkpoint, all else from the folder, whose checksum must
                 be that of the checkpoint
    use, export  W + s·B·A in the place of each target, with DoRA its rows brought to their lengths:
                 a model like the base

The checksum is of names and stored bytes, so it depends neither on the run's precision nor on how
the folder is cut into files.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from howdah.base.errors import UserError, named
from howdah.base.files import kind_of
from howdah.checkpoint.facts import Base, Facts, facts
from howdah.checkpoint.load import Checkpoint
from howdah.checkpoint.peft import read_peft, write_peft
from howdah.checkpoint.safefile import as_bytes
from howdah.comm.crc import crc32
from howdah.model.adapter import merged
from howdah.model.hub import read_hub
from howdah.parallel.flat_params import Fill, index_of_piece
from howdah.plan.boxes import Piece, whole_piece
from howdah.plan.method import Method
from howdah.plan.trained import MAGNITUDE, base_of, is_adapter, marks_of, table_of
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import Weight, weights
from howdah.train.job import Job

Names = tuple[str, ...]
OPENED = 4  # folders whose checksums a process remembers


def base_facts(job: Job) -> Base | None:
    """What a checkpoint says of the base of a run; None where all weights are in the checkpoint."""
    adapter = job.method.adapter
    if adapter is None or job.init_from is None:
        return None
    return Base(str(job.init_from), _checksum(job.init_from, job.shape, job.method), adapter)


def _checksum(folder: Path, shape: ModelShape, method: Method) -> int:
    """The checksum of what a method freezes of a base."""
    return checksum(folder, tuple(row.name for row in table_of(shape, method) if not row.rate))


@lru_cache(OPENED)
def checksum(folder: Path, names: Names) -> int:
    """The checksum of some weights of a Hugging Face folder, which are read."""
    _, tensor = read_hub(folder)
    found = 0
    for name in names:
        found = crc32(name.encode(), found)
        found = crc32(as_bytes(tensor(name).contiguous().view(-1)), found)
    return found


def base_problems(saved: Facts, job: Job, *, reads: bool) -> Iterator[str]:
    """Why a run cannot go on from a checkpoint beside its base.

    reads  whether the base is read, to compare its checksum
    """
    adapter, base = job.method.adapter, saved.base
    if base is None and adapter is None:
        return
    if base is None:
        yield (
            "holds all weights of a model, and this run trains an adapter beside one; give another "
            "folder=PATH"
        )
    elif adapter is None:
        yield (
            f"holds an adapter beside {named(base.folder)}, and this run trains the model's own "
            "weights; restore method.adapter, or give another folder=PATH"
        )
    elif adapter != base.adapter:
        yield (
            f"holds an adapter with {_told(base)}; restore method.adapter, or give another "
            "folder=PATH"
        )
    elif job.init_from is None:
        yield f"was trained beside {named(base.folder)}; name it by init_from"
    elif reads and (mine := base_facts(job)) and mine.crc32 != base.crc32:
        yield (
            f"was trained beside other weights than those in {named(job.init_from)} now: their "
            f"checksums differ; name by init_from the folder that it began with, "
            f"{named(base.folder)} as it was then"
        )


def _told(base: Base) -> str:
    one = base.adapter
    words = f"rank {one.rank}, alpha {one.alpha:g} and targets {', '.join(one.targets)}"
    return f"kind {one.kind}, {words}" if one.measures else words


def beside_base(own: Fill, of_base: Fill, mine: Callable[[str], bool]) -> Fill:
    """A Fill that takes the weights that are `mine` from one, and the others from the base."""

    def fill(piece: Piece, out: Tensor) -> None:
        (own if mine(piece.name) else of_base)(piece, out)

    return fill


def tensors_for_use(checkpoint: Checkpoint) -> Callable[[str], Tensor]:
    """A function from names to the weights that a checkpoint's model computes with: behind an
    adapter, merged with those of its base.

    Raises UserError where the base is not there, or another one.
    """
    saved = facts(checkpoint)
    base, held = saved.base, frozenset(checkpoint.names("weight"))
    if base is None:
        return lambda name: checkpoint.tensor("weight", name)
    if kind_of(Path(base.folder)) != "folder":
        raise UserError(
            f"{checkpoint.path} holds an adapter, and {named(base.folder)}, with the weights that "
            "it was trained beside, does not exist; make it a link to where they are now"
        )
    frozen = tuple(row.name for row in weights(saved.model) if row.name not in held)
    _, tensor = read_hub(Path(base.folder), labels=saved.model.labels, fresh=_none)
    if checksum(Path(base.folder), frozen) != base.crc32:
        raise UserError(
            f"{checkpoint.path} holds an adapter, and the weights in {named(base.folder)} are not "
            "those that it was trained beside; restore that folder"
        )
    adapted = {base_of(name) for name in held if is_adapter(name)}

    def use(name: str) -> Tensor:
        if name in held:
            return checkpoint.tensor("weight", name)
        if name not in adapted:
            return tensor(name)
        path = name.removesuffix(".weight")
        a, b = (checkpoint.tensor("weight", f"{path}.lora_{one}.weight") for one in "ab")
        m = checkpoint.tensor("weight", f"{path}{MAGNITUDE}") if base.adapter.measures else None
        return merged(tensor(name), a, b, base.adapter.scale, m)

    return use


def _none(name: str) -> Tensor:
    """The head for labels is in the checkpoint."""
    return torch.empty(0)


def fill_for_use(checkpoint: Checkpoint) -> Fill:
    """A Fill with the weights that a checkpoint's model computes with."""
    if facts(checkpoint).base is None:
        return lambda piece, out: checkpoint.read("weight", piece, out)
    return by_pieces(tensors_for_use(checkpoint))


def by_pieces(tensor: Callable[[str], Tensor]) -> Fill:
    """A Fill of whole tensors, of which the last is kept until another is asked for."""
    last: dict[str, Tensor] = {}

    def fill(piece: Piece, out: Tensor) -> None:
        if piece.name not in last:
            last.clear()
            last[piece.name] = tensor(piece.name).reshape(-1)
        index = index_of_piece(piece)(torch.arange(piece.elements))
        out.copy_(last[piece.name][index])

    return fill


def trained_problems(
    checkpoint: Checkpoint, rows: Iterable[Weight], states: Names
) -> Iterator[str]:
    """Why a checkpoint has not the states of all weights that are trained now."""
    for state in states:
        held = frozenset(checkpoint.names(state))
        for row in rows:
            if held and row.rate and row.name not in held:
                yield (
                    f"was trained with {row.name} frozen, of which it holds no {state}; restore "
                    "method.train, or go on from an export: howdah export RUN --to DIR, then "
                    "init_from=DIR folder=PATH"
                )
                return


def first_lengths(base: Fill, rows: Iterable[Weight]) -> Fill:
    """A Fill with the lengths of the rows of a base, with which lengths begin.

    rows  of the table
    """
    shapes = {row.name: row.shape for row in rows}

    def tensor(name: str) -> Tensor:
        whole = whole_piece(base_of(name), shapes[base_of(name)])
        rows = torch.empty(whole.shape, dtype=torch.float64)
        base(whole, rows.view(-1))
        found: Tensor = torch.linalg.vector_norm(rows, dim=1)
        return found

    return by_pieces(tensor)


def first_adapter(
    folder: Path, shape: ModelShape, method: Method, base: Path
) -> Callable[[str], Tensor]:
    """The adapter in PEFT's files with which a run begins, beside a base. Raises UserError."""
    assert method.adapter is not None
    targets = sorted(marks_of(shape, method).adapted)
    crc = partial(_checksum, base, shape, method)
    return read_peft(folder, shape=shape, adapter=method.adapter, targets=targets, base=crc)


def export_adapter(checkpoint: Checkpoint, to: Path) -> None:
    """Writes a run's adapter as PEFT's files. Raises UserError where it has none."""
    saved = facts(checkpoint)
    held, base = checkpoint.names("weight"), saved.base
    if base is None:
        raise UserError(
            f"{checkpoint.path} holds a whole model and no adapter; export it without --adapter"
        )
    if more := [name for name in held if not is_adapter(name)]:
        raise UserError(
            f"{more[0]} is trained beside the adapter, and has no place in the PEFT files that are "
            "written; export the merged weights instead, without --adapter"
        )
    write_peft(
        to,
        shape=saved.model,
        adapter=base.adapter,
        targets=[*dict.fromkeys(map(base_of, held))],
        base=(base.folder, base.crc32),
        tensor=lambda name: checkpoint.tensor("weight", name),
    )


def needs_base(method: Method, init_from: Path | None) -> Iterator[str]:
    """Why a run with an adapter cannot start."""
    if method.adapter and init_from is None:
        yield (
            "method.adapter trains beside the weights of a model, and this run would begin with "
            "random ones; name a Hugging Face folder by init_from=DIR"
        )
