"""The file that the ranks of a fallback share: where things lie in it, and how it is come by.

It has no name (`memory.py`); where the system has no such files, it loses its name when all have
opened it.
"""

import os
import tempfile

from howdah.base.errors import UserError
from howdah.comm.memory import check_memory, make_memory
from howdah.comm.signature import RECORD

SLOT, MAIL = 1 << 20, 1 << 16  # bytes: most that a rank writes in a turn, and in a message
TEXT = 4096  # bytes of a call that is too long for a record
LINE = 8  # words of a cache line


class Plan:
    """Where things lie in the shared file: words by number, the rest in bytes."""

    def __init__(self, size: int) -> None:
        self.abort = size * LINE
        self.table = self.abort + LINE
        self.mail_words = self.table + 2 * size * size
        self.records = (self.mail_words + size * size * 2 * LINE) * 8
        self.texts = self.records + 2 * size * RECORD
        self.slots = -(-(self.texts + 2 * size * TEXT) // 4096) * 4096
        self.mail = self.slots + 2 * size * SLOT
        self.total = self.mail + size * size * (MAIL + RECORD)


def create(total: int) -> tuple[int, str]:
    """A file in memory of `total` bytes, and the path by which other processes open it."""
    try:
        if hasattr(os, "memfd_create"):
            fd = make_memory("howdah-fallback", total)
            return fd, f"/proc/{os.getpid()}/fd/{fd}"
        return _create_named(total)
    except OSError as error:
        raise UserError(
            f"{total >> 20} MiB of shared memory are needed and not there ({error.strerror}): "
            "free some memory, start fewer ranks, or take transport=torch"
        ) from error


def _create_named(total: int) -> tuple[int, str]:
    """Written, for a hole in a file on a full disk is a crash, later."""
    fd, path = tempfile.mkstemp(prefix="howdah")
    try:
        os.write(fd, bytes(total))
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise
    return fd, path


def open_file(path: str, total: int) -> int:
    """The file at the path that rank 0 told. No other one is written to, whoever told it."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if hasattr(os, "memfd_create"):
            check_memory(fd, total)
        found = os.fstat(fd)
        if (found.st_uid, found.st_size) != (os.geteuid(), total):
            raise UserError("rank 0 tells of a file that is not of this user, or of another size")
    except UserError:
        os.close(fd)
        raise
    return fd
