"""Memory without a name: an anonymous file of the kernel (memfd), sealed.

Nobody can make it shorter while others use it, which would end them (SIGBUS), or longer. Whoever is
handed a descriptor can see both. Nothing is left of it when the last process that holds it ends.
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
    """A descriptor of `bytes` of zeros, which take memory when they are first written.

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
    """Raises UserError unless it is such memory, of this size."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:  # no memory at all
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
    """The system's words for what is not there, and what would help."""
    way = WAYS.get(error.errno or 0, "")
    return ": ".join(filter(None, [error.strerror or str(error), way]))


def _seals() -> int:
    """Asked for when they are needed: other systems have none."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
