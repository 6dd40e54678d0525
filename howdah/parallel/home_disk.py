"""The file of a rank's homes on the disk (`host/scratch.py`): what moves its blocks, and handles of
that.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.stopwatch import HOST
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.crc import crc32
from howdah.comm.engine_abi import load_library
from howdah.comm.handle import Note
from howdah.comm.settings import read_settings
from howdah.host import ring
from howdah.host.scratch import Pace, Scratch, ended
from howdah.plan.storage import Storage

NO_RUN = "/var/tmp"  # where there is no run folder; /tmp is often memory


class Jobs:
    """The handle of several jobs; `note` is called when the last has ended."""

    def __init__(self, jobs: Sequence[Future[None]], note: Callable[[], None]) -> None:
        self._jobs, self._left, self._note, self._turn = jobs, len(jobs), note, Lock()
        for job in jobs:
            job.add_done_callback(self._ended)

    def _ended(self, _: Future[None]) -> None:
        with self._turn:
            self._left -= 1
            last = not self._left
        if last:
            self._note()

    def result(self) -> None:
        """Waits for all jobs. Raises the error of the first that failed."""
        ended(self._jobs)

    def then(self, note: Note) -> None:
        """Calls `note` when the last job has ended."""
        if self._jobs:
            self._jobs[-1].add_done_callback(lambda _: note(HOST.mark()))
        else:
            note(HOST.mark())

    def done(self) -> bool:
        """Whether all jobs have ended."""
        return all(job.done() for job in self._jobs)


def open_scratch(storage: Storage) -> tuple[Scratch, str]:
    """The file on the disk, and what reads and writes it. Raises UserError for io_uring that is
    asked for and is not there.
    """
    scratch = partial(
        Scratch,
        Path(storage.folder or NO_RUN),
        threads=storage.threads,
        direct=storage.direct,
        pace=Pace(storage.disk_bandwidth),
        crc32=crc32,
    )
    by = f"{storage.threads} threads"
    if storage.io == "threads":
        return scratch(), by
    try:
        if why := ring.refused():
            raise why
        library = load_library(engine_library(read_settings()))
        return scratch(library=library), f"io_uring, {storage.threads} blocks at a time"
    except (NoCompiler, OSError) as error:
        lack = f"io_uring is not to be had here: {getattr(error, 'strerror', error)}"
    if storage.io == "io_uring":
        raise UserError(f"storage.io={lack}; use storage.io=auto")
    return scratch(), f"{by}, for {lack}"


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the memory of the host."""
    data: memoryview = tensor.detach().view(torch.uint8).numpy().data
    return data
