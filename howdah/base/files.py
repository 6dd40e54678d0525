"""Reading files that anybody may have written: what each is, and how large, is asked before it is
opened.

A pipe with no one at its other end is waited for without end, a device has no end, and a file of
gigabytes fills the memory. A parser has weak places of its own: tables that are nested too deep,
numbers of thousands of digits, keys of thousands of parts. Whoever reads gets an OSError or a
ValueError that says why in a few words, and makes it a sentence that names the file.
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
LONGEST_NAME, LONGEST_PATH = 255, 4096  # bytes that Linux takes
NESTED = "its lists or tables are nested too deep"
MANY_DOTS = 1000  # on a line. A key of n dots costs tomllib n² steps and bytes; ours have four.


def kind_of(path: Path) -> str:
    """`file` or `folder`; or what keeps it from being read, such as `does not exist`."""
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


def read_file(path: Path, most: int = MIB) -> bytes:
    """The bytes of a regular file. Raises OSError for anything else, and for more than `most`."""
    kind = kind_of(path)
    if kind == "folder":
        raise OSError(EISDIR, os.strerror(EISDIR), str(path))
    if kind == "does not exist":
        raise OSError(ENOENT, os.strerror(ENOENT), str(path))
    if kind != "file":
        raise OSError(EINVAL, f"it {kind}", str(path))
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)  # more than its size, where it grows
    if max(size, len(data)) > most:
        raise OSError(EFBIG, f"it has more than the {most:,} bytes that are read", str(path))
    return data


def read_text(path: Path, most: int = MIB) -> str:
    """A text file in UTF-8. Raises OSError as `read_file`, and UnicodeDecodeError."""
    return read_file(path, most).decode()


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises ValueError for everything that is wrong with it."""
    if any(line.count(".") >= MANY_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has {MANY_DOTS:,} dots or more, and no key so many parts")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError(NESTED) from None
    except ValueError:  # of int()
        raise ValueError("a number has thousands of digits") from None


def parse_json(data: bytes, *, finite: bool = True) -> Any:
    """What a JSON file says. Raises ValueError for everything that is wrong with it.

    finite  refuse NaN and infinity, which Python reads although JSON does not have them
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
    """Why a text cannot be kept, passed to the system, or written to a file; empty where it can."""
    if "\0" in text:
        return "it has a NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "it is not UTF-8"
    return ""


def path_problem(text: str) -> str:
    """Why a text cannot be a path; empty where it can."""
    if problem := word_problem(text):
        return problem
    if max(map(len, text.encode().split(b"/"))) > LONGEST_NAME or len(text) > LONGEST_PATH:
        return f"a path has at most {LONGEST_PATH:,} characters, and {LONGEST_NAME} in each name"
    return ""
