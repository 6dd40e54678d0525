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
from io import BytesIO, FileIO
from itertools import count
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]


class Board:
    """The event files of one process. Values that an earlier process wrote for steps after `step`
    are purged.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder = folder
        self._purge: int | None = step + 1
        self._file: Path | None = None  # None after a failed write

    def add(self, scalars: Mapping[str, float], step: int) -> None:
        """Appends the values of `step`. Raises OSError when that is impossible."""
        # Imported here because the import takes a third of a second, before the first step.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        event = Event(wall_time=time(), step=step, summary=Summary(value=values))
        file, self._file = self._file, None
        self._file = self._begin(event) if file is None else _append(file, event)

    def _begin(self, first: "Event") -> Path:
        """Creates a file with its header and one event; removes it if that fails."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        events = [Event(wall_time=time(), file_version="brain.Event:2")]
        if self._purge is not None:
            started = SessionLog(status=SessionLog.START)
            events.append(Event(wall_time=time(), step=self._purge, session_log=started))
        self._folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time()):010d}.{socket.gethostname()}.{os.getpid()}"
        taken = {path.name for path in self._folder.iterdir()}
        file = self._folder / next(n for i in count() if (n := f"{name}.{i}") not in taken)
        with file.open("xb", buffering=0) as stream:
            try:
                write_all(stream, b"".join(map(_record, [*events, first])))
            except OSError:
                file.unlink()
                raise
        self._purge = None
        return file


def _append(file: Path, event: "Event") -> Path:
    """Appends to an existing file. A file that was removed is not created again, because its header
    would be missing.
    """
    with file.open("r+b", buffering=0) as stream:
        stream.seek(0, os.SEEK_END)
        write_all(stream, _record(event))
    return file


def write_all(file: FileIO, data: bytes) -> None:
    """Writes all of `data`: one write to a raw file may take less, for example when the disk is
    full.
    """
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _record(event: "Event") -> bytes:
    """The bytes of an event, with its length and checksums."""
    from tensorboard.summary.writer.record_writer import (  # type: ignore[import-untyped]
        RecordWriter,
    )

    record = BytesIO()
    RecordWriter(record).write(event.SerializeToString())
    return record.getvalue()
