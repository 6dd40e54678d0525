"""Standard output that outlives its reader.

    howdah train small.toml | head -2        the pipe is closed after two lines
    ssh host howdah train small.toml         the terminal goes with the connection
    howdah train small.toml > log            the disk is full

In each case whatever prints next would raise, a progress bar in its own thread, and Python once
more at its exit. A terminal may also lack a character, such as ³. None of this should end a
training: what cannot be written is dropped, and a character that cannot be shown is replaced.
"""

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ERRORS = {"stdout": "replace", "stderr": "backslashreplace"}  # as Python does for stderr itself


class _Outlet(io.FileIO):
    """A descriptor that takes everything, and drops what the system does not."""

    def write(self, data: "ReadableBuffer", /) -> int:
        written = None  # also what a pipe that does not wait says when it has no room
        with suppress(OSError):
            written = super().write(data)
        return memoryview(data).nbytes if written is None else written


def lasting_output() -> None:
    """From now on, printing never raises. Called once in a process, before it prints.

    Streams that were put in the place of the process' own are left alone: they are somebody
    else's. A descriptor that the process was started without is plugged, or the next file that is
    opened would get its number, and whatever a library prints would be written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lasting(stream, descriptor, ERRORS[name]))


def _lasting(stream: TextIO, descriptor: int, errors: str) -> TextIO:
    """As `stream`, which is used no more."""
    assert isinstance(stream, io.TextIOWrapper)
    with suppress(OSError):
        stream.flush()
    outlet = _Outlet(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(
        outlet if stream.write_through else io.BufferedWriter(outlet),
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
