"""Safetensors files, written and read as streams: only one tensor at a time is in memory.

The library's own writer needs all tensors of a file at once, which a checkpoint or an export of a
large model cannot provide. The format is easy to stream, because the header follows from names,
shapes and dtypes alone (https://github.com/huggingface/safetensors):

    | 8 bytes: n | n bytes of JSON, padded with spaces | data of a | data of b | ...
                   {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}

So the header is written first, then each tensor at its offset from the header. The CRC-32 of a
tensor is computed while it is written, when its bytes are still in the CPU cache. Tensors of wide
dtypes come first in the file, which aligns every element; the format allows no gaps for alignment.

No pickle: a file holds only numbers, and reading it cannot run code.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from howdah.base.atomic import replacing
from howdah.base.errors import UserError
from howdah.base.files import kind_of, parse_json
from howdah.checkpoint.fields import sizes, table, text
from howdah.comm.crc import crc32

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SPELLED = {dtype: name for name, dtype in DTYPES.items()}
BLOCK = 1 << 20  # bytes written or read, and checksummed, at a time
LONGEST_HEADER = 32 << 20  # bytes; the entries of a thousand layers in one file are 20 MB


@dataclass(frozen=True)
class Spec:
    """What the header needs to know of a tensor before its data is written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its data is the bytes [start, stop) of the file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    stop: int


@dataclass(frozen=True)
class Written:
    """What was written: the size of the file, the CRC-32 of its header and of each entry."""

    bytes: int
    header_crc32: int
    crc32: dict[str, int]


@dataclass(frozen=True)
class Header:
    """The header of a file: its entries by name, its metadata strings, and its own CRC-32."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    crc32: int


def write(
    path: Path,
    specs: Sequence[Spec],
    *,
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Written:
    """Write a safetensors file, completely or not at all, with one tensor in memory at a time.

    `tensors` yields CPU tensors in the order of `specs`, with the same shapes and dtypes.
    Raises ValueError for any other tensor, and OSError for example when the disk is full; then
    no file appears at `path`.
    """
    head, starts = _lay(specs, metadata or {})
    checksums = {}
    with replacing(path) as file:
        file.write(head)
        for spec, tensor in zip(specs, tensors, strict=True):
            if tuple(tensor.shape) != spec.shape or tensor.dtype != spec.dtype:
                raise ValueError(f"{spec} was announced, {tensor.shape} {tensor.dtype} came")
            file.seek(len(head) + starts[spec.name])
            checksums[spec.name] = _write_bytes(file, tensor)
    return Written(len(head) + sum(s.bytes for s in specs), crc32(head), checksums)


def _lay(specs: Sequence[Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header's bytes, and the offset of each tensor's data counted from the header's end."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    starts: dict[str, int] = {}
    end = 0
    for spec in sorted(specs, key=lambda s: -s.dtype.itemsize):
        if spec.name in table:
            raise ValueError(f"two entries are named {spec.name!r}")
        starts[spec.name], end = end, end + spec.bytes
        table[spec.name] = {
            "dtype": SPELLED[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [starts[spec.name], end],
        }
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied. Viewed as uint8, since NumPy has no
    bfloat16.
    """
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def _write_bytes(file: BinaryIO, tensor: Tensor) -> int:
    """Write the tensor's bytes at the file's position; returns their CRC-32."""
    data, checksum = as_bytes(tensor.contiguous()), 0
    for at in range(0, len(data), BLOCK):
        block = data[at : at + BLOCK]
        checksum = crc32(block, checksum)
        file.write(block)
    return checksum


# -- reading -------------------------------------------------------------------


def read_header(path: Path) -> Header:
    """Read the header of a safetensors file and check it against the file's size.

    Raises UserError when the file is missing, truncated, damaged or no safetensors file.
    """
    if (kind := kind_of(path)) != "file":
        raise UserError(
            f"{path} {'is a folder' if kind == 'folder' else kind}; restore it from a copy"
        )
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > min(size - 8, LONGEST_HEADER):
            raise UserError(
                f"{path} is truncated or not a safetensors file; restore it from a copy"
            )
        head = file.read(length)
    try:
        rows = table(parse_json(head, finite=False), "a header")
        metadata = table(rows.pop("__metadata__", {}), "__metadata__")
        entries = {name: _entry(table(row, "an entry"), 8 + length) for name, row in rows.items()}
    except (KeyError, ValueError) as error:
        raise UserError(
            f"the header of {path} is damaged ({error}); restore it from a copy"
        ) from None
    end = 8 + length
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.stop)):
        if entry.start != end:
            raise UserError(f"the entries of {path} leave a gap or overlap; restore it from a copy")
        end = entry.stop
    if end != size:
        raise UserError(f"{path} has {size} bytes instead of {end}; restore it from a copy")
    return Header(entries, metadata, crc32(first + head))


def _entry(row: dict[str, Any], data: int) -> Entry:
    shape, dtype = sizes(row, "shape"), DTYPES[text(row, "dtype")]
    start, stop = sizes(row, "data_offsets")
    if prod(shape) * dtype.itemsize != stop - start:
        raise ValueError(f"shape {list(shape)} does not fill {stop - start} bytes")
    return Entry(shape, dtype, data + start, data + stop)


def read_into(file: FileIO, entry: Entry, *, first: int, out: Tensor) -> None:
    """Fill `out` (1-D, contiguous, the entry's dtype) with elements of the entry from `first` on.

    Elements are counted row by row. Only the elements needed are read. Raises UserError when the
    file ends before them.
    """
    data, done = as_bytes(out), 0
    file.seek(entry.start + first * entry.dtype.itemsize)
    while done < len(data):
        count = file.readinto(data[done:])
        if not count:
            raise UserError(f"{file.name} ended while it was read; restore it from a copy")
        done += count


def checksum(file: FileIO, entry: Entry) -> int:
    """The CRC-32 of an entry's bytes on disk."""
    crc, left = 0, entry.stop - entry.start
    file.seek(entry.start)
    while left and (block := file.read(min(left, BLOCK))):
        crc, left = crc32(block, crc), left - len(block)
    return crc
