"""Watching the other ranks' processes, from the moment that they have met.

A process is watched by a descriptor of its own (pidfd), which can be read when it has ended. A
number in /proc is not enough: when a process ends, another one may get it.
"""

import errno
import os
import select
from collections.abc import Sequence
from time import monotonic

from howdah.base.errors import UserError
from howdah.comm.transport import PeerLost

ODD_LOOK = 4  # times as long as looks are apart: more than that, and everybody was suspended


class Patience:
    """Seconds of waiting, counted in looks.

    A rank that was suspended (Ctrl-Z) sees a long time pass between two looks, in which the others
    did nothing either. So no look counts more than a little.
    """

    def __init__(self, seconds: float, *, every: float) -> None:
        self.waited, self._seconds = 0.0, seconds
        self._most, self._looked = ODD_LOOK * every, monotonic()

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return max(self._seconds - self.waited, 0)

    def look(self) -> bool:
        """Counts the time since the last look; whether any is left."""
        now = monotonic()
        self.waited += min(now - self._looked, self._most)
        self._looked = now
        return self.left > 0


def watch(processes: Sequence[int]) -> list[int]:
    """A descriptor of each rank's process. Raises UserError, or PeerLost when one has ended."""
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
    """The first rank whose process has ended, if one has, or does within some seconds."""
    looker = select.poll()
    for descriptor in watched:
        looker.register(descriptor, select.POLLIN)
    gone = {descriptor for descriptor, _ in looker.poll(seconds * 1000)}
    return next((rank for rank, one in enumerate(watched) if one in gone), None)


def _watch(rank: int, process: int) -> int:
    """The descriptor first and then the owner: who ended meanwhile is seen by the descriptor."""
    try:
        descriptor = os.pidfd_open(process)
    except (TypeError, OverflowError):
        raise UserError(f"rank {rank} has no process {process!r}: it is a number") from None
    except ProcessLookupError:
        raise _lost(rank, process) from None
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # for whoever knows what else needs files
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
    """Whose rights it acts with; the owner of /proc/PID is root where it keeps others out."""
    try:
        with open(f"/proc/{process}/status", encoding="utf-8", errors="replace") as lines:
            return next(int(line.split()[2]) for line in lines if line.startswith("Uid:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return None
