"""Watches the processes of the other ranks, from their meeting on.

A process is watched by a descriptor (pidfd), which becomes readable when the process ends. A number
in /proc is not enough: when a process ends, another one may get its number.
"""

import errno
import os
import select
from collections.abc import Callable, Sequence
from time import monotonic

from howdah.base.errors import UserError
from howdah.comm.transport import PeerLost

ODD_LOOK = 4  # intervals between checks: after a longer time, this process had been suspended


class Patience:
    """A timeout that does not count the time in which this process was suspended.

    seconds  the timeout
    every    seconds between two calls of `look`
    heed     called at each; may raise

    When ranks are suspended together (Ctrl-Z), a long time passes between two checks, in which the
    other ranks did nothing either. So the time between two checks counts as ODD_LOOK·every at most.
    """

    def __init__(
        self, seconds: float, *, every: float, heed: Callable[[], object] | None = None
    ) -> None:
        self.waited, self._seconds, self._heed = 0.0, seconds, heed
        self._most, self._looked = ODD_LOOK * every, monotonic()

    @property
    def left(self) -> float:
        """Seconds until the timeout."""
        return max(self._seconds - self.waited, 0)

    def look(self) -> bool:
        """Counts the time since the last call; returns whether any time is left."""
        now = monotonic()
        self.waited += min(now - self._looked, self._most)
        self._looked = now
        if self._heed:
            self._heed()
        return self.left > 0


def watch(processes: Sequence[int]) -> list[int]:
    """A descriptor (pidfd) of each rank's process, given by process numbers in rank order.

    Raises UserError, or PeerLost if a process has ended.
    """
    opened: list[int] = []
    try:
        for rank, process in enumerate(processes):
            opened.append(_watch(rank, process))
    except BaseException:
        release(opened)
        raise
    return opened


def release(watched: Sequence[int]) -> None:
    """Closes the descriptors."""
    for process in watched:
        os.close(process)


def ended(watched: Sequence[int], *, seconds: float = 0) -> int | None:
    """The first rank whose process has ended, or ends within `seconds`; None if there is none."""
    looker = select.poll()
    for descriptor in watched:
        looker.register(descriptor, select.POLLIN)
    gone = {descriptor for descriptor, _ in looker.poll(seconds * 1000)}
    return next((rank for rank, one in enumerate(watched) if one in gone), None)


def _watch(rank: int, process: int) -> int:
    """A descriptor (pidfd) of a process of this user. It is opened before the owner is read: if the
    process ends between the two, and another one gets its number, the descriptor shows the end.
    """
    try:
        descriptor = os.pidfd_open(process)
    except (TypeError, OverflowError):
        raise UserError(f"rank {rank} has no process {process!r}: it is a number") from None
    except ProcessLookupError:
        raise _lost(rank, process) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # the caller's message adds what the user can do
        raise UserError(
            f"rank {rank}'s process {process} cannot be watched: {error.strerror}"
        ) from None
    try:
        owner = _owner(process)
    except OSError:
        os.close(descriptor)
        raise
    if ended([descriptor]) is not None or owner is None:
        os.close(descriptor)
        raise _lost(rank, process)
    if owner != os.geteuid():
        os.close(descriptor)
        raise UserError(
            f"rank {rank} is said to be process {process}, which is of user {owner} and not of "
            f"user {os.geteuid()}: all ranks of a machine belong to one user"
        )
    return descriptor


def _lost(rank: int, process: int) -> PeerLost:
    return PeerLost(f"rank {rank} (process {process}) ended before all were connected")


def _owner(process: int) -> int | None:
    """The effective user of a process; None if it has ended. The owner of /proc/PID is no
    substitute: it is root for a process that other processes may not inspect.
    """
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as lines:
            return next(int(line.split()[2]) for line in lines if line.startswith("Uid:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return None
