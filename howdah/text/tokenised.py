"""Sources that are tokens already, in the files of nanoGPT, llm.c and Megatron-LM.

    train.bin                   nanoGPT: tokens of 16 bits, documents end with the end token
    train.bin, a header first   llm.c: 256 numbers of 32 bits, then the same
    text_document.bin + .idx    Megatron-LM: tokens, and an index of the documents

A Megatron-LM index (megatron/core/datasets/indexed_dataset.py), all little-endian:

    MMIDIDX\\0\\0   version 1 (8 bytes)   type of the tokens (1 byte)
    n sequences, m document bounds (8 bytes each)
    n lengths (4 bytes each)   n places in bytes (8 each)   m bounds, numbers of sequences (8 each)

Nothing says which tokenizer made the tokens, so the run names it; a token that it does not have is
refused, and so is a file whose header is another's. Tokens are mapped into memory, not loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from howdah.base.errors import UserError
from howdah.base.files import kind_of
from howdah.text.readers import Bad
from howdah.text.records import Take
from howdah.text.turns import Conversation

ENDING, INDEX = ".bin", ".idx"
MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # of Megatron-LM's index
LLM_C, LLM_C_HEADER = 20240520, 1024  # its first number, and the bytes of its header
LONGEST = 1 << 18  # tokens of a document
ALONE = 4096  # tokens of a document, where no token ends one
BLOCK = 1 << 22  # tokens that are looked through at a time


class Known(NamedTuple):
    """What is known of the tokenizer that made the tokens.

    end      the token that ends a document
    entries  all tokens are below it
    """

    end: int
    entries: int


@dataclass(frozen=True, eq=False)
class TokenDocument:
    """A document of tokens, without the one that ends it. It is hashed by its `encode`, like a
    text.

    name     of the file, for messages
    whole    whether the file says that it is one
    trained  [n] of a conversation, whether each token is trained on
    """

    ids: npt.NDArray[Any]
    name: str
    whole: bool = False
    trained: npt.NDArray[np.bool_] | None = None

    def encode(self) -> bytes:
        """The tokens as bytes that no text has: each as 4, behind a byte that UTF-8 never has."""
        return b"\xff" + self.ids.astype("<u4").tobytes()

    def __len__(self) -> int:
        return len(self.ids)


Document = str | TokenDocument | Conversation


def is_tokenised(path: str) -> bool:
    """Whether a source is a file of tokens."""
    return path.endswith(ENDING)


def with_index(path: Path) -> list[Path]:
    """A file, and behind one of tokens its index, if it has one."""
    index = index_of(path) if is_tokenised(path.name) else None
    return [path] if index is None else [path, index]


def index_of(path: Path) -> Path | None:
    """The Megatron-LM index beside a file of tokens; None if there is none."""
    index = path.with_suffix(INDEX)
    return index if kind_of(index) == "file" else None


def parts(path: Path, *, take: Take[Any], bad: Bad) -> Iterator[TokenDocument]:
    """Yields what a file of tokens says is a document, or all of it where it says nothing: `split`
    cuts it. Raises UserError for a file that is none.
    """
    try:
        index = index_of(path)
        yield from _indexed(path, index) if index else _flat(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}; write the file again") from error


def split(part: TokenDocument, known: Known) -> Iterator[TokenDocument]:
    """Yields the documents of a part, which end with the end token, without empty ones. Raises
    UserError for a token that the tokenizer does not have.
    """
    _check(part, known)
    ids = part.ids
    starts = range(0, len(ids), BLOCK)
    ends = [np.flatnonzero(ids[at : at + BLOCK] == known.end) + at for at in starts]
    cuts = np.concatenate([*ends, [len(ids)]]).astype(np.int64)
    longest = LONGEST if len(cuts) > 1 or part.whole else ALONE
    before = 0
    for cut in cuts.tolist():
        for at in range(before, cut, longest):
            yield TokenDocument(ids[at : min(at + longest, cut)], part.name)
        before = cut + 1


def _check(part: TokenDocument, known: Known) -> None:
    for first in range(0, len(part.ids), BLOCK):
        ids = part.ids[first : first + BLOCK]
        if int(ids.max()) < known.entries and int(ids.min()) >= 0:
            continue
        at = int(np.flatnonzero((ids >= known.entries) | (ids < 0))[0])
        raise UserError(
            f"{part.name}: token number {first + at} is {ids[at]}, and data.tokenizer has "
            f"{known.entries}; name the tokenizer that made the file"
        )


# -- nanoGPT and llm.c ---------------------------------------------------------


def _flat(path: Path) -> Iterator[TokenDocument]:
    """Yields all tokens of a file of 16-bit tokens, with or without the header of llm.c."""
    size, skip = path.stat().st_size, 0
    with path.open("rb") as file:
        head = file.read(12)
    if head.startswith(MAGIC[:7]):
        raise ValueError("it is an index; name the .bin beside it")
    if len(head) == 12 and int.from_bytes(head[:4], "little") == LLM_C:
        skip = LLM_C_HEADER
        told = int.from_bytes(head[8:12], "little")
        if size != skip + 2 * told:
            raise ValueError(f"its header says {told} tokens, and it has {(size - skip) // 2}")
    if size % 2:
        raise ValueError(f"it has {size} bytes, and tokens take 2 each")
    if size > skip:
        yield TokenDocument(np.asarray(np.memmap(path, "<u2", "r", offset=skip)), str(path))


# -- Megatron-LM ---------------------------------------------------------------


def _indexed(path: Path, index: Path) -> Iterator[TokenDocument]:
    """Yields the documents of an index."""
    dtype, lengths, bounds = _read_index(index)
    if path.stat().st_size != int(lengths.sum(dtype=np.int64)) * dtype.itemsize:
        raise ValueError(f"{index.name} says another size; the two are not of one corpus")
    if not lengths.sum():
        return
    ids = np.asarray(np.memmap(path, dtype, "r"))
    places = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])[bounds]
    for number, (first, stop) in enumerate(pairwise(places.tolist())):
        yield TokenDocument(ids[first:stop], f"{path} document {number}", whole=True)


def _read_index(path: Path) -> tuple[np.dtype[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """(type of the tokens, tokens of each sequence, bounds of documents). Raises ValueError."""
    data = path.read_bytes()
    if len(data) < 34 or not data.startswith(MAGIC):
        raise ValueError(f"{path.name} is no index of Megatron-LM")
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    count, ends = (int.from_bytes(data[at : at + 8], "little") for at in (18, 26))
    if version != 1 or code not in TYPES:
        raise ValueError(f"{path.name} has version {version} and type {code}, which are not known")
    if len(data) < 34 + 12 * count + 8 * ends:
        raise ValueError(f"{path.name} is cut off")
    lengths = np.frombuffer(data, "<i4", count, 34)
    bounds = np.frombuffer(data, "<i8", ends, 34 + 12 * count)
    ascend = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == count
    if not ascend or (np.diff(bounds) < 0).any() or (lengths < 0).any():
        raise ValueError(f"{path.name} has documents out of order")
    return np.dtype(TYPES[code]), lengths, bounds
