"""Sources of text: a named source in, its documents out, one at a time.

    Source("stdlib")               the running Python's standard library, a corpus on every machine
    Source("notes/")               a folder: every file in it whose name ends in one of KNOWN
    Source("book.txt")             one text file, cut into documents at blank lines
    Source("web.jsonl", "body")    one JSON object per line; the document is its field
    Source("web.parquet")          one document per row of a column
    Source("saved/")               a folder that the datasets library saved
    Source("hf:NAME")              a dataset by name, or hf:NAME:CONFIG; its train split

A document is a string; `building.py` turns documents into tokens. File names fix the order, so two
machines with the same files see the same documents in the same order. `readers.py` reads each
format; this file interprets source names, finds files, and hashes what identifies their contents.
"""

import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from howdah.base.bounds import Bound, Positive, Tokens
from howdah.base.errors import UserError, named, shown
from howdah.base.files import kind_of, path_problem
from howdah.text import readers

Undecodable = Literal["skip", "stop"]

STDLIB = "stdlib"
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html")
CODE = (
    ".py",
    ".pyi",
    ".c",
    ".h",
    ".cc",
    ".cpp",
    ".hpp",
    ".cu",
    ".java",
    ".js",
    ".ts",
    ".go",
    ".rs",
)
SETTINGS = (".sh", ".sql", ".toml", ".yaml", ".yml")
LINES = (".jsonl", ".jsonl.gz", ".json.gz")
PARQUET = ".parquet"
KNOWN = (*PROSE, *CODE, *SETTINGS, *LINES, PARQUET)  # name endings of files read from a folder

MANY = 1000  # sources at most: proportions of the mix are thousandths (`order.py`)
MANY_FILES = 4_000_000  # more files below a source: a whole disk rather than a folder of text
NONE: frozenset[str] = frozenset()

# Opening a corpus should be instant. Small sources are identified by their bytes, which copying
# and `touch` do not change; hashing this many bytes takes about 0.1 s. Larger sources are
# identified by file names, sizes and modification times.
SMALL = 64 << 20

# Longest documents in bytes. A single file as a source is usually a book: it is cut finely, or no
# document could be held out of it. In a folder each file is one document, and only very large files
# are cut, to limit memory.
ALONE = 16 << 10
SHELVED = 1 << 20


@dataclass(frozen=True)
class Source:
    """One source of text.

    path    "stdlib", a file, a folder, or "hf:NAME"; see the top of this file
    field   the field (JSON lines) or column (Parquet, datasets) that holds the text
    weight  number of training samples of this source, relative to the other sources
    """

    path: str = STDLIB
    field: str = "text"
    weight: Positive = 1.0


@dataclass(frozen=True)
class Data:
    """The text of a run.

    sources           the sources of the text
    sequence_length   tokens of one sample
    validation_share  the fraction of documents kept for evaluation, never trained on
    tokenizer         a tokenizer.json or a folder that holds one; None trains one on the sources
    undecodable       how to treat a document that is not UTF-8: skip and count it, or stop
    """

    sources: tuple[Source, ...] = (Source(),)
    sequence_length: Tokens = 256
    validation_share: Annotated[float, Bound(0, 1, above=True, below=True)] = 0.03
    tokenizer: str | None = None
    undecodable: Undecodable = "skip"


def check_sources(data: Data) -> Iterator[str]:
    """Yields a sentence for each problem with the names of sources and tokenizer.

    The disk is not read.
    """
    if not data.sources:
        yield "data.sources is empty; name at least one, such as 'stdlib'"
    if len(data.sources) > MANY:
        yield f"data.sources names {len(data.sources):,} places; at most {MANY:,} are mixed"
    for place, source in enumerate(data.sources):
        if not source.path.strip():
            yield f"data.sources[{place}].path is empty; name a file, a folder or 'stdlib'"
        elif problem := path_problem(source.path):
            yield f"data.sources[{place}].path is {shown(source.path)}, and {problem}"
    if data.tokenizer is not None and (problem := path_problem(data.tokenizer)):
        yield f"data.tokenizer is {shown(data.tokenizer)}, and {problem}"


def documents(
    source: Source,
    undecodable: Undecodable = "skip",
    *,
    skipped: Callable[[str], None] = lambda sentence: None,
) -> Iterator[str]:
    """Yields the documents of a source, in a fixed order, one at a time, without empty ones.

    A document that is not UTF-8 is left out too: `skipped` is called with a sentence that names
    the file and the offset. With `undecodable="stop"` a UserError with that sentence is raised
    instead. Raises UserError, naming file and line, for any other problem.
    """

    def bad(sentence: str) -> None:
        if undecodable == "stop":
            raise UserError(f"{sentence}; repair it, or set data.undecodable to 'skip'")
        skipped(sentence)

    return (text for text in _read(source, bad) if text)


def _read(source: Source, bad: readers.Bad) -> Iterator[str]:
    if dataset := _dataset(source):
        yield from readers.rows(dataset, source.path, field=source.field, bad=bad)
        return
    longest = ALONE if kind_of(Path(source.path)) == "file" else SHELVED
    found, left_out = _listed(source)
    for path in left_out:
        bad(f"{named(path)} {kind_of(path)}")
    for path in found:
        if path.name.endswith(LINES):
            yield from readers.lines(path, field=source.field, bad=bad)
        elif path.suffix == PARQUET:
            yield from readers.parquet(path, field=source.field, bad=bad)
        else:
            yield from readers.text(path, longest=longest, bad=bad)


# -- which files ---------------------------------------------------------------


def files(source: Source) -> list[Path]:
    """The files of a source on disk, sorted by name. Raises UserError when there are none."""
    return _listed(source)[0]


def _listed(source: Source) -> tuple[list[Path], list[Path]]:
    """(files of the source, paths named like text files that cannot be read as one: a broken
    link, a pipe).
    """
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        every = _walk(root, NOT_STDLIB)
        return [path for path, kind in every if kind == "file" and path.suffix == ".py"], []
    path = Path(source.path)
    kind = kind_of(path)
    if kind == "file":
        return [path], []
    if kind != "folder":
        raise UserError(f"data.sources: {named(path)} {kind}; name a file, a folder or 'stdlib'")
    if path.resolve() == Path("/"):
        raise UserError(f"data.sources: {path} is the whole disk; name a folder of text in it")
    if _saved(path):
        return [path for path, kind in _walk(path) if kind == "file"], []
    known = [(path, kind) for path, kind in _walk(path) if path.name.endswith(KNOWN)]
    found = [path for path, kind in known if kind == "file"]
    if not found:
        raise UserError(
            f"data.sources: the folder {path} holds no text; files are taken whose names end in "
            + " ".join(KNOWN)
        )
    return found, [path for path, kind in known if kind not in ("file", "folder")]


def _walk(root: Path, without: set[str] | frozenset[str] = NONE) -> Iterator[tuple[Path, str]]:
    """Yields (path, kind) of everything below `root` that is not a folder, in sorted order.

    Hidden names and folders named in `without` are left out; links to folders are not followed.
    Raises UserError when there are more than MANY_FILES entries.
    """
    seen = 0
    for folder, folders, names in os.walk(root, onerror=_unreadable):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in without)
        seen += len(folders) + len(names)
        if seen > MANY_FILES:
            raise UserError(
                f"data.sources: {root} holds more than {MANY_FILES:,} files; name a folder of text "
                "in it"
            )
        for name in sorted(names):
            if not name.startswith("."):
                path = Path(folder, name)
                yield path, kind_of(path)


def _unreadable(error: OSError) -> None:
    """Raises UserError: a folder that was silently left out would change the corpus."""
    raise UserError(
        f"data.sources: cannot read {error.filename}: {error.strerror}; make it readable, or name "
        "another folder"
    ) from error


# -- the datasets library ------------------------------------------------------


def _saved(path: Path) -> bool:
    """Whether the folder was written by the datasets library."""
    return any(kind_of(path / n) == "file" for n in ("dataset_dict.json", "dataset_info.json"))


def _dataset(source: Source) -> readers.Dataset | None:
    """Opens the dataset that a source names; None when the source is plain files."""
    if source.path.startswith("hf:"):
        return readers.dataset_by_name(source.path)
    if source.path != STDLIB and _saved(Path(source.path)):
        return readers.dataset_on_disk(Path(source.path))
    return None


# -- what identifies the contents ----------------------------------------------


def contents(source: Source) -> str:
    """A hash that changes when the documents of a source may have changed.

    It depends on paths relative to their common folder only, so a corpus may be moved.
    """
    if source.path.startswith("hf:"):
        return readers.dataset_fingerprint(readers.dataset_by_name(source.path), source.field)
    paths = files(source)
    root = Path(os.path.commonpath([path.parent for path in paths]))
    try:
        states = [path.stat() for path in paths]
        small = source.path == STDLIB or sum(state.st_size for state in states) <= SMALL
        total = blake2b(
            f"{source.field}\0{kind_of(Path(source.path)) == 'file'}".encode(), digest_size=16
        )
        for path, state in zip(paths, states, strict=True):
            name = os.fsencode(path.relative_to(root))  # a file name need not be UTF-8
            total.update(b"\0%b\0%d\0" % (name, state.st_size))
            total.update(_digest(path) if small else str(state.st_mtime_ns).encode())
    except OSError as error:
        _unreadable(error)
    return total.hexdigest()


def _digest(path: Path) -> bytes:
    return blake2b(path.read_bytes(), digest_size=16).digest()
