"""Encoding documents into token files: the writing half of the token cache.

    documents -> chunks -> encode_batch_fast, on all cores -> <end> t t t, appended to the stream

A stream is two flat files, the tokens and where each document starts; both only ever grow, so
memory stays at one chunk however long the text is.
"""

import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

CHUNK = 1 << 20  # characters that are encoded at a time
FEW_DOCUMENTS = 4096  # and documents at most, when they are short


class Stream:
    """Writes `<end> document <end> document ... <end>` and the documents' starts."""

    def __init__(self, folder: Path, name: str, *, dtype: np.dtype[Any], end: int) -> None:
        self.ids = (folder / f"{name}.ids").open("wb")
        self.starts = (folder / f"{name}.starts").open("wb")
        self.dtype, self.end = dtype, end
        self.tokens = self.documents = 0

    def add(self, ids: list[int]) -> None:
        """Appends one document."""
        self.starts.write(np.int64(self.tokens).tobytes())
        self.ids.write(np.array([self.end, *ids], dtype=self.dtype).tobytes())
        self.tokens += 1 + len(ids)
        self.documents += 1

    def close(self) -> dict[str, Any]:
        """Writes the last end; returns what a reader must know to map the files."""
        self.ids.write(np.array([self.end], dtype=self.dtype).tobytes())
        self.tokens += 1
        self.abandon()
        return {"dtype": self.dtype.name, "ids": self.tokens, "starts": self.documents}

    def abandon(self) -> None:
        """Closes the files as they are."""
        self.ids.close()
        self.starts.close()


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
            # Documents go in whole and without the tokens a chat model would add around them.
            encoded = tokenizer.encode_batch_fast(
                [text for _, text in chunk], add_special_tokens=False
            )
            for (name, _), document in zip(chunk, encoded, strict=True):
                streams[name].add(document.ids)
            done(sum(len(text.encode()) for _, text in chunk))
        return {name: stream.close() for name, stream in streams.items()}
    finally:
        for stream in streams.values():
            stream.abandon()


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
        self.gzip += len(self._gzip.compress(raw))
        self.xz += len(self._xz.compress(raw))

    def sizes(self) -> dict[str, int]:
        """Ends the text; the sizes under the names that the corpus keeps them by."""
        self.gzip += len(self._gzip.flush())
        self.xz += len(self._xz.flush())
        return {
            "held_out_bytes": self.bytes,
            "held_out_gzip": self.gzip,
            "held_out_xz": self.xz,
        }
