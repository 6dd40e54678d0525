"""Standard output that outlives its reader.

    howdah train small.toml | head -2        the pipe is closed after two lines
    ssh host howdah train small.toml         the terminal goes with the connection
    howdah train small.toml > log            the disk is full

In each case whatever prints next would raise, a progress bar in its own thread, and Python once
more at its exit. A terminal may also lack a character, such as ³. None of this should end a
training: what cannot be written is dropped, and a character that cannot be shown is replaced.

A reader may also be there and not read: a pager at the end of its screen, a terminal after Ctrl-S.
A write would wait for it, with a process around it that hears no stop signal. So a piece is written
when there is room for it, which is waited for

    without end    where a stop signal ends the waiting: Stopped is raised in it
    for a while    while a request to stop would only be noted (training), and in other threads;
                   once, until there is room again
    not at all     when a stop was asked
"""

import io
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

from howdah.base.signals import StopRequest

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ERRORS = {"stdout": "replace", "stderr": "backslashreplace"}  # as Python does for stderr itself
PIECE = select.PIPE_BUF  # bytes: what a pipe that has room takes without waiting
# Looks are counted and not seconds: whoever was suspended sees a long time pass in one.
GLANCE = 100  # milliseconds between looks at whether a stop was asked
LOOKS = 50  # that find no room, and what is to be written is dropped


class _Outlet(io.FileIO):
    """A descriptor that takes everything, and drops what the system does not, or not soon."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._door = _door(descriptor)
        self._room = select.poll()
        self._room.register(self._door, select.POLLOUT)
        self._given_up = False  # until there is room again

    def write(self, data: "ReadableBuffer", /) -> int:
        rest = memoryview(data).cast("B")
        size, looks, hopeless = rest.nbytes, 0, self._given_up
        with suppress(OSError):
            while rest:
                if written := self._put(rest[:PIECE], wait=looks > 0):
                    rest, looks, hopeless, self._given_up = rest[written:], 0, False, False
                    continue
                looks, self._given_up = looks + 1, True  # also where a stop ends the waiting
                if hopeless or looks > _most_looks():
                    break
        return size

    def _put(self, piece: memoryview, *, wait: bool) -> int:
        """How many bytes were taken; 0: there is no room. One that is broken raises OSError."""
        if not self._room.poll(GLANCE if wait else 0):
            return 0
        try:
            return os.write(self._door, piece)
        except BlockingIOError:  # it has room, but not for all that a line's end takes
            time.sleep(GLANCE / 1000 if wait else 0)
            return 0


def _door(descriptor: int) -> int:
    """Where to write without waiting. A terminal would take a part of a piece and wait for the
    rest; so it is opened once more, for whether it waits is a matter of whom it was opened by.
    """
    with suppress(OSError):
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    return descriptor


def _most_looks() -> float:
    """How often may be looked for room, as things stand now."""
    handler = signal.getsignal(signal.SIGTERM)
    request = getattr(handler, "__self__", None)
    if isinstance(request, StopRequest) and request.signal:
        return 0
    # Before there is a request the system ends the process; when it leaves, signals are ignored.
    patient = request.patient if isinstance(request, StopRequest) else handler == signal.SIG_IGN
    heard = not patient and threading.current_thread() is threading.main_thread()
    return float("inf") if heard else LOOKS


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
    outlet = _Outlet(descriptor)
    return io.TextIOWrapper(
        outlet if stream.write_through else io.BufferedWriter(outlet),
        encoding=stream.encoding,
        errors=errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
