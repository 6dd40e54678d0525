"""Files of records: a document is made of the fields of each, whatever the format.

    {"body": "one", "n": 1}       JSON lines          .jsonl
    [{"body": "one"}, ...]        a JSON array        .json
    body,n                        CSV, TSV            .csv .tsv
    a column of a table           Parquet, and the datasets library

A reader yields one document after the other, and holds one line, one record or one batch of rows,
so a corpus may be larger than memory. What becomes of a record is decided by a `Take`, such as
`Fields`: one field, or a pair. A reader names the file and the place of what it cannot read.
pyarrow and datasets are optional: they are imported where they are needed.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TextIO, TypeVar

from howdah.base.errors import UserError, brief, nearest, shown
from howdah.text.readers import Bad, opened, reading

Dataset = Any  # datasets.Dataset, which is optional and untyped

LONGEST_LINE = 64 << 20  # bytes; far more than any document, and still little memory
PART = 1 << 20  # characters of a JSON array that are read at a time
NESTED = "JSON that is nested too deeply; make it flat"
PAIR = "\x1e"  # stands between source and target of a pair: ASCII's record separator
GAP = re.compile(r"[\s,]*")  # between the records of an array
D_co = TypeVar("D_co", covariant=True)  # what documents are made: texts, mostly
Record = Mapping[str, Any]

# -- what becomes of a record --------------------------------------------------


class Take(Protocol[D_co]):
    """Makes documents of a record.

    columns  fields that every record must have
    others   fields that are read, too, of a table that has them
    says     the fields, in words: each record must have them
    """

    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def others(self) -> tuple[str, ...]: ...
    @property
    def says(self) -> str: ...
    def __call__(self, record: Record, where: str, bad: Bad) -> Iterator[D_co]:
        """Yields the documents of the record at `where`. Raises UserError for a wrong one, and
        calls `bad` for one that is no text.
        """
        ...


@dataclass(frozen=True)
class Fields:
    """Takes one field, or with a `target` a pair: both fields, and `PAIR` between them."""

    field: str
    target: str = ""
    others: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return (self.field, self.target) if self.target else (self.field,)

    @property
    def says(self) -> str:
        return f"the field {shown(self.field)}"

    def __call__(self, record: Record, where: str, bad: Bad) -> Iterator[str]:
        """Yields the document, or the pair unless a part of that is empty or holds `PAIR`."""
        both = [text for one in self.columns for text in text_field(record, where, one, bad)]
        if len(both) < len(self.columns):
            return
        if self.target and (not all(both) or any(PAIR in text for text in both)):
            bad(f"{where}: {self.field} or {self.target} is empty, or holds the character {PAIR!r}")
        else:
            yield PAIR.join(both)


def text_field(record: Record, where: str, field: str, bad: Bad) -> Iterator[str]:
    """Yields the text of a field, unless it is not UTF-8. Raises UserError unless it is a text."""
    if field not in record:
        raise UserError(f"{where}: no field {shown(field)}{nearest(field, record)}")
    value = record[field]
    if not isinstance(value, str):
        kind = "empty" if value is None else f"of type {type(value).__name__}"
        raise UserError(f"{where}: the field {shown(field)} is {kind}; it must be a string")
    yield from whole(value, where, bad)


def whole(document: str, where: str, bad: Bad) -> Iterator[str]:
    """Yields `document` if it can be encoded as UTF-8, and calls `bad` if not: a JSON string may
    contain half of a surrogate pair, and a byte that is not UTF-8 is decoded to such a half.
    """
    try:
        document.encode()
    except UnicodeEncodeError as error:
        bad(f"{where}: the character at {error.start} is not UTF-8, or half of a surrogate pair")
    else:
        yield document


# -- JSON ----------------------------------------------------------------------


def lines(path: Path, *, take: Take[D_co], bad: Bad) -> Iterator[D_co]:
    """Yields the documents of a JSON object per line. Blank lines are skipped.

    Raises UserError with file and line when a line is not a JSON object with what is taken.
    """
    with opened(path, bad) as file:
        number = 0
        while raw := file.readline(LONGEST_LINE + 1):
            number += 1
            where = f"{path} line {number}"
            if len(raw) > LONGEST_LINE:
                raise UserError(
                    f"{where}: longer than {LONGEST_LINE >> 20} MiB; a line is one document, so "
                    "cut it"
                )
            if not raw.strip():
                continue
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                bad(f"{where}: the byte at offset {error.start} is not UTF-8")
                continue
            yield from _taken(_parsed(line, where, take), where, take, bad)


def array(path: Path, *, take: Take[D_co], bad: Bad) -> Iterator[D_co]:
    """Yields the documents of each object of a JSON array. Many a .json has an object per line
    instead: a file that does not begin with a bracket is read as JSON lines.
    """
    with opened(path, bad) as file:
        text = TextIOWrapper(file, "utf-8-sig", errors="surrogateescape")
        while (first := text.read(1)).isspace():
            pass
        if first == "[":
            for number, item in enumerate(_items(text, path), 1):
                yield from _taken(item, f"{path} record {number}", take, bad)
    if first not in ("[", ""):
        yield from lines(path, take=take, bad=bad)


def _items(text: TextIO, path: Path) -> Iterator[object]:
    """Yields the items of a JSON array, whose first bracket has been read."""
    decoder, held, at, number = json.JSONDecoder(), "", 0, 1
    while True:
        gap = GAP.match(held, at)
        at = gap.end() if gap else at
        if held.startswith("]", at):
            return
        try:
            item, at = decoder.raw_decode(held, at)
        except ValueError as error:
            held, at = held[at:], 0
            more = text.read(max(PART, len(held))) if len(held) <= LONGEST_LINE else ""
            if not more:
                why = getattr(error, "msg", error)
                raise UserError(
                    f"{path} record {number}: not JSON ({why}); an array of objects is closed by ]"
                ) from error
            held += more
        except RecursionError as error:
            raise UserError(f"{path} record {number}: {NESTED}") from error
        else:
            yield item
            number += 1


def _parsed(line: str, where: str, take: Take[D_co]) -> object:
    try:
        return json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{where}: not JSON ({error}); every line must be an object with {take.says}"
        ) from error
    except RecursionError as error:
        raise UserError(f"{where}: {NESTED}") from error


def _taken(record: object, where: str, take: Take[D_co], bad: Bad) -> Iterator[D_co]:
    """Yields the documents of one JSON value."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: not an object; every one must be, with {take.says}")
    yield from take(record, where, bad)


# -- CSV -----------------------------------------------------------------------


def table(path: Path, *, take: Take[D_co], bad: Bad) -> Iterator[D_co]:
    """Yields the documents of each row of a CSV or TSV file, whose first row names the columns.

    Raises UserError with file and line when a row has not as many cells as the first.
    """
    csv.field_size_limit(LONGEST_LINE)  # of the whole process; it is 128 KiB
    with opened(path, bad) as file:
        text = TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        pieces = iter(partial(text.readline, LONGEST_LINE), "")
        first = next(pieces, "")
        semicolons = first.count(";") > first.count(",")  # where a comma is the decimal point
        tabs = path.name.removesuffix(".gz").endswith(".tsv")
        delimiter = "\t" if tabs else ";" if semicolons else ","
        rows = csv.reader(chain([first], pieces), delimiter=delimiter, strict=True)
        try:
            if names := next(rows):
                columns_of(take, names, str(path))
            for row in filter(None, rows):
                where = f"{path} line {rows.line_num}"
                if len(row) != len(names):
                    raise UserError(
                        f"{where}: the row has {len(row)} cells and the first row {len(names)}; "
                        f"put quotes around a text with {delimiter!r} or a line's end"
                    )
                yield from take(dict(zip(names, row, strict=True)), where, bad)
        except csv.Error as error:
            raise UserError(
                f"{path} line {rows.line_num}: {error}; inside quotes, write a quote twice"
            ) from error


def columns_of(take: Take[D_co], names: Sequence[str], path: str) -> list[str]:
    """The columns of a table that are taken. Raises UserError unless all that must be are there."""
    for field in take.columns:
        if field not in names:
            raise UserError(f"{path}: no column {shown(field)}{nearest(field, names)}")
    return [name for name in names if name in (*take.columns, *take.others)]


# -- Parquet -------------------------------------------------------------------


def parquet(path: Path, *, take: Take[D_co], bad: Bad) -> Iterator[D_co]:
    """Yields the documents of each row. Raises UserError with file and row."""
    library = _optional("pyarrow.parquet", f"the Parquet file {path}")
    try:
        with reading(path), library.ParquetFile(path) as file:
            names = columns_of(take, file.schema_arrow.names, str(path))
            batches = file.iter_batches(columns=names)
            rows = (row for batch in batches for row in zip(*map(batch.column, names), strict=True))
            for number, row in enumerate(rows, 1):
                where = f"{path} row {number}"
                if record := _cells(names, row, where, bad):
                    yield from take(record, where, bad)
    except _optional("pyarrow", str(path)).ArrowException as error:
        raise UserError(
            f"cannot read {path} as Parquet: {brief(error)}; repair or remove the file"
        ) from error


def _cells(names: Sequence[str], row: Sequence[Any], where: str, bad: Bad) -> Record | None:
    """A row as a record; None where a cell is not UTF-8."""
    try:
        return {name: cell.as_py() for name, cell in zip(names, row, strict=True)}
    except UnicodeDecodeError as error:
        bad(f"{where}: the byte at offset {error.start} is not UTF-8")
        return None


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
        raise UserError(
            f"cannot load the dataset {shown(name)}: {brief(error)}; check its name and the "
            "network, and for a gated one accept its terms on its page, then log in: hf auth login"
        ) from error


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


def dataset_fingerprint(dataset: Dataset, fields: str) -> str:
    """The datasets library's own fingerprint of the contents, with the names of the fields."""
    return f"{dataset._fingerprint} {fields}"


def rows(dataset: Dataset, name: str, *, take: Take[D_co], bad: Bad) -> Iterator[D_co]:
    """Yields the documents of each row of an open dataset. Raises UserError with the row."""
    names = columns_of(take, dataset.column_names, name)
    for number, row in enumerate(dataset.select_columns(names), 1):
        yield from take(row, f"{name} row {number}", bad)


# -- optional packages ---------------------------------------------------------


def _optional(module: str, reads: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{reads} needs the package {package}; pip install {package}") from error
