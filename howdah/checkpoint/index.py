"""The index of a checkpoint: facts about its run, and which elements are in which file.

It is readable JSON, and it does not depend on the layout that wrote it: each row of `pieces`
describes a piece (box and element range, as in `plan/boxes.py`) and the file and entry that contain
its elements.

    {
      "format": 1,
      "run": "a1b2c3", "step": 100, "layout": "dp2 x4", "samples": 6400,
      "meta":    {... any JSON values of the caller ...},
      "tensors": [{"kind": "weight", "name": "norm.weight", "shape": [64], "dtype": "float32"}],
      "pieces":  [{"kind": "weight", "name": "norm.weight", "corner": [0], "size": [64],
                   "start": 0, "stop": 32, "file": "rank-00000.safetensors",
                   "entry": "weight/norm.weight@0", "crc32": 1234567}, ...],
      "files":   [{"name": "rank-00000.safetensors", "bytes": 256, "header_crc32": 7654321}, ...],
      "crc32":   the checksum of all of the above
    }

Each rank first writes such an index of its own pieces; `merge` joins them into the checkpoint's
index. This file does not import torch: an index can be read on machines without it.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from howdah.base.errors import UserError, shown
from howdah.base.files import parse_json, path_problem
from howdah.checkpoint.fields import Row, rows, sizes, table, text, whole
from howdah.plan.boxes import Box, Piece

FORMAT = 1
MOST_STEPS = 10**9
MOST_SAMPLES = 10**15  # far below the 63 bits in which the order counts samples
CRC32 = (1 << 32) - 1
# Dtypes of saved tensors, by their torch names.
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"),
    "bool",
)


@dataclass(frozen=True)
class About:
    """Facts about the run that a checkpoint belongs to.

    run      the run's id
    layout   the layout that wrote it, as text; the layout that reads it may differ
    samples  number of samples of the data order that have been trained on
    meta     any JSON values: model sizes, losses, the optimizer's step count
    """

    run: str
    layout: str
    samples: int
    meta: dict[str, Any]


@dataclass(frozen=True)
class Stored:
    """A piece of one kind ("weight", "exp_avg", ...), and the file and entry with its elements."""

    kind: str
    piece: Piece
    dtype: str
    file: str
    entry: str
    crc32: int


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its name, its size in bytes, the CRC-32 of its header; and its host,
    where hosts do not share the folder.
    """

    name: str
    bytes: int
    header_crc32: int
    host: str = ""


@dataclass(frozen=True)
class Index:
    """The index of a checkpoint: its step, its run, all pieces and all files."""

    step: int
    about: About
    stored: tuple[Stored, ...]
    files: tuple[File, ...]


def entry_name(kind: str, piece: Piece) -> str:
    """The name of a piece in its file: kind/name@start, or kind/name[corner]@start when the
    corner is not 0.
    """
    corner = f"[{','.join(map(str, piece.box.corner))}]" if any(piece.box.corner) else ""
    return f"{kind}/{piece.name}{corner}@{piece.start}"


def merge(parts: Sequence[Index]) -> Index:
    """Joins the indices of all ranks, in rank order, into one; `meta` is that of rank 0.

    Raises UserError when the ranks saved different states, when they disagree on a tensor's shape
    or dtype, or when they hold too few elements of a tensor together.
    """
    first = parts[0]
    for rank, part in enumerate(parts):
        if _state(part) != _state(first):
            raise UserError(
                f"rank {rank} saved (step, run, layout, samples) {_state(part)} but rank 0 saved "
                f"{_state(first)}; all ranks must save the same state"
            )
    stored = tuple(item for part in parts for item in part.stored)
    merged = Index(first.step, first.about, stored, tuple(f for part in parts for f in part.files))
    for problem in inconsistencies(merged):
        raise UserError(problem)
    return merged


def _state(index: Index) -> tuple[int, str, str, int]:
    return index.step, index.about.run, index.about.layout, index.about.samples


def inconsistencies(index: Index) -> list[str]:
    """A sentence for each tensor whose pieces disagree on shape or dtype, or are too few.

    Only the numbers of elements are added up, which is cheap for any model: pieces may overlap, so
    elements can still be missing. Reading a piece checks each of its elements.
    """
    groups: dict[tuple[str, str], list[Stored]] = {}
    for item in index.stored:
        groups.setdefault((item.kind, item.piece.name), []).append(item)
    problems = []
    for (kind, name), items in groups.items():
        shapes = {(item.piece.shape, item.dtype) for item in items}
        if len(shapes) > 1:
            problems.append(f"{kind} of {name} has pieces of {len(shapes)} different tensors")
            continue
        held, total = sum(p.elements for p in {i.piece for i in items}), prod(items[0].piece.shape)
        if held < total:
            problems.append(f"only {held} of {total} elements of {kind} of {name} were saved")
    return problems


# -- to JSON and back ----------------------------------------------------------


def encode(index: Index) -> str:
    """The index as JSON text with one line per tensor, piece and file."""
    about = index.about
    tensors = {(i.kind, i.piece.name): (i.piece.shape, i.dtype) for i in index.stored}
    fields = {
        "format": FORMAT,
        "run": about.run,
        "step": index.step,
        "layout": about.layout,
        "samples": about.samples,
        "meta": about.meta,
        "tensors": [
            {"kind": kind, "name": name, "shape": shape, "dtype": dtype}
            for (kind, name), (shape, dtype) in tensors.items()
        ],
        "pieces": [_row(item) for item in index.stored],
        "files": [{k: v for k, v in vars(file).items() if v != ""} for file in index.files],
    }
    fields = json.loads(json.dumps(fields))  # as it is read: tuples are lists, keys strings
    fields["crc32"] = _checksum(fields)
    lines = (f"  {json.dumps(name)}: {_pretty(value)}" for name, value in fields.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _row(item: Stored) -> dict[str, Any]:
    piece = item.piece
    return {
        "kind": item.kind,
        "name": piece.name,
        "corner": piece.box.corner,
        "size": piece.box.size,
        "start": piece.start,
        "stop": piece.stop,
        "file": item.file,
        "entry": item.entry,
        "crc32": item.crc32,
    }


def _pretty(value: object) -> str:
    if isinstance(value, list) and value:
        return "[\n    " + ",\n    ".join(json.dumps(row) for row in value) + "\n  ]"
    return json.dumps(value, indent=2).replace("\n", "\n  ")


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


def decode(content: bytes, where: str) -> Index:
    """Parses the index in `content`. Raises UserError, naming `where`, when it is damaged."""
    damaged = f"{where} is damaged; use another checkpoint or restore it from a copy"
    try:
        fields = table(parse_json(content, finite=False), "an index")
        if fields["format"] != FORMAT:
            raise UserError(
                f"{where} has format {shown(fields['format'])} and this howdah reads format "
                f"{FORMAT}; read it with the howdah that wrote it"
            )
        if fields.pop("crc32") != _checksum(fields):
            raise UserError(damaged)
        return _decode(fields)
    except (KeyError, ValueError, RecursionError):
        raise UserError(damaged) from None


def _decode(fields: Row) -> Index:
    tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    for row in rows(fields, "tensors"):
        dtype = text(row, "dtype")
        _require(dtype in DTYPES, dtype)
        tensors[text(row, "kind"), text(row, "name")] = sizes(row, "shape"), dtype
    _require(len(tensors) == len(fields["tensors"]), "a tensor is listed twice")
    stored = tuple(_stored(row, tensors) for row in rows(fields, "pieces"))
    files = tuple(_file(row) for row in rows(fields, "files"))
    names = {file.name for file in files}
    _require(len(names) == len(files), "a file is listed twice")
    entries = {(item.file, item.entry) for item in stored}
    _require(len(entries) == len(stored), "two pieces stand in one place")
    _require({item.file for item in stored} <= names, "a piece stands in a file that is not listed")
    samples, meta = whole(fields, "samples", MOST_SAMPLES), table(fields["meta"], "meta")
    about = About(text(fields, "run"), text(fields, "layout"), samples, meta)
    return Index(whole(fields, "step", MOST_STEPS), about, stored, files)


def _file(row: Row) -> File:
    name = text(row, "name")
    # a checkpoint never reads outside its own folder
    _require("/" not in name and name not in ("", ".", "..") and not path_problem(name), name)
    host = text(row, "host") if "host" in row else ""
    return File(name, whole(row, "bytes"), whole(row, "header_crc32", CRC32), host)


def _stored(row: Row, tensors: dict[tuple[str, str], tuple[tuple[int, ...], str]]) -> Stored:
    kind, name = text(row, "kind"), text(row, "name")
    shape, dtype = tensors[kind, name]
    box = Box(sizes(row, "corner"), sizes(row, "size"))
    _require(len(box.corner) == len(box.size) == len(shape), "a box of other dims")
    ends = (a + n for a, n in zip(box.corner, box.size, strict=True))
    _require(all(end <= n for end, n in zip(ends, shape, strict=True)), "a box beyond its tensor")
    start, stop = whole(row, "start"), whole(row, "stop")
    _require(start <= stop <= box.elements, "a piece beyond its box")
    piece = Piece(name, shape, box, start, stop)
    where = text(row, "file"), text(row, "entry")
    return Stored(kind, piece, dtype, *where, whole(row, "crc32", CRC32))


def _require(sound: bool, what: str) -> None:
    if not sound:
        raise ValueError(what)
