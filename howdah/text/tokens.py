"""The token cache: text is tokenised once; later runs map the token files into memory.

    cache/<key>/corpus.json       counts, checksums, and the size of the held-out text in bytes
                tokenizer.json
                source0.ids       <end> t t t <end> t t <end> ... t <end>    uint16 or uint32
                source0.starts    ^           ^       ^                      int64
                held_out.ids, held_out.starts

Every document has an <end> in front, and one more <end> closes the stream. Sample i of s tokens
reads tokens [i·s, i·s + s) and predicts tokens [i·s + 1, i·s + s + 1): each token, ends included,
is predicted exactly once. The <end> in front of a document is the first token of that document.

The key is a hash of everything the tokens depend on: the sources' contents, the tokenizer, the
split. Many processes may ask for a cache at once: one builds it, in a folder of another name, while
the others wait for a lock. The last action is a rename, so a folder named by a key is always
complete. A builder that is killed leaves its unfinished folder behind; the next builder removes it.

With `check`, a damaged cache is built again rather than reported: it is only a copy of text that is
still on disk. A cache that the check finds damaged is never trained on.
"""

import fcntl
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from howdah.base.errors import UserError
from howdah.text import tokenizer as tokenizers
from howdah.text.building import FORMAT, HELD_OUT, Say, build, source_name
from howdah.text.chats import settled
from howdah.text.checking import MARKS, damage, read_index, require_size
from howdah.text.contents import contents
from howdah.text.labelled import Frame, Labels, frame_of
from howdah.text.order import Numbers, shares
from howdah.text.packing import Packed, pack
from howdah.text.sources import Data, of_each
from howdah.text.template import manner_of


@dataclass(frozen=True, eq=False)
class Tokens:
    """A stream of tokens on disk, mapped into memory.

    ids     [n] uint16 or uint32: <end> document <end> document ... <end>
    starts  [documents] int64: index in `ids` of the <end> in front of each document
    paired  whether each document is a sample: a source, <end>, and its target
    padded  whether each document has samples of its own
    frame   of texts with a label, each of which is a sample; None: they have none
    trained [n] uint8 of conversations, which are packed whole: whether a token is trained on
    """

    ids: npt.NDArray[Any]
    starts: npt.NDArray[np.int64]
    paired: bool = False
    padded: bool = False
    frame: Frame | None = None
    trained: npt.NDArray[np.uint8] | None = None

    @property
    def single(self) -> bool:
        """Whether each document is one sample."""
        return self.paired or self.frame is not None

    def samples(self, sequence: int) -> int:
        """The number of full samples; the remainder of the stream is not trained on."""
        if self.trained is not None:
            return len(packed(self, sequence).rows) - 1
        if self.padded:
            return int(_rows_before(self, sequence)[-1])
        return len(self.starts) if self.single else (len(self.ids) - 1) // sequence

    def windows(self, sequence: int) -> int:
        """The number of samples when the last one is padded, so that every token is used."""
        if self.trained is not None:
            return self.samples(sequence)
        return len(self.starts) if self.single else -(-(len(self.ids) - 1) // sequence)

    @property
    def predicted(self) -> int:
        """The number of tokens that are predicted in one pass."""
        return len(self.ids) - 1 if self.trained is None else int(self.trained.sum(dtype=np.int64))

    def places(self, index: Numbers, sequence: int) -> tuple[Numbers, Numbers]:
        """Where samples of padded documents begin, and where the <end> behind their document is."""
        before = _rows_before(self, sequence)
        document = np.searchsorted(before, index, side="right") - 1
        stops = np.append(self.starts[1:], len(self.ids) - 1)
        return self.starts[document] + (index - before[document]) * sequence, stops[document]

    def document(self, index: int) -> npt.NDArray[np.int64]:
        """A document, from the <end> in front of it."""
        stop = self.starts[index + 1] if index + 1 < len(self.starts) else len(self.ids) - 1
        return self.ids[self.starts[index] : stop].astype(np.int64)

    def pair(self, index: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The tokens of a source and of its target."""
        both = self.document(index)
        middle = 1 + int(np.flatnonzero(both[1:] == both[0])[0])  # <end>, which no text has
        return both[1:middle], both[middle + 1 :]


@lru_cache(64)  # asked for each batch
def packed(tokens: Tokens, sequence: int) -> Packed:
    """The rows of a stream of conversations."""
    assert tokens.trained is not None
    return pack(tokens.trained, tokens.starts, room=sequence, alone=tokens.padded)


@lru_cache(64)  # asked for each batch
def _rows_before(tokens: Tokens, sequence: int) -> Numbers:
    """The samples [documents + 1] in front of each padded document, and of all."""
    sizes = np.diff(np.append(tokens.starts, len(tokens.ids) - 1))
    return np.concatenate([[0], np.cumsum(-(-sizes // sequence))])


@dataclass(frozen=True, eq=False)
class Corpus:
    """The tokens of a run and the facts about them.

    folder          the cache folder; its name is the key
    sources         the training tokens of each source
    weights         the relative number of samples of each source, as in the recipe
    names           the sources' paths, for reports
    held_out        documents of all sources that are never trained on
    tokenizer_path  the tokenizer that made the tokens
    fingerprint     hash of the tokenizer file
    entries         the tokenizer's largest id plus one
    end             id of the end token between documents
    documents       number of documents, held-out ones included, without duplicates
    duplicates, skipped   number of documents left out: exact copies; not UTF-8
    held_out_bytes, held_out_gzip, held_out_xz   size of the held-out text in bytes:
                    uncompressed, after gzip -9, after xz -9
    checksums       CRC-32 of the tokens of each source, and of the held-out ones
    mask            id of the mask token; None: the run has none
    start           id of the token with which a decoder behind an encoder begins
    sentinels       ids of the tokens that stand for spans of a text
    order           how the samples of a source follow one another
    """

    folder: Path
    sources: tuple[Tokens, ...] = field(repr=False)
    weights: tuple[float, ...]
    names: tuple[str, ...]
    held_out: Tokens = field(repr=False)
    fingerprint: str
    entries: int
    end: int
    documents: int
    duplicates: int
    skipped: int
    held_out_bytes: int
    held_out_gzip: int
    held_out_xz: int
    checksums: tuple[int, ...] = ()
    mask: int | None = None
    start: int | None = None
    sentinels: tuple[int, ...] = ()
    order: Literal["random", "sequential"] = "random"

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / tokenizers.FILE

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded at first use: only text generation needs it, not training."""
        return tokenizers.load(self.tokenizer_path)


def prepare(  # noqa: PLR0913  what to read, how, and whom to tell, by keyword
    data: Data,
    *,
    vocab: int,
    cache: Path,
    say: Say,
    progress: Callable[[float], None] | None = None,
    check: bool = False,
    extra: Sequence[str] = (),
    labels: Labels | None = None,
) -> Corpus:
    """Returns the tokens of `data`, from the cache or tokenised now. Many processes may call it.

    vocab     the model's vocabulary size: a tokenizer trained here has at most as many entries
    cache     the folder of all token caches
    say       is called with a sentence about each stage of the work
    progress  is called with the fraction of the text that is encoded, up to 1
    extra     tokens that a tokenizer trained here has, and that no text has (`extra_tokens`)
    labels    of texts that have them; None: they have none
    check     read every byte of the cache, and build a damaged cache again; one process of a
              machine does so at the start of a run

    Raises UserError about sources, tokenizer or cache; then nothing of the attempt is kept.
    """
    shares([source.weight for source in data.sources])  # check weights before hours of tokenising
    data = settled(data)
    folder = cache / _key(data, vocab, extra, labels)
    try:
        if fault := _fault(folder, check):
            if folder.is_dir():
                say(f"the token cache {folder} is damaged ({fault}); building it again")
            cache.mkdir(parents=True, exist_ok=True)
            with _alone(folder.with_suffix(".lock"), say):
                if _fault(folder, check):  # another process may have built it by now
                    _put_away(folder)
                    more: Any = {"progress": progress, "extra": extra, "labels": labels}
                    _build(data, folder, vocab=vocab, say=say, **more)
        corpus = _open(data, folder, source=tokenizers.SENTINEL.format(0) in extra)
    except OSError as error:
        raise UserError(
            f"the token cache {cache} cannot be used ({error.strerror or error}); "
            "make room there, or name another folder as HOWDAH_CACHE"
        ) from error
    tokenizers.require_fits(corpus.entries, vocab, data.tokenizer or str(corpus.tokenizer_path))
    return corpus


def _key(data: Data, vocab: int, extra: Sequence[str], labels: Labels | None) -> str:
    """The cache key: a hash of all that the tokens depend on (not weights, not sequence)."""
    if data.tokenizer is None:
        tokenizer = f"trained {vocab}{' padded' if extra else ''}"
        tokenizer += f" with {len(extra)}" if len(extra) > 1 else ""
    else:
        tokenizer = tokenizers.fingerprint(tokenizers.find(data.tokenizer))
    words = [
        FORMAT,
        tokenizer,
        data.validation_share,
        data.undecodable,
        data.end_token,
        len(data.validation),
        *of_each(data, contents),
    ]
    if data.mask_token is not None:
        words.append(f"mask {data.mask_token}")
    if data.chats:
        words.append(f"chat {data.chat} {manner_of(str(data.tokenizer)).fingerprint}")
    if labels is not None:
        words.append(str(labels))
    return blake2b("\x1f".join(map(str, words)).encode(), digest_size=12).hexdigest()


def _fault(folder: Path, check: bool) -> str | None:
    """Why the cache must be built, or None."""
    if not folder.is_dir():
        return "it is missing"
    return damage(folder) if check else None


def _put_away(folder: Path) -> None:
    """Removes a damaged cache. It loses its name by one rename, because other processes may look
    for it at any moment. The caller holds the lock.
    """
    away = folder.with_suffix(".damaged")
    shutil.rmtree(away, ignore_errors=True)
    if folder.exists():
        folder.rename(away)
        shutil.rmtree(away, ignore_errors=True)


@contextmanager
def _alone(path: Path, say: Say) -> Iterator[None]:
    """Holds an exclusive file lock; the system releases it even when the process is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is tokenising the same text")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(  # noqa: PLR0913
    data: Data,
    folder: Path,
    *,
    vocab: int,
    say: Say,
    progress: Callable[[float], None] | None,
    extra: Sequence[str],
    labels: Labels | None,
) -> None:
    """Builds the cache in a folder next to `folder`, renamed at the end. The caller holds the
    lock.
    """
    unfinished = folder.with_suffix(".unfinished")
    if unfinished.exists():
        say(f"removing {unfinished}, which a process that was stopped left behind")
        shutil.rmtree(unfinished)
    unfinished.mkdir()
    try:
        tell = progress or (lambda share: None)
        more: Any = {"extra": extra, "labels": labels}
        build(data, unfinished, vocab=vocab, say=say, progress=tell, **more)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


# -- opening -------------------------------------------------------------------


def _open(data: Data, folder: Path, *, source: bool) -> Corpus:
    """The corpus of a cache; where there is a `source`, with the tokens that its decoder needs."""
    try:
        index = read_index(folder)
        counts = index["tokens"]
        names = [*map(source_name, range(len(data.sources))), HELD_OUT]
        parts = [_map(folder, name, counts[name], data.paired) for name in names]
        facts, mask, start = index["facts"], None, None
        if data.labelled:
            frame = frame_of(tokenizers.load(folder / tokenizers.FILE), facts["end"])
            parts = [replace(one, frame=frame) for one in parts]
        sentinels: tuple[int, ...] = ()
        if source:
            loaded, name = tokenizers.load(folder / tokenizers.FILE), data.tokenizer or str(folder)
            start = tokenizers.start_of(loaded, name)
            sentinels = () if data.paired else tokenizers.sentinels_of(loaded, name)
        if data.mask_token is not None:
            path = folder / tokenizers.FILE
            mask = tokenizers.mask_of(
                tokenizers.load(path), data.tokenizer or str(path), data.mask_token
            )
        return Corpus(
            folder=folder,
            sources=tuple(replace(one, padded=data.rows == "padded") for one in parts[:-1]),
            weights=tuple(source.weight for source in data.sources),
            names=tuple(source.path for source in data.sources),
            held_out=replace(parts[-1], padded=data.chats and data.rows == "padded"),
            checksums=tuple(map(_checksum, (counts[name] for name in names))),
            mask=mask,
            start=start,
            sentinels=sentinels,
            order=data.order,
            **facts,
        )
    except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
        raise UserError(f"the token cache {folder} is damaged ({error}); remove it") from error


def _map(folder: Path, name: str, count: dict[str, Any], paired: bool) -> Tokens:
    """Maps one stream into memory. Raises ValueError when a file has not the recorded size."""
    arrays = []
    for kind, dtype in (("ids", np.dtype(count["dtype"])), ("starts", np.dtype(np.int64))):
        path = folder / f"{name}.{kind}"
        require_size(path, count[kind] * dtype.itemsize)
        arrays.append(np.asarray(np.memmap(path, dtype=dtype, mode="r")))
    trained = None
    if MARKS in count:
        require_size(path := folder / f"{name}.trained", count["ids"])
        trained = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    return Tokens(ids=arrays[0], starts=arrays[1], paired=paired, trained=trained)


def _checksum(count: dict[str, Any]) -> int:
    """The checksum of a stream's tokens, and of which are trained on."""
    ids: int = count["ids_crc32"]
    return crc32(f"{ids} {count[MARKS]}".encode()) if MARKS in count else ids


def require_samples(corpus: Corpus, *, sequence: int, batch: int) -> None:
    """Raises UserError when a source has no full sample, or when all sources together have fewer
    samples than one global batch.
    """
    counts = [tokens.samples(sequence) for tokens in corpus.sources]
    for name, tokens, count in zip(corpus.names, corpus.sources, counts, strict=True):
        if count == 0 and tokens.trained is not None:
            raise UserError(
                f"data.sources: no conversation of {name} has an answer within {sequence + 1} "
                "tokens; make data.sequence_length larger"
            )
        if count == 0:
            raise UserError(
                f"data.sources: {name} has {len(tokens.ids)} tokens to train on, but one sample "
                f"takes {sequence + 1}; add text, or make data.sequence_length smaller"
            )
    if sum(counts) < batch:
        raise UserError(
            f"data.sources: there are {sum(counts)} samples of {sequence} tokens to train on, "
            f"but one batch takes {batch}; add text, or make the batch or data.sequence_length "
            "smaller"
        )
