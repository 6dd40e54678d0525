"""Checks that a token cache still holds what was written into it; reads every byte, once a run.

A power cut leaves zeros, a copy is truncated, a bit flips. None of these would stop a training run:
it would silently train on other tokens. So the index contains a CRC-32 of each file and of itself.
Token ids must also be below the tokenizer's size, and each start must point at the end token in
front of a document: data that was wrong when it was written has a correct checksum.

Files are read in blocks, at the speed of the disk. They are not mapped into memory: after a disk
error a read raises an exception, but access to a mapping kills the process.
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from howdah.base.files import kind_of, parse_json, path_problem, read_file

INDEX = "corpus.json"
BLOCK = 4 << 20  # bytes; a multiple of the size of any token
LARGEST_INDEX = 64 << 20
DTYPES = ("uint16", "uint32")
COUNTS = ("ids", "starts", "ids_crc32", "starts_crc32")  # recorded for each stream
POSITIVE = ("entries", "held_out_bytes")
MARKS = "trained_crc32"  # of streams that say which tokens are trained on
FACTS = (
    *("entries", "end", "documents", "duplicates", "skipped"),
    *("held_out_bytes", "held_out_gzip", "held_out_xz"),
)


def sealed(fields: dict[str, Any]) -> str:
    """The index as JSON text, with its own checksum added. `fields` must be plain JSON values."""
    return json.dumps({**fields, "crc32": _checksum(fields)}, indent=1)


def read_index(folder: Path) -> dict[str, Any]:
    """Reads the fields that `sealed` wrote.

    Raises ValueError, KeyError or TypeError when the index is damaged, OSError when it cannot be
    read.
    """
    _require_file(folder / INDEX)
    fields = parse_json(read_file(folder / INDEX, LARGEST_INDEX))
    if not isinstance(fields, dict) or fields.pop("crc32", None) != _checksum(fields):
        raise ValueError(f"{INDEX} is not what was written")
    for name, count in _table(fields, "tokens").items():
        _require_name(name)
        if _table(fields["tokens"], name)["dtype"] not in DTYPES:
            raise ValueError(f"{INDEX} has tokens of an unknown type")
        _require_whole(count, (*COUNTS, MARKS) if MARKS in count else COUNTS)
    for name in _table(fields, "files"):
        _require_name(name)
    _require_whole(fields["files"], fields["files"])
    facts = _table(fields, "facts")
    _require_whole(facts, FACTS)
    wrong = [name for name in POSITIVE if facts[name] == 0]
    if wrong or not isinstance(facts["fingerprint"], str) or len(facts) != len(FACTS) + 1:
        raise ValueError(f"{INDEX} has facts that cannot be")
    return fields


def _table(owner: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(owner[name], dict):
        raise ValueError(f"{INDEX}: {name} is no table")
    table: dict[str, Any] = owner[name]
    return table


def _require_whole(table: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        if type(table[name]) is not int or not 0 <= table[name] < 1 << 63:
            raise ValueError(f"{INDEX}: {name} is no whole number")


def _require_name(name: str) -> None:
    """Raises ValueError unless `name` is a plain file name, inside the cache's own folder."""
    if path_problem(name) or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{INDEX} names a file elsewhere")


def _require_file(path: Path) -> None:
    """Raises ValueError when `path` exists and is not a regular file: reading a pipe would wait
    forever, and a device has no end.
    """
    if (kind := kind_of(path)) not in ("file", "does not exist"):
        raise ValueError(f"{path.name} {kind if kind != 'folder' else 'is a folder'}")


def _checksum(fields: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def damage(folder: Path) -> str | None:
    """What is wrong with the cache in `folder`, or None. Raises OSError when it is unreadable."""
    try:
        index = read_index(folder)
        facts = index["facts"]
        for file, crc32 in index["files"].items():
            _require_crc32(folder / file, sum_of(folder / file), crc32)
        for name, count in index["tokens"].items():
            _check_starts(folder / f"{name}.starts", count)
            _check_ids(folder / name, count, entries=facts["entries"], end=facts["end"])
            _check_marks(folder / f"{name}.trained", count)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return str(error)
    return None


def sum_of(path: Path) -> int:
    """The CRC-32 of a file."""
    crc32 = 0
    for block in _blocks(path):
        crc32 = zlib.crc32(block, crc32)
    return crc32


def require_size(path: Path, size: int) -> None:
    """Raises ValueError when the file is not `size` bytes long."""
    if path.stat().st_size != size:
        raise ValueError(f"{path.name} should hold {size} bytes")


def _require_crc32(path: Path, found: int, written: int) -> None:
    if found != written:
        raise ValueError(f"{path.name} is not what was written")


def _blocks(path: Path) -> Iterator[memoryview]:
    """Yields the bytes of a file in blocks. Each block overwrites the one before it."""
    _require_file(path)
    buffer = memoryview(bytearray(BLOCK))
    with path.open("rb") as file:
        while size := file.readinto(buffer):
            yield buffer[:size]


def _check_starts(path: Path, count: dict[str, Any]) -> None:
    """Raises ValueError unless the starts begin at 0 and ascend, with the recorded checksum."""
    require_size(path, count["starts"] * 8)
    crc32, last, sound = 0, -1, True
    for block in _blocks(path):
        crc32 = zlib.crc32(block, crc32)
        starts = np.frombuffer(block, np.int64)
        first = starts[0] == 0 if last < 0 else starts[0] > last
        sound = sound and bool(first) and bool((starts[1:] > starts[:-1]).all())
        last = int(starts[-1])
    _require_crc32(path, crc32, count["starts_crc32"])
    if not sound:
        raise ValueError(f"{path.name} has documents out of order")


def _check_ids(stream: Path, count: dict[str, Any], *, entries: int, end: int) -> None:
    """Raises ValueError unless all ids are below `entries`, the id at each start and the last id
    are `end`, and the checksum is the recorded one.
    """
    path, dtype = stream.with_name(f"{stream.name}.ids"), np.dtype(count["dtype"])
    require_size(path, count["ids"] * dtype.itemsize)
    starts = _mapped(stream.with_name(f"{stream.name}.starts"))
    crc32 = at = placed = 0
    largest, ends, last = 0, True, -1
    for block in _blocks(path):
        crc32 = zlib.crc32(block, crc32)
        ids = np.frombuffer(block, dtype)
        here = starts[placed : placed + int(starts[placed:].searchsorted(at + len(ids)))]
        ends = ends and bool((ids[here - at] == end).all())
        largest, last = max(largest, int(ids.max())), int(ids[-1])
        at, placed = at + len(ids), placed + len(here)
    _require_crc32(path, crc32, count["ids_crc32"])
    if largest >= entries:
        raise ValueError(f"{path.name} has token {largest}, and the tokenizer has {entries}")
    if not ends or placed != len(starts) or last != end or (placed and starts[-1] == at - 1):
        raise ValueError(f"{path.name} has documents that do not stand between end tokens")


def _check_marks(path: Path, count: dict[str, Any]) -> None:
    """Raises ValueError unless there is a mark for each token, with the recorded checksum."""
    if MARKS in count:
        require_size(path, count["ids"])
        _require_crc32(path, sum_of(path), count[MARKS])


def _mapped(path: Path) -> npt.NDArray[np.int64]:
    """Maps a file of starts into memory. It was read without an error just before. An empty file
    cannot be mapped.
    """
    if not path.stat().st_size:
        return np.empty(0, np.int64)
    return np.asarray(np.memmap(path, dtype=np.int64, mode="r"))
