"""Encoding documents into token files: the writing half of the token cache.

    documents -> chunks -> encode_batch_fast, on all cores -> <end> t t t, appended to the stream

A stream is two flat files: the tokens, and the start of each document. Both are only appended to,
so memory holds one chunk at a time, however long the text is.
"""

import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from howdah.text import tokenizer as tokenizers
from howdah.text.interruptible import interruptible
from howdah.text.records import PAIR
from howdah.text.tokenised import Document, TokenDocument

CHUNK = 1 << 20  # characters encoded at a time
FEW_DOCUMENTS = 4096  # most documents in a chunk, for short documents


class Stream:
    """Writes one stream: `<end> document <end> document ... <end>` and the documents' starts.

    folder, name  the files are folder/name.ids and folder/name.starts
    dtype         of the stored ids
    end           id of the end token
    marks         whether folder/name.trained says which tokens are trained on
    """

    def __init__(
        self, folder: Path, name: str, *, dtype: np.dtype[Any], end: int, marks: bool = False
    ) -> None:
        self.ids = (folder / f"{name}.ids").open("wb")
        self.starts = (folder / f"{name}.starts").open("wb")
        self.trained = (folder / f"{name}.trained").open("wb") if marks else None
        self.dtype, self.end = dtype, end
        self.tokens = self.documents = 0
        # of the bytes in memory, not of those on disk
        self.ids_crc32 = self.starts_crc32 = self.trained_crc32 = 0

    def add(self, ids: list[int], trained: Sequence[bool] | npt.NDArray[np.bool_] = ()) -> None:
        """Appends one document: its end token and its token ids."""
        start = np.int64(self.tokens).tobytes()
        self.starts.write(start)
        self.starts_crc32 = zlib.crc32(start, self.starts_crc32)
        self._add_ids([self.end, *ids], [False, *trained])
        self.documents += 1

    def _add_ids(self, ids: list[int], trained: list[bool]) -> None:
        written = np.array(ids, dtype=self.dtype).tobytes()
        self.ids.write(written)
        self.ids_crc32 = zlib.crc32(written, self.ids_crc32)
        self.tokens += len(ids)
        if self.trained:
            marks = np.array(trained, dtype=np.uint8).tobytes()
            self.trained.write(marks)
            self.trained_crc32 = zlib.crc32(marks, self.trained_crc32)

    def close(self) -> dict[str, Any]:
        """Writes the last end token and closes the files.

        Returns what a reader needs to map and check them: dtype, lengths and checksums.
        """
        self._add_ids([self.end], [False])
        self.ids.flush()
        self.starts.flush()
        if self.trained:
            self.trained.flush()
        self.abandon()
        return {
            **({"trained_crc32": self.trained_crc32} if self.trained else {}),
            "dtype": self.dtype.name,
            "ids": self.tokens,
            "ids_crc32": self.ids_crc32,
            "starts": self.documents,
            "starts_crc32": self.starts_crc32,
        }

    def abandon(self) -> None:
        """Closes the files as they are. Errors are ignored: an earlier write has raised them."""
        for file in filter(None, (self.ids, self.starts, self.trained)):
            with suppress(OSError):
                file.close()


def encode(
    texts: Iterable[tuple[str, Document]],
    streams: dict[str, Stream],
    tokenizer: Tokenizer,
    *,
    done: Callable[[int], None],
    paired: bool = False,
    labels: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Encodes each (stream name, text) and appends it to that stream, in order.

    `done` is called after each chunk with the number of bytes of its text. Where texts are `paired`
    (`records.PAIR`), the parts of each have the end token between them. Where they have `labels`,
    the number of its label is in front of each text, which is encoded with the special tokens that
    the tokenizer puts around it. Returns the result of `Stream.close` by stream name.
    """
    try:
        for chunk in _chunks(texts):
            parts = [_parts(text, paired or bool(labels)) for _, text in chunk]
            if labels:
                bare = [text for text, _ in parts]
                found = zip(chunk, parts, _encoded(tokenizer, bare, special=True), strict=True)
                for (name, _), (_, label), tokens in found:
                    streams[name].add([labels.index(label), *tokens.ids])
                done(sum(len(text.encode()) for text in bare))
                continue
            encoded = iter(_encoded(tokenizer, [part for some in parts for part in some]))
            for (name, text), some in zip(chunk, parts, strict=True):
                if isinstance(text, TokenDocument):
                    marks = () if text.trained is None else text.trained
                    streams[name].add(text.ids.tolist(), marks)
                    continue
                first, *others = (next(encoded).ids for _ in some)
                end = streams[name].end
                streams[name].add([*first, *(one for ids in others for one in (end, *ids))])
            done(sum(len(text.encode()) for _, text in chunk))
        return {name: stream.close() for name, stream in streams.items()}
    finally:
        for stream in streams.values():
            stream.abandon()


def _parts(text: Document, paired: bool) -> list[str]:
    """What is encoded of a document; tokens are not."""
    if not isinstance(text, str):
        return []
    return text.split(PAIR) if paired else [text]


def _encoded(tokenizer: Tokenizer, texts: list[str], *, special: bool = False) -> list[Encoding]:
    return interruptible(lambda: tokenizers.encode(tokenizer, texts, special=special))


def _chunks(texts: Iterable[tuple[str, Document]]) -> Iterator[list[tuple[str, Document]]]:
    chunk, size = list[tuple[str, Document]](), 0
    for name, text in texts:
        chunk.append((name, text))
        size += len(text)
        if size >= CHUNK or len(chunk) >= FEW_DOCUMENTS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class Scales:
    """Measures the size in bytes of all texts together: uncompressed, after gzip -9, after xz -9.

    The compressed sizes are a baseline for a model's bits per byte.
    """

    def __init__(self) -> None:
        self.bytes = self.gzip = self.xz = 0
        self._gzip = zlib.compressobj(9, wbits=31)  # 31: with the gzip header
        self._xz = lzma.LZMACompressor(preset=9)

    def add(self, text: str) -> None:
        """Appends `text` to the text that is measured."""
        raw = text.encode()
        self.bytes += len(raw)
        for start in range(0, len(raw), CHUNK):  # signal handlers run between two chunks
            part = raw[start : start + CHUNK]
            self.gzip += len(self._gzip.compress(part))
            self.xz += len(self._xz.compress(part))

    def sizes(self) -> dict[str, int]:
        """Ends the text and returns its sizes, under their names in `Corpus`."""
        self.gzip += len(self._gzip.flush())
        self.xz += len(self._xz.flush())
        return {
            "held_out_bytes": self.bytes,
            "held_out_gzip": self.gzip,
            "held_out_xz": self.xz,
        }
