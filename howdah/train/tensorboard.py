"""TensorBoard's event files, written without a background thread.

torch's SummaryWriter passes events to a thread. An error there is raised later and elsewhere,
printed as a traceback, or never noticed. A run has about a dozen scalars in every stretch of steps:
here they are one record, which is appended to the file at once.

    RUN/tensorboard/events.out.tfevents.TIME.HOST.PROCESS.NUMBER    record | record | record ...

TensorBoard stops reading a file at a record that is cut off. So after a failed write, a new file is
started; TensorBoard reads all files of a folder, one after the other.
"""

import os
import socket
from collections.abc import Mapping
from errno import EAGAIN
from importlib import import_module
from io import BytesIO, FileIO
from itertools import count
from pathlib import Path
from time import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from howdah.train.optional import importing

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

NONE: Mapping[str, Mapping[int, int]] = MappingProxyType({})


class Board:
    """The event files of one process. Values that an earlier process wrote for steps after `step`
    are purged.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder
        self._purge: int | None = step + 1
        self._file: Path | None = None  # None after a failed write

    def add(
        self,
        scalars: Mapping[str, float],
        step: int,
        histograms: Mapping[str, Mapping[int, int]] = NONE,
    ) -> None:
        """Appends the values of `step`. Raises OSError when that is impossible, and ImportError
        when TensorBoard cannot be imported.

        histograms  how often each whole number was seen
        """
        summary_of = _imported("compat.proto.summary_pb2", "Summary")
        values = [summary_of.Value(tag=name, simple_value=one) for name, one in scalars.items()]
        values += [
            summary_of.Value(tag=name, histo=_histogram(seen))
            for name, seen in histograms.items()
            if seen
        ]
        event = _event(step=step, summary=summary_of(value=values))
        file, self._file = self._file, None
        self._file = self._begin(event) if file is None else _append(file, event)

    def close(self) -> None:
        """Does nothing: each record is in the file already."""

    def _begin(self, first: "Event") -> Path:
        """Creates a file with its header and one event; removes it if that fails."""
        events = [_event(file_version="brain.Event:2")]
        if self._purge is not None:
            session = _imported("compat.proto.event_pb2", "SessionLog")
            events.append(_event(step=self._purge, session_log=session(status=session.START)))
        data = b"".join(map(_record, [*events, first]))
        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time()):010d}.{socket.gethostname()}.{os.getpid()}"
        taken = {path.name for path in self._folder.iterdir()}
        file = self._folder / next(n for i in count() if (n := f"{name}.{i}") not in taken)
        with file.open("xb", buffering=0) as stream:
            try:
                write_all(stream, data)
            except OSError:
                file.unlink()
                raise
        self._purge = None
        return file


def _histogram(seen: Mapping[int, int]) -> Any:
    """A bucket for each number from the least to the greatest."""
    numbers = range(min(seen), max(seen) + 1)
    return _imported("compat.proto.histogram_pb2", "HistogramProto")(
        min=min(seen),
        max=max(seen),
        num=sum(seen.values()),
        sum=sum(number * count for number, count in seen.items()),
        sum_squares=sum(number * number * count for number, count in seen.items()),
        bucket_limit=[number + 0.5 for number in numbers],
        bucket=[seen.get(number, 0) for number in numbers],
    )


def _append(file: Path, event: "Event") -> Path:
    """Appends to an existing file. A file that was removed is not created again, because its header
    would be missing.
    """
    data = _record(event)
    with file.open("r+b", buffering=0) as stream:
        stream.seek(0, os.SEEK_END)
        write_all(stream, data)
    return file


def write_all(file: FileIO, data: bytes) -> None:
    """Writes all of `data`: one write to a raw file may take less, for example when the disk is
    full. Raises OSError; of a pipe that is full and was opened so that it does not block, too.
    """
    rest = memoryview(data)
    while rest:
        written: int | None = file.write(rest)
        if written is None:
            raise BlockingIOError(EAGAIN, "nobody reads it")
        rest = rest[written:]


def _event(**fields: object) -> "Event":
    """An event that happens now."""
    event: Event = _imported("compat.proto.event_pb2", "Event")(wall_time=time(), **fields)
    return event


def _record(event: "Event") -> bytes:
    """The bytes of an event, with its length and checksums."""
    record = BytesIO()
    writer = _imported("summary.writer.record_writer", "RecordWriter")(record)
    writer.write(event.SerializeToString())
    return record.getvalue()


def _imported(module: str, name: str) -> Any:
    """What a module of TensorBoard defines under a name. The module is imported when it is first
    needed: that takes a third of a second, and only one rank of a run writes.
    """
    with importing("tensorboard"):
        return getattr(import_module(f"tensorboard.{module}"), name)
