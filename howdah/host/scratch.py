"""Scratch: a file in which a rank keeps what has its home on the disk, for as long as it runs.

    file     | layers.0 masters   | layers.0 exp_avg   | ...     ranges, each in blocks of 1 MiB
    blocks   |....|....|....|..|  a checksum of each, made when it is written, compared at each read

The file has no name (O_TMPFILE), or loses it as soon as it is open, on file systems that cannot
make one without. So nothing is left of it when the process ends, however it ends, and nothing is
ever resumed from it: checkpoints are what counts.

A block that was never written reads as zeros. Several blocks move at the same time
(`block_moves.py`). With `direct` they go past the page cache (O_DIRECT), which a control group
would count as memory of the run; what takes memory, positions and lengths in whole pages is copied
through an aligned block where it is not so itself.
"""

import ctypes
import errno
import os
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import mkstemp
from threading import Lock
from time import monotonic, sleep
from typing import NamedTuple

from howdah.base.errors import Unfinished, UserError, named
from howdah.base.quantities import spell
from howdah.host.block_moves import BLOCK, PAGE, ByThreads, Move, Mover, address
from howdah.host.ring import ByRing

IN_MEMORY = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}  # f_type of linux/magic.h


class Range(NamedTuple):
    """The bytes [start, start + length) of the file."""

    start: int
    length: int


class Pace:
    """Lets bytes pass at `bandwidth` bytes/s, as a slower link would; 0: as fast as they can."""

    def __init__(self, bandwidth: float) -> None:
        self.bandwidth, self._free, self._lock = bandwidth, 0.0, Lock()

    def wait(self, size: int) -> None:
        """Sleeps until `size` bytes have passed behind those before."""
        if self.bandwidth:
            with self._lock:
                self._free = end = max(monotonic(), self._free) + size / self.bandwidth
            sleep(max(end - monotonic(), 0.0))


class Scratch:
    """A nameless file in `folder`, which is made if it is missing.

    threads  that read and write; with io_uring, blocks on their way at the same time
    direct   past the page cache
    pace     of all of its bytes
    library  with which they move by io_uring (`ring.py`); None: by threads
    crc32    of a block
    """

    def __init__(
        self,
        folder: Path,
        *,
        threads: int,
        direct: bool,
        pace: Pace,
        library: ctypes.CDLL | None = None,
        crc32: Callable[[memoryview], int] = zlib.crc32,
    ) -> None:
        self.folder, self._direct, self._pace, self._crc32 = folder, direct, pace, crc32
        self._file = _open(folder, direct)
        self._end = 0
        self._sums: dict[int, int] = {}  # CRC-32 of a block, by its position in the file
        self._mover: Mover
        try:
            if library is None:
                self._mover = ByThreads(self._file, threads)
            else:
                self._mover = ByRing(self._file, threads, library)
        except OSError:
            os.close(self._file)
            raise

    @property
    def size(self) -> int:
        """Bytes of all ranges."""
        return self._end

    def allocate(self, length: int) -> Range:
        """A new range of `length` bytes, for which the disk has set room aside.

        Raises UserError if it has none.
        """
        start, whole = self._end, -(-length // PAGE) * PAGE
        try:
            if whole:
                _set_aside(self._file, start, whole)
        except OSError as error:
            raise UserError(
                f"the disk of {named(self.folder)} has no room for {spell(length, 'bytes')} more "
                f"({error.strerror}; {spell(free_bytes(self.folder), 'bytes')} are free); name a "
                "folder with room by storage.folder=PATH, or another home"
            ) from error
        self._end += whole
        return Range(start, length)

    def write(self, to: Range, data: memoryview, at: int = 0) -> list[Future[None]]:
        """Starts to write the bytes [at, at + len(data)) of a range, which must not change until
        the futures end: whole blocks, and the last one of the range.
        """
        return [
            self._write(to.start + at + block, data[block : block + BLOCK])
            for block in range(0, len(data), BLOCK)
        ]

    def read(self, source: Range, out: memoryview, at: int = 0) -> list[Future[None]]:
        """Starts to read the bytes [at, at + len(out)) of a range into `out`."""
        jobs = []
        for block in range(at // BLOCK * BLOCK, at + len(out), BLOCK):
            first, last = max(at, block), min(at + len(out), block + BLOCK)
            length = min(BLOCK, source.length - block)
            part = out[first - at : last - at]
            jobs.append(self._read(source.start + block, length, part, first - block))
        return jobs

    def close(self) -> None:
        """Ends the moves that are under way, cancels the others, and lets go of the file and its
        bytes.
        """
        if self._file >= 0:
            self._mover.close()
            os.close(self._file)
            self._file = -1

    def _write(self, at: int, data: memoryview) -> Future[None]:
        def ready(aligned: memoryview) -> memoryview:
            self._pace.wait(len(data))
            self._sums[at] = self._crc32(data)
            if self._fits(data):
                return data
            aligned[: len(data)] = data
            return _pages(aligned, len(data))

        return self._mover.start(Move(True, at, ready, _nothing, partial(self._lost, "write")))

    def _read(self, at: int, length: int, out: memoryview, first: int) -> Future[None]:
        straight = len(out) == length and self._fits(out)

        def ready(aligned: memoryview) -> memoryview | None:
            self._pace.wait(length)
            if at not in self._sums:
                out[:] = bytes(len(out))
                return None
            return out if straight else _pages(aligned, length)

        def ended(block: memoryview) -> None:
            if self._crc32(block[:length]) != self._sums[at]:
                raise Unfinished(
                    f"the disk of {named(self.folder)} gave back other bytes than were written to "
                    "it; the last checkpoint stands: go on from it with storage.folder=PATH on "
                    "another disk"
                )
            if not straight:
                out[:] = block[first : first + len(out)]

        return self._mover.start(Move(False, at, ready, ended, partial(self._lost, "read")))

    def _fits(self, memory: memoryview) -> bool:
        """Whether memory can be moved as it is."""
        if not self._direct:
            return True
        return not (len(memory) % PAGE or address(memory) % PAGE)

    def _lost(self, verb: str, error: OSError) -> Exception:
        return Unfinished(
            f"cannot {verb} the states that have their home on the disk, in "
            f"{named(self.folder)}: {error.strerror}; the last checkpoint stands: mend that, "
            "and go on with the same command"
        )


def _pages(aligned: memoryview, length: int) -> memoryview:
    """The first whole pages of a block that have room for `length` bytes."""
    return aligned[: -(-length // PAGE) * PAGE]


def _nothing(_: memoryview) -> None:
    """What a write does when it has ended."""


def ended(jobs: Sequence[Future[None]]) -> None:
    """Waits for all jobs. Raises the error of the first that failed."""
    for job in jobs:
        job.result()


def _open(folder: Path, direct: bool, *, meant: Path | None = None) -> int:
    """A new file without a name in `folder`; errors name the folder that was `meant`."""
    meant, flags = meant or folder, os.O_RDWR | (os.O_DIRECT if direct else 0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, AttributeError):  # an old file system, or another one than Linux
            return os.open(folder, os.O_TMPFILE | flags, 0o600)
        made, path = mkstemp(prefix=".home-", dir=folder)
    except OSError as error:
        raise UserError(
            f"cannot write the home on the disk, {named(meant)}: {error.strerror}; name another "
            "folder by storage.folder=PATH"
        ) from error
    try:
        if not direct:
            return made
        os.close(made)
        return os.open(path, flags)
    except OSError as error:
        raise UserError(
            f"the file system of {named(meant)} does not take O_DIRECT ({error.strerror}); use "
            "storage.direct=false, or name another folder by storage.folder=PATH"
        ) from error
    finally:
        os.unlink(path)


def _set_aside(file: int, start: int, length: int) -> None:
    """Gives a file room on its disk. Raises OSError if there is none.

    Where the file system cannot do that, the C library would write to every block, which takes
    long, and fails past the page cache: there the file is as long, and has the room that it finds.
    """
    number = _fallocate(file, start, length)
    if number in (errno.EOPNOTSUPP, errno.ENOSYS):
        found = os.fstatvfs(file)
        number = errno.ENOSPC if found.f_bavail * found.f_frsize < length else 0
        if not number:
            os.ftruncate(file, start + length)
    if number:
        raise OSError(number, os.strerror(number))


def _fallocate(file: int, start: int, length: int) -> int:
    """The kernel's call, which the C library's posix_fallocate hides; 0, or the error's number."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if call is None:  # another system than Linux
        return errno.ENOSYS
    while call(file, 0, ctypes.c_int64(start), ctypes.c_int64(length)):
        if (number := ctypes.get_errno()) != errno.EINTR:
            return number
    return 0


def free_bytes(folder: Path) -> int:
    """Bytes that a user may still write to the disk of `folder`, which may not be there yet."""
    found = os.statvfs(_there(folder))
    return found.f_bavail * found.f_frsize


def require_folder(folder: Path, *, direct: bool = False) -> None:
    """Raises UserError for a folder in which no file can be made; nothing is left in it.

    direct  also for one whose file system does not take O_DIRECT: only a file that is opened tells
    """
    there = _there(folder)
    if not there.is_dir():
        why = f"{named(there)} is no folder" if there != folder else "it is no folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        why = f"{named(there)} cannot be written"
    else:
        if direct:
            os.close(_open(there, direct, meant=folder))
        return
    raise UserError(
        f"storage.folder: {named(folder)} cannot hold the home on the disk: {why}; name a folder "
        "that can be written"
    )


def memory_behind(folder: Path) -> str | None:
    """The name of a file system that keeps its files in memory, if `folder` is on one."""
    if not sys.platform.startswith("linux"):
        return None
    found = ctypes.create_string_buffer(
        256
    )  # struct statfs has 120 bytes; f_type is its first word
    if ctypes.CDLL(None).statfs(os.fsencode(_there(folder)), found):
        return None
    return IN_MEMORY.get(int.from_bytes(found.raw[:8], sys.byteorder) & 0xFFFFFFFF)


def _there(folder: Path) -> Path:
    """`folder`, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
