"""Standard output that survives the loss of its reader.

    howdah train small.toml | head -2        the pipe is closed after two lines
    ssh host howdah train small.toml         the terminal closes with the connection
    howdah train small.toml > log            the disk is full

In each case the next print would raise, also in the thread of a progress bar, and Python would
raise once more at its exit. A terminal may also lack a character, such as ³. None of this should
end a training run: output that cannot be written is dropped, and a character that cannot be shown
is replaced. What a full disk has lost can be asked for (`lost`).

A reader may also exist and not read: a pager at the end of its screen, a terminal after Ctrl-S. A
blocking write would wait for it, and the process would not react to stop signals. So output is
written in pieces, each when the descriptor has room for it. A write waits for room

    without limit    where a stop signal ends the wait: its handler raises Stopped there
    up to 5 s        while a stop signal is only recorded (training), and in other threads;
                     after one such wait, not again until there is room
    not at all       after a stop signal
"""

import errno
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
PIECE = select.PIPE_BUF  # bytes that a pipe with room takes without blocking
# Polls are counted, not seconds: a process that was suspended sees a long time pass in one poll.
GLANCE = 100  # milliseconds of a poll for room; stop requests are checked between polls
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # of files; pipes and terminals are closed
LOOKS = 50  # polls in a row that find no room, after which output is dropped


class _Outlet(io.FileIO):
    """A raw file over a descriptor. Its writes never fail: bytes that the system refuses, or does
    not take in time, are dropped.

    lost  why the file that it goes to did not take some; empty: it took all
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._door = _door(descriptor)
        self._room = select.poll()
        self._room.register(self._door, select.POLLOUT)
        self.lost = ""
        self._given_up = False  # until there is room again

    def write(self, data: "ReadableBuffer", /) -> int:
        rest = memoryview(data).cast("B")
        size, looks, hopeless = rest.nbytes, 0, self._given_up
        try:
            while rest:
                if written := self._put(rest[:PIECE], wait=looks > 0):
                    rest, looks, hopeless, self._given_up = rest[written:], 0, False, False
                    continue
                looks, self._given_up = looks + 1, True  # also when Stopped ends the wait
                if hopeless or looks > _most_looks():
                    break
        except OSError as error:
            if error.errno in FULL:
                self.lost = str(error.strerror)
        return size

    def _put(self, piece: memoryview, *, wait: bool) -> int:
        """Writes `piece`; returns the bytes written, 0 if there is no room. Raises OSError if the
        descriptor is broken.

        wait  poll up to GLANCE milliseconds for room
        """
        if not self._room.poll(GLANCE if wait else 0):
            return 0
        try:
            return os.write(self._door, piece)
        except BlockingIOError:  # there is room, but too little for a line end (\r\n)
            time.sleep(GLANCE / 1000 if wait else 0)
            return 0


def lost() -> str:
    """Why some of standard output is not in the file that it goes to; empty: all of it is."""
    buffer = getattr(sys.stdout, "buffer", None)
    outlet = getattr(buffer, "raw", buffer)
    return outlet.lost if isinstance(outlet, _Outlet) else ""


def _door(descriptor: int) -> int:
    """A descriptor for writes that do not block. A blocking terminal would take some bytes of a
    piece and wait with the rest, so it is opened again, non-blocking: the inherited descriptor
    shares its flags with other processes.
    """
    with suppress(OSError):
        return os.open(os.ttyname(descriptor), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    return descriptor


def _most_looks() -> float:
    """How many polls for room a write may do at present: 0, LOOKS or infinity."""
    handler = signal.getsignal(signal.SIGTERM)
    request = getattr(handler, "__self__", None)
    if isinstance(request, StopRequest) and request.signal:
        return 0
    # Before `listen`, a signal ends the process; after its last block, signals are ignored.
    patient = request.patient if isinstance(request, StopRequest) else handler == signal.SIG_IGN
    heard = not patient and threading.current_thread() is threading.main_thread()
    return float("inf") if heard else LOOKS


def lasting_output() -> None:
    """Replaces stdout and stderr so that printing never raises. Called once per process, before
    the first print.

    A stream that other code has put into sys.stdout or sys.stderr is not replaced. If the process
    was started without one of the descriptors 0 to 2, it is opened on /dev/null, and so is the
    stream: otherwise the next opened file would get its number, and the prints of a library would
    be written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # for those it starts, too
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, _lasting(stream, descriptor, ERRORS[name]))
        elif stream is None:
            nowhere = open(os.devnull, "w", encoding="utf-8", errors=ERRORS[name])  # noqa: SIM115
            setattr(sys, name, nowhere)


def _lasting(stream: TextIO, descriptor: int, errors: str) -> TextIO:
    """A stream with the settings of `stream` that never raises; `stream` must not be used again."""
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
