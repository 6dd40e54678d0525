"""Linux process features: signals at a parent's death, adoption of orphans, stopped processes, and
memory that is kept.

On other systems these functions do nothing, and no process is ever reported as stopped.
"""

import ctypes
import sys
from pathlib import Path

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of linux/prctl.h
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
LARGEST_ON_HEAP = 32 << 20  # bytes; glibc takes no larger threshold
SMALL_ON_HEAP = 256 << 10  # bytes; what is larger goes back to the system when it is freed


def die_with_parent(number: int) -> None:
    """Makes the kernel send signal `number` to this process when its parent ends in any way."""
    _prctl(SET_DEATH_SIGNAL, number)


def adopt_orphans(wanted: bool) -> None:
    """Sets whether this process becomes the parent of its descendants whose parent has ended."""
    _prctl(SET_SUBREAPER, int(wanted))


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def keep_freed_memory(kept: bool = True) -> None:
    """Lets this process keep what it frees for its next allocations, where malloc is glibc's; or
    makes it give that back, but for small pieces.

    Kept: the kernel clears memory page by page when it is first written after it was given back. A
    step of training frees its activations, and allocates as many in the next one.

    Not kept: what is freed is in holes that others may not fit into, so a process has more than
    it ever used at once. A model of 72 small blocks, all states on the disk, had twice as much.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(TRIM_THRESHOLD, 2**31 - 1 if kept else SMALL_ON_HEAP)
        libc.mallopt(MMAP_THRESHOLD, LARGEST_ON_HEAP if kept else SMALL_ON_HEAP)


def is_stopped(process: int) -> bool:
    """Whether a process, given by its pid, is stopped by a signal (SIGSTOP, Ctrl-Z)."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]


class StoppedFor:
    """Counts, for each of some processes, how many checks in a row found it stopped.

    Checks are counted, not seconds: if this process is suspended together with the others, a long
    time passes between two checks.
    """

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def look(self, process: int) -> int:
        """Checks a process again; returns how many checks in a row have found it stopped."""
        seen = self._looks.get(process, 0) + 1 if is_stopped(process) else 0
        self._looks[process] = seen
        return seen
