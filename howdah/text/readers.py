"""One reader for each file format: a file in, its documents out, as a stream.

A reader holds at most one document (text), one line (JSON) or one batch of rows (Parquet), so a
corpus may be larger than memory. Each reader takes `bad`, which it calls with a sentence about each
document that is not UTF-8. If `bad` returns, the reader continues with the next document; `bad` may
also raise.

pyarrow and datasets are optional: they are imported where they are needed, and a missing package
is a UserError that names the extra to install.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from howdah.base.errors import UserError, brief, nearest, shown

Bad = Callable[[str], None]
Dataset = Any  # datasets.Dataset, which is optional and untyped

LONGEST_LINE = 64 << 20  # bytes; far more than any document, and still little memory

EXTRA = "pip install 'howdah[data]'"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns the error of an unreadable file or a damaged gzip into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}; repair or remove the file") from error


# -- text ----------------------------------------------------------------------


def text(path: Path, *, longest: int, bad: Bad) -> Iterator[str]:
    """Yields a text file as documents of at most `longest` bytes, cut at blank lines if possible.

    The documents joined together are the file, byte for byte.
    """
    with _reading(path), path.open("rb") as file:
        for offset, block in _cut(file, longest):
            try:
                yield block.decode()
            except UnicodeDecodeError as error:
                bad(f"{path}: the byte at offset {offset + error.start} is not UTF-8")


def _cut(file: BinaryIO, longest: int) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, block) of a file. One byte more than `longest` is read to see whether the
    file ends there.
    """
    offset, held = 0, b""
    while held := held + file.read(longest + 1 - len(held)):
        end = len(held) if len(held) <= longest else _break(held)
        yield offset, held[:end]
        offset, held = offset + end, held[end:]


def _break(held: bytes) -> int:
    """The index at which to cut `held`, before its last byte: after a blank line in the second
    half, else after a line, else between two characters.
    """
    last, half = len(held) - 1, len(held) // 2
    for mark in (b"\n\n", b"\n"):
        if (at := held.rfind(mark, half, last)) >= 0:
            return at + len(mark)
    for end in range(last, max(last - 4, 0), -1):
        if held[end] & 0xC0 != 0x80:  # not a continuation byte: a character starts here
            return end
    return last


# -- JSON lines ----------------------------------------------------------------


def lines(path: Path, *, field: str, bad: Bad) -> Iterator[str]:
    """Yields one document per line: the `field` of a JSON object. Blank lines are skipped.

    Raises UserError with file and line when a line is not a JSON object with such a string.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    with _reading(path), opened(path, "rb") as file:
        number = 0
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(raw) > LONGEST_LINE:
                raise UserError(
                    f"{path} line {number}: longer than {LONGEST_LINE >> 20} MiB; a line is one "
                    "document, so cut it"
                )
            if not raw.strip():
                continue
            try:
                line = raw.decode()
            except UnicodeDecodeError as error:
                bad(f"{path} line {number}: the byte at offset {error.start} is not UTF-8")
                continue
            document = _field(line, f"{path} line {number}", field=field)
            if _whole(document, f"{path} line {number}", bad):
                yield document


def _field(line: str, where: str, *, field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{where}: not JSON ({error}); every line must be an object with the field "
            f"{shown(field)}"
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON that is nested too deeply; flatten the line") from error
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: not an object; every line must be one, with the field {shown(field)}"
        )
    if field not in record:
        raise UserError(f"{where}: no field {shown(field)}{nearest(field, record)}")
    return _string(record[field], where, field=field)


def _string(value: object, where: str, *, field: str) -> str:
    if not isinstance(value, str):
        kind = "empty" if value is None else f"of type {type(value).__name__}"
        raise UserError(f"{where}: the field {shown(field)} is {kind}; it must be a string")
    return value


def _whole(document: str, where: str, bad: Bad) -> bool:
    """Whether `document` can be encoded as UTF-8; if not, calls `bad`. A JSON string may contain
    half of a surrogate pair, which UTF-8 cannot encode.
    """
    try:
        document.encode()
    except UnicodeEncodeError as error:
        bad(f"{where}: the character at {error.start} is half of a surrogate pair, not UTF-8")
        return False
    return True


# -- Parquet -------------------------------------------------------------------


def parquet(path: Path, *, field: str, bad: Bad) -> Iterator[str]:
    """Yields one document per row: the column `field`. Raises UserError with file and row."""
    library = _optional("pyarrow.parquet", f"the Parquet file {path}")
    try:
        with _reading(path), library.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise UserError(f"{path}: no column {shown(field)}{nearest(field, names)}")
            batches = file.iter_batches(columns=[field])
            cells = (cell for batch in batches for cell in batch.column(0))
            for number, cell in enumerate(cells, 1):
                yield from _cell(cell, f"{path} row {number}", field=field, bad=bad)
    except _optional("pyarrow", str(path)).ArrowException as error:
        raise UserError(f"cannot read {path} as Parquet: {brief(error)}") from error


def _cell(cell: Any, where: str, *, field: str, bad: Bad) -> Iterator[str]:
    try:
        yield _string(cell.as_py(), where, field=field)
    except UnicodeDecodeError as error:
        bad(f"{where}: the byte at offset {error.start} is not UTF-8")


# -- the datasets library ------------------------------------------------------


def dataset_by_name(name: str) -> Dataset:
    """Loads the train split of `hf:NAME` or `hf:NAME:CONFIG`, from the datasets cache or the hub.

    Raises UserError when the datasets library cannot load it.
    """
    library = _optional("datasets", name)
    repository, _, config = name.removeprefix("hf:").partition(":")
    try:
        return library.load_dataset(repository, config or None, split="train")
    except Exception as error:  # the library raises many kinds, all about the name or the network
        raise UserError(f"cannot load the dataset {shown(name)}: {brief(error)}") from error


def dataset_on_disk(path: Path) -> Dataset:
    """Opens a dataset that was saved with `save_to_disk`; of several splits, the one named train.

    Raises UserError when the folder cannot be opened, or has no such split.
    """
    library = _optional("datasets", str(path))
    try:
        dataset = library.load_from_disk(str(path))
    except Exception as error:  # the library raises many kinds, all about the folder
        raise UserError(f"cannot open the dataset in {path}: {brief(error)}") from error
    if not isinstance(dataset, dict):
        return dataset
    if "train" not in dataset:
        raise UserError(
            f"{path}: no split 'train'{nearest('train', dataset)}; name a split's folder"
        )
    return dataset["train"]


def dataset_fingerprint(dataset: Dataset, field: str) -> str:
    """The datasets library's own fingerprint of the contents, with the name of the field."""
    return f"{dataset._fingerprint} {field}"


def rows(dataset: Dataset, name: str, *, field: str, bad: Bad) -> Iterator[str]:
    """Yields one document per row of an open dataset. Raises UserError with the row."""
    if field not in dataset.column_names:
        raise UserError(f"{name}: no column {shown(field)}{nearest(field, dataset.column_names)}")
    for number, row in enumerate(dataset.select_columns([field]), 1):
        document = _string(row[field], f"{name} row {number}", field=field)
        if _whole(document, f"{name} row {number}", bad):
            yield document


# -- optional packages ---------------------------------------------------------


def _optional(module: str, reads: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{reads} needs the package {package}; {EXTRA}") from error
