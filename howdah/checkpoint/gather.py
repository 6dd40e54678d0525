"""Resuming where hosts have folders of their own: which checkpoint is whole over all of them, and
the files that a host lacks, sent by one that has them.

                   host of ranks 0 1         host of ranks 2 3         a new one
    index.json     x                         x                         <- sent
    rank-00000     x                         <- sent, where needed     <- sent, where needed
    rank-00002     <- sent, where needed     x                         <- sent, where needed

A host reads its own files first: what is damaged there counts as missing. A file is sent whole, to
the hosts whose ranks hold a part of what is in it, and its checksums are compared with those of the
index. It is then one of the host's files, so what reads checkpoints need not know of this.

All ranks call every function together, between steps, and return the same or raise the same.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import torch

from howdah.base.atomic import replacing, sync_folder, write_text
from howdah.base.errors import UserError, several
from howdah.checkpoint.folders import INDEX, draft_folder, numbered, step_folder
from howdah.checkpoint.index import File, Index, Stored, decode
from howdah.checkpoint.load import Checkpoint, open_checkpoint, read_index
from howdah.checkpoint.safefile import as_bytes
from howdah.checkpoint.sites import Team
from howdah.comm.group import Group
from howdah.plan.boxes import Box, intersect

CHUNK = 16 << 20  # bytes of a message; after each, all ranks know whether it was written
Wanted = Mapping[int, Collection[str]]  # names of files, by the first rank of a host


@dataclass(frozen=True)
class Found:
    """A checkpoint, and where its files are.

    text     its index, as it is written
    holders  of each file, the first ranks of the hosts that have it undamaged
    """

    text: str
    index: Index
    holders: Mapping[str, Sequence[int]]


def exchange(world: Group, text: str) -> list[str]:
    """The texts of all ranks, which are short."""
    data = bytearray(text.encode())
    sizes = [0.0] * world.size
    sizes[world.rank] = float(len(data))
    lengths = [int(size) for size in world.sum_scalars(sizes)]
    if not any(lengths):
        return [""] * world.size
    mine = torch.zeros(max(lengths), dtype=torch.uint8)
    as_bytes(mine)[: len(data)] = data
    every = torch.zeros(world.size * len(mine), dtype=torch.uint8)
    world.all_gather(every, mine)
    rows = every.view(world.size, -1)
    return [bytes(as_bytes(rows[r, :n])).decode() for r, n in enumerate(lengths)]


def tell(world: Group, text: str, root: int) -> str:
    """The root's text."""
    data = bytearray(text.encode()) if world.rank == root else bytearray()
    (size,) = world.sum_scalars([float(len(data))])
    x = torch.zeros(int(size), dtype=torch.uint8)
    as_bytes(x)[: len(data)] = data
    world.broadcast(x, root)
    return bytes(as_bytes(x)).decode()


# -- choosing ----------------------------------------------------------------------


def choose_apart(
    folder: Path, world: Group, team: Team, say: Callable[[str], None]
) -> Found | None:
    """The newest checkpoint in RUN/checkpoints of which each file is undamaged on some host; None
    if no host has a checkpoint.

    Raises UserError when there are checkpoints, but none is whole, or when hosts have whole ones of
    one step that differ.
    """
    mine = {str(step): _text(folder, step) for step in numbered(folder)} if team.leads else {}
    sums = {step: crc32(text.encode()) for step, text in mine.items() if text}
    told = [json.loads(said) for said in exchange(world, json.dumps(sums))]
    lacking: list[str] = []
    for step in sorted({step for sums in told for step in sums}, key=int, reverse=True):
        whole: list[Found] = []
        for crc in dict.fromkeys(sums[step] for sums in told if step in sums):
            first = next(rank for rank, sums in enumerate(told) if sums.get(step) == crc)
            text = tell(world, mine.get(step, ""), first)
            found = held(folder, text, world, team)
            if lacks := [file for file in found.index.files if not found.holders[file.name]]:
                lacking.append(_lacks(step, lacks))
                say(f"the checkpoint of {lacking[-1]} on all hosts: it is passed over")
            else:
                whole.append(found)
        if len(whole) > 1:
            raise UserError(
                f"hosts have different checkpoints of step {step} in {folder}: remove what is not "
                "of this run, or give another folder=PATH"
            )
        if whole:
            return whole[0]
    if lacking:
        raise UserError(
            f"no checkpoint in {folder} is whole on these hosts: {several(lacking)}; start on "
            "hosts that have the rest, or give another folder=PATH"
        )
    return None


def held(folder: Path, text: str, world: Group, team: Team) -> Found:
    """What the hosts have undamaged of the checkpoint with the index `text`: every byte is read."""
    index = decode(text.encode(), f"an index in {folder}")
    mine = Checkpoint(step_folder(folder, index.step), index).sound() if team.leads else []
    told = [json.loads(said) for said in exchange(world, json.dumps(mine))]
    holders = {
        file.name: [rank for rank, names in enumerate(told) if file.name in names]
        for file in index.files
    }
    return Found(text, index, holders)


def _text(folder: Path, step: int) -> str:
    """The index of a step on this host; empty if it cannot be used."""
    path = step_folder(folder, step)
    try:
        open_checkpoint(path)
        return read_index(path).decode()
    except (UserError, OSError):
        return ""


def _lacks(step: str, files: Sequence[File]) -> str:
    """What is missing of a step, in words."""
    first, more = files[0], len(files) - 1
    who = f" of host {first.host}" if first.host else ""
    return f"step {step} lacks {first.name}{who}{f' and {more} more files' if more else ''}"


# -- sending -----------------------------------------------------------------------


def needed(index: Index, boxes: Iterable[tuple[str, Box]]) -> set[str]:
    """The files with a part of the boxes of weights, by name, that a rank holds."""
    mine: dict[str, list[Box]] = {}
    for name, box in boxes:
        mine.setdefault(name, []).append(box)

    def overlaps(item: Stored) -> bool:
        return any(intersect(item.piece.box, box) for box in mine.get(item.piece.name, ()))

    return {item.file for item in index.stored if overlaps(item)}


def transfers(found: Found, wanted: Wanted) -> Iterator[tuple[File, int, int]]:
    """Yields (file, rank that sends it, rank that takes it), in an order that all ranks know."""
    for file in found.index.files:
        holders = found.holders[file.name]
        for to in sorted(wanted):
            if file.name in wanted[to] and to not in holders:
                yield file, holders[0], to


def bring(folder: Path, found: Found, world: Group, team: Team, wanted: Wanted) -> int:
    """Sends files to the hosts that want and lack them; returns the bytes that all ranks sent.

    Raises UserError when a file cannot be read or written, or arrives damaged.
    """
    whole, draft = (make(folder, found.index.step) for make in (step_folder, draft_folder))
    into, sent = whole if whole.is_dir() else draft, 0
    if team.leads:
        into.mkdir(parents=True, exist_ok=True)
    for file, source, to in transfers(found, wanted):
        taking = replacing(into / file.name) if world.rank == to else nullcontext()
        with (whole / file.name).open("rb") if world.rank == source else taking as stream:
            _send(world, file, source, to, stream)
        sent += file.bytes
    mine = wanted.get(world.rank, ()) if team.leads else ()
    sound = Checkpoint(into, found.index).sound(mine)
    bad = [f"{into / name} of rank {world.rank}'s host" for name in mine if name not in sound]
    if told := [*filter(None, exchange(world, ", ".join(bad)))]:
        raise UserError(f"files of a checkpoint were damaged on their way: {', '.join(told)}")
    if team.leads:
        write_text(into / INDEX, found.text)  # one that was here may be damaged, or another's
        if into == draft:
            draft.rename(whole)
        sync_folder(folder)
    world.barrier()
    return sent


def _send(world: Group, file: File, source: int, to: int, stream: BinaryIO | None) -> None:
    """Sends a file in chunks. After each, all ranks learn whether it failed, and that the ranks of
    the others live: a large file takes longer than a rank may be silent.
    """
    block, why = torch.empty(min(CHUNK, file.bytes), dtype=torch.uint8), ""
    for at in range(0, file.bytes, CHUNK):
        part = block[: min(CHUNK, file.bytes - at)]
        try:
            if stream and world.rank == source:
                part.copy_(torch.frombuffer(bytearray(stream.read(len(part))), dtype=torch.uint8))
                world.send(part, to)
            elif stream:
                world.receive(part, source)
                stream.write(as_bytes(part))
        except OSError as error:
            why = error.strerror or str(error)
        (failed,) = world.sum_scalars([float(bool(why))])
        if failed:
            told = next(filter(None, exchange(world, why)))
            raise UserError(f"{file.name} cannot be brought to the host of rank {to}: {told}")
