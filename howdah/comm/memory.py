"""Shared memory without a name: an anonymous file of the kernel (memfd) with a fixed size.

Seals fix the size. Otherwise a process could make the file shorter, and the others would die of
SIGBUS. A process that receives the descriptor can check both seals and size. The kernel frees the
memory when the last process that holds it ends.
"""

import errno
import fcntl
import os

from howdah.base.errors import UserError

WAYS = {
    errno.ENOMEM: "raise the limit of its address space (ulimit -v), or free some memory",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
}


def make_memory(name: str, bytes: int) -> int:
    """A descriptor of new shared memory: `bytes` zeros. A page takes memory when first written.

    Raises OSError.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals() | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def check_memory(descriptor: int, bytes: int) -> None:
    """Raises UserError unless `descriptor` is sealed memory of `bytes` bytes."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # it is no memfd
        seals = 0
    if seals & _seals() != _seals():
        raise UserError("what rank 0 handed over is not memory whose size is fixed")
    shared = os.fstat(descriptor).st_size
    if shared != bytes:
        raise UserError(
            f"rank 0 made an arena of {shared} bytes and this rank needs {bytes}: give all ranks "
            "the same arena_bytes"
        )


def lacking(error: OSError) -> str:
    """The system's message for an error, and what the user can do about it."""
    way = WAYS.get(error.errno or 0, "")
    return ": ".join(filter(None, [error.strerror or str(error), way]))


def _seals() -> int:
    """The seals that fix the size. A function, because other systems lack these constants."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
