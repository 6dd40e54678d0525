"""Files of text: opened as UTF-8, whatever their encoding, and plain text cut into documents.

UTF-16 and UTF-32 are recognised by the mark at the start of a file, UTF-16 also by its zero bytes,
and are converted. If that fails, the whole file is left out: read as UTF-8, parts of it would pass,
and would be trained on.

`bad` is called with a sentence about each document that is not text. If it returns, the reader
continues with the next document; it may also raise.
"""

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from howdah.base.errors import UserError, brief

Bad = Callable[[str], None]

MARKS = {  # UTF-32's begins with UTF-16's
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
HEAD = 4096  # bytes by which an encoding is recognised
RARE = 50  # text has at most one zero byte in so many
OFTEN = 16  # UTF-16 has at least one in so many: one in two for English, and one for each space
BINARY = ""  # in place of an encoding
BLOCK = 1 << 20  # bytes converted at a time


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns the error of an unreadable file or a damaged gzip into a UserError."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or brief(error)
        raise UserError(f"cannot read {path}: {reason}; repair or remove the file") from error


@contextmanager
def opened(path: Path, bad: Bad) -> Iterator[BinaryIO]:
    """Opens a file as UTF-8, unpacked if its name ends in .gz.

    If its encoding is another, it is converted into a temporary file. If it is none, `bad` is
    called and there is nothing to read. Single bytes that are not UTF-8 are left to the reader.
    """
    with reading(path), _unpacked(path) as file:
        encoding = encoding_of(file.read(HEAD))
        file.seek(0)
        if encoding == "utf-8":
            yield file
        elif encoding == BINARY:
            bad(f"{path}: its zero bytes are those of a binary file, not of text")
            yield io.BytesIO()
        else:
            with TemporaryFile() as converted:
                try:
                    for part in codecs.iterdecode(iter(partial(file.read, BLOCK), b""), encoding):
                        converted.write(part.encode())
                except UnicodeDecodeError:
                    converted.truncate(0)
                    bad(f"{path}: it begins as {encoding[:6].upper()} and has bytes that are not")
                converted.seek(0)
                yield converted


def _unpacked(path: Path) -> BinaryIO:
    return io.BufferedReader(gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def encoding_of(head: bytes) -> str:
    """The encoding of a file that begins with `head`; BINARY if it is no text."""
    for mark, encoding in MARKS.items():
        if head.startswith(mark):
            return encoding
    even, odd = head[0::2].count(0), head[1::2].count(0)
    if (even + odd) * RARE <= len(head):
        return "utf-8"
    if min(even, odd) * 4 > max(even, odd) or max(even, odd) * OFTEN < len(head):
        return BINARY
    return "utf-16-le" if odd > even else "utf-16-be"


def text(path: Path, *, longest: int, bad: Bad) -> Iterator[str]:
    """Yields a text file as documents of at most `longest` bytes, cut at blank lines if possible.

    The documents joined together are the file, byte for byte, without a mark at its start.
    """
    with opened(path, bad) as file:
        for offset, block in _cut(file, longest):
            try:
                document = block.decode()
            except UnicodeDecodeError as error:
                bad(f"{path}: the byte at offset {offset + error.start} is not UTF-8")
            else:
                yield document if offset else document.removeprefix("\ufeff")


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
