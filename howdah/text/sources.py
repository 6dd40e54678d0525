"""Sources of text: a named source in, its documents out, one at a time.

    Source("stdlib")               the running Python's standard library, a corpus on every machine
    Source("notes/")               a folder: every file in it whose name ends in one of KNOWN
    Source("book.txt")             one text file, cut into documents at blank lines
    Source("web.jsonl", "body")    one JSON object per line; the document is its field
    Source("en-de.jsonl", "en", "de")   pairs: what an encoder reads, and what its decoder writes
    Source("web.json", "body")     an array of JSON objects
    Source("web.csv", "body")      one document per row of a column; also .tsv and .parquet
    Source("train.bin")            tokens of nanoGPT, llm.c or Megatron-LM (`tokenised.py`)
    Source("synthetic:4MB")        made-up text (`synthetic.py`)
    Source("saved/")               a folder that the datasets library saved
    Source("hf:NAME")              a dataset by name, or hf:NAME:CONFIG; its train split

A document is a string; `building.py` turns documents into tokens. File names fix the order, so two
machines with the same files see the same documents in the same order. `readers.py` reads plain
text, `records.py` the formats with fields, `contents.py` hashes what identifies a source; this file
interprets source names and finds files.
"""

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from howdah.base.bounds import Bound, Positive, Tokens
from howdah.base.errors import UserError, named, several, shown
from howdah.base.files import kind_of, path_problem
from howdah.text import labelled, readers, records, synthetic, tokenised
from howdah.text.turns import Turns
from howdah.text.walking import walk

Undecodable = Literal["skip", "stop"]
T = TypeVar("T")

STDLIB = "stdlib"
NOT_STDLIB = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}

PROSE = (".txt", ".text", ".md", ".rst", ".tex", ".org", ".html")
CODE = (
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu"),
    *(".java", ".js", ".ts", ".go", ".rs"),
)
SETTINGS = (".sh", ".sql", ".toml", ".yaml", ".yml")
RECORDS: dict[str, Callable[..., Iterator[tokenised.Document]]] = {  # by ending, without .gz
    ".jsonl": records.lines,
    ".json": records.array,
    ".csv": records.table,
    ".tsv": records.table,
    ".parquet": records.parquet,
    tokenised.ENDING: tokenised.parts,
}
# Name endings of the files that are read from a folder. Those of MIXED are often settings or tables
# beside the text, so they are read from a folder that has no others.
KNOWN = (*PROSE, *CODE, *SETTINGS, ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")
MIXED = (".json", ".csv", ".csv.gz", ".tsv", ".tsv.gz")

MANY = 1000  # sources at most: proportions of the mix are thousandths (`order.py`)
SHARE = 0.03

# Longest documents in bytes. A single file as a source is usually a book: it is cut finely, or no
# document could be held out of it. In a folder each file is one document, and only very large files
# are cut, to limit memory.
ALONE = 16 << 10
SHELVED = 1 << 20


@dataclass(frozen=True)
class Text:
    """One place that text is read from.

    path    "stdlib", a file, a folder, or "hf:NAME"; see the top of this file
    field   the field (JSON) or column (CSV, Parquet, datasets) that holds the text
    target  the field (JSON) that holds what the decoder of an encoder-decoder writes, where `field`
            holds what its encoder reads; "": texts are no pairs
    label   the field that holds the label of each text; "": they have none
    """

    path: str = STDLIB
    field: str = "text"
    target: str = ""
    label: str = ""


@dataclass(frozen=True)
class Source(Text):
    """One source of text to train on.

    weight  number of training samples of this source, relative to the other sources
    """

    weight: Positive = 1.0


@dataclass(frozen=True)
class Data:
    """The text of a run.

    sources           the sources of the text
    sequence_length   tokens of one sample
    validation        text for evaluation, never trained on, in place of a share of the sources
    validation_share  the fraction of documents kept for evaluation, never trained on
    tokenizer         a tokenizer.json or a folder that holds one; None trains one on the sources
    end_token         the token of `tokenizer` between documents; None: the usual ones are tried
    mask_token        the token that hides others from an encoder; a tokenizer that is trained here
                      gets it
    undecodable       how to treat a document that is not UTF-8 or UTF-16: skip and count, or stop
    rows              packed: documents follow one another, and a sample is any part of them;
                      padded: each has samples of its own, and padding behind the last
    order             random: a permutation in each epoch; sequential: as the sources have them
    chat              rows of the sources are conversations: answers: what the assistant writes is
                      trained on; all: every token is; none: the sources are text
    """

    sources: tuple[Source, ...] = (Source(),)
    sequence_length: Tokens = 256
    validation: tuple[Text, ...] = ()
    validation_share: Annotated[float, Bound(0, 1, above=True, below=True)] = SHARE
    tokenizer: str | None = None
    end_token: str | None = None
    mask_token: str | None = None
    undecodable: Undecodable = "skip"
    rows: Literal["packed", "padded"] = "packed"
    order: Literal["random", "sequential"] = "random"
    chat: Literal["none", "answers", "all"] = "none"

    @property
    def chats(self) -> bool:
        """Whether the rows of the sources are conversations."""
        return self.chat != "none"

    @property
    def paired(self) -> bool:
        """Whether the texts are pairs of a source and a target."""
        return not self.chats and any(source.target for source in self.sources)

    @property
    def labelled(self) -> bool:
        """Whether each text has a label."""
        return any(source.label for source in self.sources)


def texts(data: Data) -> Iterator[tuple[str, Text]]:
    """Yields every text of a run with the key that names it, such as data.sources[0]."""
    for key, found in (("validation", data.validation), ("sources", data.sources)):
        for place, one in enumerate(found):
            yield f"data.{key}[{place}]", one


def check_sources(data: Data) -> Iterator[str]:
    """Yields a sentence for each problem with the names of sources and tokenizer.

    The disk is not read.
    """
    if not data.sources:
        yield "data.sources is empty; name at least one, such as 'stdlib'"
    if data.validation and data.validation_share != SHARE:
        yield (
            "data.validation names the text to hold out, and data.validation_share "
            f"({data.validation_share:g}) holds out a share of data.sources; leave one of them out"
        )
    if data.paired and data.rows != "packed":
        yield "data.rows is of texts, and a pair always has a row of its own; leave it out"
    if len(data.sources) > MANY:
        yield f"data.sources names {len(data.sources):,} places; at most {MANY:,} are mixed"
    for key, source in texts(data):
        if problem := _unusable(source.path):
            yield f"{key}.path {problem}"
        if tokenised.is_tokenised(source.path) and data.tokenizer is None:
            yield (
                f"{key}.path is {shown(source.path)}, tokens already; name the tokenizer that made "
                "them in data.tokenizer"
            )
        if bool(source.target) != data.paired and not data.chats:
            yield (
                f"{key} has {'a' if source.target else 'no'} target, and data.sources[0] "
                f"{'none' if source.target else 'has one'}; train on pairs or on texts, not on both"
            )
        if (
            data.paired
            and source.target
            and not source.path.removesuffix(".gz").endswith((".json", ".jsonl"))
        ):
            yield (
                f"{key}.target is a field of a JSON file, and {key}.path is {shown(source.path)}; "
                "name a .jsonl or a .json"
            )
        if source.path == STDLIB and source.field != Text.field:
            yield (
                f"{key}.field is {shown(source.field)}, and files of stdlib have no fields; name "
                f"the file that has it: {key.partition('[')[0]}=FILE"
            )
    if data.tokenizer is not None and (problem := path_problem(data.tokenizer)):
        yield f"data.tokenizer is {shown(data.tokenizer)}, and {problem}"
    if data.end_token is not None and data.tokenizer is None:
        yield "data.end_token names a token of data.tokenizer, which is not given; give it too"


def _unusable(path: str) -> str:
    """What is wrong with the name of a text; empty if nothing is."""
    if not path.strip():
        return "is empty; name a file, a folder or 'stdlib'"
    if problem := path_problem(path):
        return f"is {shown(path)}, and {problem}"
    if "://" in path:
        return (
            f"is {shown(path)}, an address; download it and name the file, or write hf:NAME for a "
            "dataset of the Hugging Face hub"
        )
    return ""


def of_each(data: Data, ask: Callable[[Text], T]) -> list[T]:
    """What `ask` returns for each text of a run. Raises UserError with the problems of all."""
    answers, problems = [], []
    for key, one in texts(data):
        try:
            answers.append(ask(one))
        except UserError as problem:
            problems.append(f"{key.partition('[')[0]}: {problem}")
    if problems:
        raise UserError(several(problems))
    return answers


def unreadable(data: Data, *, opened: bool = True) -> list[str]:
    """A sentence if texts are missing, or, where they are `opened`, if their first documents cannot
    be read.

    Names that `check_sources` refuses are left to it, and the hub is not asked.
    """

    def first(source: Text) -> None:
        skipped: list[str] = []
        if source.path.startswith("hf:") or _unusable(source.path):
            return
        if not opened or data.chats:  # whose rows `chats.py` looks at
            files(source)
        elif next(documents_of(source, data, skipped.append), None) is None:
            raise nothing_in(source, skipped)

    try:
        of_each(data, first)
    except UserError as problems:
        return [str(problems)]
    return []


def nothing_in(source: Text, skipped: Sequence[str]) -> UserError:
    """The error of a source without documents, of which some may have been skipped."""
    why = "" if not skipped else f" ({len(skipped)} skipped: {skipped[0]})"
    return UserError(
        f"{source.path} holds no document that is not empty or a copy{why}; add text, or remove it"
    )


def documents_of(
    source: Text, data: Data, skipped: Callable[[str], None]
) -> Iterator[tokenised.Document]:
    """The documents of a source of a run, as `documents` yields them."""
    take = Turns.of(source.field, source.target) if data.chats else None
    return documents(source, data.undecodable, skipped=skipped, take=take)


def documents(
    source: Text,
    undecodable: Undecodable = "skip",
    *,
    skipped: Callable[[str], None] = lambda sentence: None,
    take: records.Take[Any] | None = None,
) -> Iterator[tokenised.Document]:
    """Yields the documents of a source, in a fixed order, one at a time, without empty ones. `take`
    says what is taken of records; None: the fields that the source names.

    A document that is not UTF-8 is left out too: `skipped` is called with a sentence that names
    the file and the offset. With `undecodable="stop"` a UserError with that sentence is raised
    instead. Raises UserError, naming file and line, for any other problem.
    """

    def bad(sentence: str) -> None:
        if undecodable == "stop":
            raise UserError(f"{sentence}; repair it, or set data.undecodable to 'skip'")
        skipped(sentence)

    return (text for text in _read(source, bad, take) if text)


def _read(
    source: Text, bad: readers.Bad, take: records.Take[Any] | None
) -> Iterator[tokenised.Document]:
    if synthetic.is_synthetic(source.path):
        yield from synthetic.documents(source.path)
        return
    take = take or _take(source)
    if dataset := _dataset(source):
        yield from records.rows(dataset, source.path, take=take, bad=bad)
        return
    longest = ALONE if kind_of(Path(source.path)) == "file" else SHELVED
    found, left_out = _listed(source)
    for path in left_out:
        bad(f"{named(path)} {kind_of(path)}")
    for path in found:
        if read := RECORDS.get(Path(path.name.removesuffix(".gz")).suffix):
            yield from read(path, take=take, bad=bad)
        elif isinstance(take, Turns):
            raise UserError(
                f"{named(path)} is text, and data.chat reads rows; name the files of rows, such as "
                "a .jsonl"
            )
        elif isinstance(take, labelled.Labelled):
            raise UserError(
                f"{named(path)} is text, and a label is a field of a row; name the files of rows, "
                "such as a .jsonl"
            )
        else:
            yield from readers.text(path, longest=longest, bad=bad)


def _take(source: Text) -> records.Take[Any]:
    if source.label:
        return labelled.Labelled(source.field, source.label)
    return records.Fields(source.field, source.target)


# -- which files ---------------------------------------------------------------


def on_disk(source: Text) -> bool:
    """Whether a source is files of this machine that the user names."""
    made = source.path == STDLIB or synthetic.is_synthetic(source.path)
    return not made and not source.path.startswith("hf:")


def files(source: Text) -> list[Path]:
    """The files of a source on disk, sorted by name. Raises UserError when there are none."""
    return _listed(source)[0]


def beside_text(source: Text) -> list[Path]:
    """Files of records in a folder of text, which are not read with it: their field is not known,
    and a package.json is no text.
    """
    folder = Path(source.path)
    if source.path == STDLIB or kind_of(folder) != "folder" or _saved(folder):
        return []
    read, _ = _listed(source)
    every = {path for path, kind in walk(folder) if kind == "file" and path.name.endswith(MIXED)}
    return sorted(every - set(read))


def _listed(source: Text) -> tuple[list[Path], list[Path]]:
    """(files of the source, paths named like text files that cannot be read as one: a broken
    link, a pipe).
    """
    if source.path == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        every = walk(root, NOT_STDLIB)
        return [path for path, kind in every if kind == "file" and path.suffix == ".py"], []
    if synthetic.is_synthetic(source.path):
        return [], []
    path = Path(source.path)
    kind = kind_of(path)
    if kind == "file":
        return [path], []
    if kind != "folder":
        raise UserError(
            f"{named(path)} {kind}; name a file, a folder or 'stdlib', or hf:NAME for a dataset of "
            "the hub"
        )
    if path.samefile("/"):
        raise UserError(f"{path} is the whole disk; name a folder of text in it")
    if _saved(path):
        return [path for path, kind in walk(path) if kind == "file"], []
    mixed = [(path, kind) for path, kind in walk(path) if path.name.endswith((*KNOWN, *MIXED))]
    known = [(path, kind) for path, kind in mixed if path.name.endswith(KNOWN)] or mixed
    found = [path for path, kind in known if kind == "file"]
    if not found:
        raise UserError(
            f"the folder {path} holds no text; files are taken whose names end in "
            + " ".join((*KNOWN, *MIXED))
        )
    return found, [path for path, kind in known if kind not in ("file", "folder")]


# -- the datasets library ------------------------------------------------------


def _saved(path: Path) -> bool:
    """Whether the folder was written by the datasets library."""
    return any(kind_of(path / n) == "file" for n in ("dataset_dict.json", "dataset_info.json"))


def _dataset(source: Text) -> records.Dataset | None:
    """Opens the dataset that a source names; None when the source is plain files."""
    if source.path.startswith("hf:"):
        return records.dataset_by_name(source.path)
    if source.path != STDLIB and _saved(Path(source.path)):
        return records.dataset_on_disk(Path(source.path))
    return None
