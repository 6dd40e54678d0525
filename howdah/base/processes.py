"""What the system tells of processes, and what it does for them when another one ends.

Linux alone does this; elsewhere a process is never seen to be stopped, and nothing is done.
"""

import ctypes
import sys
from pathlib import Path

SET_DEATH_SIGNAL, SET_SUBREAPER = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER of linux/prctl.h


def die_with_parent(number: int) -> None:
    """The calling process gets the signal when the one that forked it ends, however that ends."""
    _prctl(SET_DEATH_SIGNAL, number)


def adopt_orphans(wanted: bool) -> None:
    """Whether this process becomes the parent of descendants whose own parent ends."""
    _prctl(SET_SUBREAPER, int(wanted))


def _prctl(option: int, argument: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def is_stopped(process: int) -> bool:
    """Whether it was stopped by a signal (SIGSTOP, Ctrl-Z), which nobody can handle."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] == ["T"]


class StoppedFor:
    """How many looks in a row found each of some processes stopped.

    Looks are counted and not seconds: whoever was suspended together with them sees a long time
    pass in one look.
    """

    def __init__(self) -> None:
        self._looks: dict[int, int] = {}

    def look(self, process: int) -> int:
        """Looks once more; how many looks in a row it was stopped."""
        seen = self._looks.get(process, 0) + 1 if is_stopped(process) else 0
        self._looks[process] = seen
        return seen
