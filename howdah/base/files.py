"""Reading files from untrusted sources: kind and size of a file are checked before it is read.

Reading a pipe without a writer waits forever, a device has no end, and a file of gigabytes fills
the memory. Parsers have limits too: tables that are nested too deep, numbers of thousands of
digits, keys of thousands of dotted names. Reading functions raise OSError or ValueError with a
short reason; their callers turn it into a sentence that names the file.
"""

import json
import os
import stat
import tomllib
from errno import EFBIG, EINVAL, EISDIR, ENOENT, ENOTDIR
from math import isfinite
from pathlib import Path
from typing import Any

MIB = 1 << 20
LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes; the limits of Linux
NESTED = "its lists or tables are nested too deep"
MANY_DOTS = 1000  # in a line. A key of n dots costs tomllib n² steps and bytes; recipes have 4.


def kind_of(path: Path) -> str:
    """`file` or `folder`; otherwise why `path` cannot be read, such as `does not exist`."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        gone = error.errno in (ENOENT, ENOTDIR)
        return "does not exist" if gone else f"cannot be read ({error.strerror})"
    except ValueError:
        return "cannot be read (its name has a NUL)"
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "is a pipe, a socket or a device, and not a file"


def no_file(path: Path) -> str:
    """Why `path` is no file, such as `is a folder`; empty: it is one."""
    kind = kind_of(path)
    return {"file": "", "folder": "is a folder"}.get(kind, kind)


def read_file(path: Path, most: int = MIB) -> bytes:
    """The bytes of a regular file of at most `most` bytes. Raises OSError for any other path."""
    kind = kind_of(path)
    if kind == "folder":
        raise OSError(EISDIR, os.strerror(EISDIR), str(path))
    if kind == "does not exist":
        raise OSError(ENOENT, os.strerror(ENOENT), str(path))
    if kind != "file":
        raise OSError(EINVAL, f"it {kind}", str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)  # it may be growing
    if max(size, len(data)) > most:
        raise OSError(EFBIG, f"it has more than the {most:,} bytes that are read", str(path))
    return data


def read_text(path: Path, most: int = MIB) -> str:
    """The text of a UTF-8 file. Raises OSError as `read_file` does, and UnicodeDecodeError."""
    return read_file(path, most).decode()


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError for every kind of error in it."""
    if any(line.count(".") >= MANY_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has {MANY_DOTS:,} dots or more, and no key so many parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(NESTED) from None
    except ValueError:  # raised by int()
        raise ValueError("a number has thousands of digits") from None


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """The value of a JSON text. Raises ValueError for every kind of error in it.

    finite  refuse NaN and infinity, which Python accepts although JSON does not have them
    """
    try:
        if not finite:
            return json.loads(data)
        return json.loads(data, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError(NESTED) from None


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _finite(digits: str) -> float:
    if not isfinite(number := float(digits)):
        raise ValueError(f"{digits[:20]} is too large")
    return number


def word_problem(text: str) -> str:
    """Why a text cannot be stored, passed to the system or written to a file; empty if it can."""
    if "\0" in text:
        return "it has a NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return ""


def path_problem(text: str) -> str:
    """Why a text cannot be a path; empty if it can."""
    if problem := word_problem(text):
        return problem
    if text.split("/", maxsplit=1)[0] == "~":
        return "~ is not expanded here; write the folder that it means"
    if max(map(len, text.encode().split(b"/"))) > LONGEST_NAME or len(text) > LONGEST_PATH:
        return f"a path has at most {LONGEST_PATH:,} characters, and {LONGEST_NAME} in each name"
    return ""
