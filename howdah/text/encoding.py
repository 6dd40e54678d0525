"""Encoding documents into token files: the writing half of the token cache.

    documents -> chunks -> encode_batch_fast, on all cores -> <end> t t t, appended to the stream

A stream is two flat files, the tokens and where each document starts; both only ever grow, so
memory stays at one chunk however long the text is.
"""

import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from howdah.text import tokenizer as tokenizers
from howdah.text.interruptible import interruptible

CHUNK = 1 << 20  # characters that are encoded at a time
FEW_DOCUMENTS = 4096  # and documents at most, when they are short


class Stream:
    """Writes `<end> document <end> document ... <end>` and the documents' starts."""

    def __init__(self, folder: Path, name: str, *, dtype: np.dtype[Any], end: int) -> None:
        self.ids = (folder / f"{name}.ids").open("wb")
        self.starts = (folder / f"{name}.starts").open("wb")
        self.dtype, self.end = dtype, end
        self.tokens = self.documents = 0
        self.ids_crc32 = self.starts_crc32 = 0  # of what was meant, not of what a disk made of it

    def add(self, ids: list[int]) -> None:
        """Appends one document."""
        start = np.int64(self.tokens).tobytes()
        self.starts.write(start)
        self.starts_crc32 = zlib.crc32(start, self.starts_crc32)
        self._add_ids([self.end, *ids])
        self.documents += 1

    def _add_ids(self, ids: list[int]) -> None:
        written = np.array(ids, dtype=self.dtype).tobytes()
        self.ids.write(written)
        self.ids_crc32 = zlib.crc32(written, self.ids_crc32)
        self.tokens += len(ids)

    def close(self) -> dict[str, Any]:
        """Writes the last end; returns what a reader must know to map and to check the files."""
        self._add_ids([self.end])
        self.ids.flush()
        self.starts.flush()
        self.abandon()
        return {
            "dtype": self.dtype.name,
            "ids": self.tokens,
            "ids_crc32": self.ids_crc32,
            "starts": self.documents,
            "starts_crc32": self.starts_crc32,
        }

    def abandon(self) -> None:
        """Closes the files as they are; what a full disk has to say was said before."""
        for file in (self.ids, self.starts):
            with suppress(OSError):
                file.close()


def encode(
    texts: Iterable[tuple[str, str]],
    streams: dict[str, Stream],
    tokenizer: Tokenizer,
    *,
    done: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """Appends each (name of its stream, text), in order. Returns what `Stream.close` says of each.

    `done` is told after each chunk how many bytes of text it had.
    """
    try:
        for chunk in _chunks(texts):
            encoded = _encoded(tokenizer, [text for _, text in chunk])
            for (name, _), document in zip(chunk, encoded, strict=True):
                streams[name].add(document.ids)
            done(sum(len(text.encode()) for _, text in chunk))
        return {name: stream.close() for name, stream in streams.items()}
    finally:
        for stream in streams.values():
            stream.abandon()


def _encoded(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    return interruptible(lambda: tokenizers.encode(tokenizer, texts))


def _chunks(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    chunk, size = [], 0
    for name, text in texts:
        chunk.append((name, text))
        size += len(text)
        if size >= CHUNK or len(chunk) >= FEW_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Scales:
    """The size of text in bytes: as it is, after gzip -9 and after xz -9, one after the other.

    What general compressors need per byte is the yardstick for a model's bits per byte.
    """

    def __init__(self) -> None:
        self.bytes = self.gzip = self.xz = 0
        self._gzip = zlib.compressobj(9, wbits=31)  # 31: with the gzip header
        self._xz = lzma.LZMACompressor(preset=9)

    def add(self, text: str) -> None:
        """Appends to the text that is weighed."""
        raw = text.encode()
        self.bytes += len(raw)
        for start in range(0, len(raw), CHUNK):  # between two of them a signal has its turn
            part = raw[start : start + CHUNK]
            self.gzip += len(self._gzip.compress(part))
            self.xz += len(self._xz.compress(part))

    def sizes(self) -> dict[str, int]:
        """Ends the text; the sizes under the names that the corpus keeps them by."""
        self.gzip += len(self._gzip.flush())
        self.xz += len(self._xz.flush())
        return {
            "held_out_bytes": self.bytes,
            "held_out_gzip": self.gzip,
            "held_out_xz": self.xz,
        }
