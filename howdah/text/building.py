"""Building the token cache: text in, token files out. `tokens.py` describes the files.

    1. survey    read all documents once: hash each, drop exact copies
    2. split     hold out the validation text, or documents that are chosen by hash
    3. tokenizer train it on the documents that are not held out, or copy the given tokenizer
    4. encode    read again; write each document to its source's stream or to the held-out one
    5. index     counts, checksums and facts, written last

The sources are read up to three times rather than kept in memory: they may be larger than memory,
and encoding costs many times more than reading.

The split is by the hash of each document, not by seed or position: two runs with different seeds
are evaluated on the same text, and a document stays in its set when other documents are added or
removed. Copies are dropped before the split, or the same text would be in both sets. The texts of
data.validation are read first, so that their copies in the training text are dropped.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from howdah.base.errors import UserError, several
from howdah.text import tokenizer as tokenizers
from howdah.text.chats import chat_of
from howdah.text.checking import INDEX, sealed, sum_of
from howdah.text.encoding import Scales, Stream, encode
from howdah.text.interruptible import interruptible
from howdah.text.labelled import Labels
from howdah.text.labels import check_labels, held_out_alone
from howdah.text.records import PAIR
from howdah.text.sources import Data, beside_text, documents_of, nothing_in, texts, unreadable
from howdah.text.template import CHAT, manner_of
from howdah.text.tokenised import Document, Known, TokenDocument, is_tokenised
from howdah.text.tokenised import split as split_tokens
from howdah.text.turns import Conversation

Say = Callable[[str], None]

FORMAT = "howdah tokens 3"
HELD_OUT = "held_out"

LEARN = 64 << 20  # bytes of text that a tokenizer is trained on; more hardly changes its entries


def source_name(index: int) -> str:
    """The name of a source's files. A path may change, and may not be usable as a file name."""
    return f"source{index}"


def build(  # noqa: PLR0913
    data: Data,
    folder: Path,
    *,
    vocab: int,
    say: Say,
    progress: Callable[[float], None],
    extra: Sequence[str] = (),
    labels: Labels | None = None,
) -> None:
    """Writes a token cache into the empty `folder`; the arguments are those of `tokens.prepare`.

    Raises UserError when the sources or the tokenizer cannot be used.
    """
    if data.tokenizer is None:
        special = tokenizers.special_tokens(data.mask_token, extra)
        tokenizers.require_room(
            vocab, special
        )  # checked here and in `_bring`, before all text is read
    else:
        _bring(data, folder, vocab)
    if problems := unreadable(data):
        raise UserError(several(problems))
    if labels:
        check_labels(data, labels.names)
    say("reading " + ", ".join(source.path for source in (*data.sources, *data.validation)))
    survey = _survey(data)  # 1
    held = survey.validation or split(survey.digests, data.validation_share, survey.duplicates)  # 2
    _tell(survey, held, say)
    for source in (*data.sources, *data.validation):
        if others := beside_text(source):
            say(
                f"{len(others)} files of records in {source.path} are not read, such as "
                f"{others[0].name}: name each as a source, with its field"
            )
    if data.tokenizer is None:  # 3
        say(f"training a tokenizer of {vocab} entries")
        lesson = _lesson(data, held)
        mask = data.mask_token
        learned = interruptible(lambda: tokenizers.train(lesson, vocab, mask, extra=extra))
        if labels:
            tokenizers.frame(learned, labels.template)
        (folder / tokenizers.FILE).write_text(learned.to_str(), "utf-8")
    tokenizer = tokenizers.load(folder / tokenizers.FILE)
    facts = _facts(tokenizer, folder, survey, data.end_token)
    say("encoding")
    meter = _Meter(survey.bytes, progress)
    scales = Scales()
    streams = _streams(data, folder, entries=facts["entries"], end=facts["end"])
    given = _addressed(data, held, scales, tokenizer)
    numbers = labels.names if labels else ()
    if labels:
        tokenizers.require_numbers(len(numbers), facts["entries"])
        given = _with_trained_labels(given, data)
    counts = encode(  # 4
        given, streams, tokenizer, done=meter.add, paired=data.paired, labels=numbers
    )
    if sum(count["starts"] for count in counts.values()) != facts["documents"]:
        raise UserError("data.sources changed while they were read; start again when they rest")
    files = {tokenizers.FILE: sum_of(folder / tokenizers.FILE)}
    if data.chats:
        (folder / CHAT).write_text(manner_of(str(data.tokenizer)).text(), "utf-8")
        files[CHAT] = sum_of(folder / CHAT)
    index = {"tokens": counts, "files": files, "facts": {**facts, **scales.sizes()}}
    (folder / INDEX).write_text(sealed(index))  # 5
    _settle(folder)
    progress(1.0)


# -- 1. survey -----------------------------------------------------------------


@dataclass(frozen=True)
class _Survey:
    validation: frozenset[bytes]  # the digests of the documents of data.validation
    digests: list[list[bytes]]  # of each source's own documents
    bytes: int
    duplicates: int
    shared: int  # duplicates in the sources that are copies of validation text
    skipped: list[str]  # a sentence for each skipped document

    @property
    def documents(self) -> int:
        return len(self.validation) + sum(map(len, self.digests))


def _unique(
    data: Data, skipped: Callable[[str], None] = lambda sentence: None
) -> Iterator[tuple[int, bytes, Document | None]]:
    """Yields (source, hash, text) of every document; text is None for a copy of an earlier one. The
    numbers of the validation texts are negative.
    """
    seen, known = set(), _known(data)
    for index, (_, one) in enumerate(texts(data), -len(data.validation)):
        for text in _split(documents_of(one, data, skipped), known):
            digest = blake2b(text.encode(), digest_size=16).digest()
            yield index, digest, None if digest in seen else text
            seen.add(digest)


def _known(data: Data) -> Known | None:
    """What is known of the tokenizer of sources that are tokens already; None if there are none."""
    if data.tokenizer is None or not any(is_tokenised(one.path) for _, one in texts(data)):
        return None
    tokenizer = tokenizers.load(tokenizers.find(data.tokenizer))
    end = tokenizers.end_of(tokenizer, data.tokenizer, data.end_token)
    return Known(end, tokenizers.entries(tokenizer))


def _split(found: Iterator[Document], known: Known | None) -> Iterator[Document]:
    for one in found:
        if isinstance(one, TokenDocument) and known is not None:
            yield from split_tokens(one, known)
        else:
            yield one


def _survey(data: Data) -> _Survey:
    found: dict[int, list[bytes]] = {n: [] for n in range(-len(data.validation), len(data.sources))}
    held: set[bytes] = set()
    skipped: list[str] = []
    size = duplicates = shared = 0
    for index, digest, text in _unique(data, skipped.append):
        if text is None:
            duplicates += 1
            shared += index >= 0 and digest in held
            continue
        found[index].append(digest)
        size += len(text.encode())
        if index < 0:
            held.add(digest)
    for (key, one), own in zip(texts(data), found.values(), strict=True):
        if not own:
            held_too = "; its documents are in data.validation too" if shared else ""
            raise UserError(f"{key.partition('[')[0]}: {nothing_in(one, skipped)}{held_too}")
    digests = [own for index, own in found.items() if index >= 0]
    return _Survey(frozenset(held), digests, size, duplicates, shared, skipped)


def _tell(survey: _Survey, held: frozenset[bytes], say: Say) -> None:
    say(
        f"{survey.documents} documents, {survey.bytes / 1e6:.1f} MB; {len(held)} of them held out; "
        f"{survey.duplicates} copies left out"
    )
    if survey.shared:
        say(
            f"{survey.shared} documents of data.sources are in data.validation too, and are not "
            "trained on"
        )
    if survey.skipped:
        say(f"skipped {len(survey.skipped)} that cannot be read, the first: {survey.skipped[0]}")


# -- 2. split ------------------------------------------------------------------


def split(digests: Sequence[Sequence[bytes]], share: float, copies: int = 0) -> frozenset[bytes]:
    """The hashes of the documents that are held out: those in the lowest `share` of hash values.

    digests  the document hashes of each source
    share    the fraction to hold out
    copies   for the error message: how many copies of these documents were left out

    Each source keeps at least one document to train on, and at least one document is held out.
    Raises UserError when there are too few documents for that.
    """
    held: set[bytes] = set()
    for source in digests:
        small = {digest for digest in source if _number(digest) < share * 2.0**64}
        held |= small - {max(source)} if len(small) == len(source) else small
    if not held:
        several = [min(source) for source in digests if len(source) > 1]
        if not several:
            left_out = f" once copies are left out ({copies} here)" if copies else ""
            raise UserError(
                f"data.sources: each source has a single document{left_out}; one must be held out: "
                "give a source at least 2 documents, or name held-out text with data.validation"
            )
        held = {min(several)}
    return frozenset(held)


def _number(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")  # big-endian: numbers sort as bytes do


# -- 3. tokenizer --------------------------------------------------------------


def _lesson(data: Data, held: frozenset[bytes]) -> Iterator[str]:
    """Yields the text that a tokenizer is trained on: the start of each source, without held-out
    documents.
    """
    left = [LEARN // len(data.sources)] * len(data.sources)
    for index, digest, text in _unique(data):
        if index >= 0 and isinstance(text, str) and digest not in held and left[index] > 0:
            left[index] -= len(text)
            yield text.partition(PAIR)[0] if data.labelled else text


def _bring(data: Data, folder: Path, vocab: int) -> None:
    """Copies the given tokenizer into the cache, so that the cache does not need the original.

    Raises UserError when it is too large for `vocab` or has no end token.
    """
    assert data.tokenizer is not None
    tokenizers.usable(data.tokenizer, vocab, data.end_token)
    shutil.copyfile(tokenizers.find(data.tokenizer), folder / tokenizers.FILE)


def _facts(
    tokenizer: Tokenizer, folder: Path, survey: _Survey, end_token: str | None
) -> dict[str, Any]:
    path = folder / tokenizers.FILE
    return {
        "fingerprint": tokenizers.fingerprint(path),
        "entries": tokenizers.entries(tokenizer),
        "end": tokenizers.end_of(tokenizer, str(path), end_token),
        "documents": survey.documents,
        "duplicates": survey.duplicates,
        "skipped": len(survey.skipped),
    }


# -- 4. encode -----------------------------------------------------------------


def _streams(data: Data, folder: Path, *, entries: int, end: int) -> dict[str, Stream]:
    dtype = np.dtype(np.uint16 if entries <= 1 << 16 else np.uint32)
    names = [*map(source_name, range(len(data.sources))), HELD_OUT]
    marks = data.chats
    return {name: Stream(folder, name, dtype=dtype, end=end, marks=marks) for name in names}


def _addressed(
    data: Data, held: frozenset[bytes], scales: Scales, tokenizer: Tokenizer
) -> Iterator[tuple[str, Document]]:
    """Yields (stream name, text) of each document; held-out text is also added to `scales`, of a
    conversation that which is trained on.
    """
    chat = chat_of(data) if data.chats else None
    for index, digest, found in _unique(data):
        if (text := found) is None:
            continue
        if isinstance(text, Conversation) and chat:
            ids, trained = chat(text)
            text = TokenDocument(np.array(ids, np.int64), text.where, trained=trained)
        if digest in held:
            scales.add(
                tokenizer.decode(told(text)) if isinstance(text, TokenDocument) else str(text)
            )
        yield HELD_OUT if digest in held else source_name(index), text


def _with_trained_labels(
    given: Iterator[tuple[str, Document]], data: Data
) -> Iterator[tuple[str, Document]]:
    """Yields what it is given. Raises UserError at the end if held-out rows have a label that no
    row has that is trained on.
    """
    trained, held = set[str](), set[str]()
    for name, text in given:
        label = str(text).partition(PAIR)[2]
        (held if name == HELD_OUT else trained).add(label)
        yield name, text
    for label in sorted(held - trained):
        raise held_out_alone(data, label)


def told(text: TokenDocument) -> list[int]:
    """The tokens of a document by which a loss is measured."""
    found: list[int] = (text.ids if text.trained is None else text.ids[text.trained]).tolist()
    return found


class _Meter:
    """Reports the fraction of the text that is encoded, below 1: `build` reports 1 at its end."""

    def __init__(self, total: int, progress: Callable[[float], None]) -> None:
        self.total, self.done, self.progress = total, 0, progress

    def add(self, size: int) -> None:
        """Adds `size` bytes to those done and reports the fraction."""
        self.done += size
        self.progress(min(self.done / self.total, 0.999))


# -- 5. index ------------------------------------------------------------------


def _settle(folder: Path) -> None:
    """Flushes the files and the folder to disk (fsync), before the folder is renamed."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
