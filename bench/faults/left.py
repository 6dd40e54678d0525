"""What a run could leave behind, as a listing that is compared before and after.

Other programs run on the machine, and may use howdah too. A mapping counts if it is of an arena of
this script or by a process that it started; a socket, if its name holds such a process; a file of
shared memory, unless a process that is none of these maps it.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def listing(pids: set[int], arenas: set[str]) -> set[str]:
    """Files of shared memory, sockets, mappings and processes, each as a line.

    pids  processes that this script has ever started; arenas  inodes of the arenas they mapped
    """
    family = descendants() | pids
    return _files(family) | _sockets(family) | _mappings(family, arenas) | _processes(family)


def descendants() -> set[int]:
    """Processes below this one, found through the parent of every process."""
    parents: dict[int, int] = {}
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            parents[int(entry.name)] = int(_fields(entry)[1])
    found, fresh = set[int](), {int((PROC / "self").readlink().name)}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found |= fresh
    return found


def _fields(entry: Path) -> list[str]:
    """State, parent, ... of a process; its name before them may hold anything."""
    return (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()


def _files(family: set[int]) -> set[str]:
    foreign = {words[5] for pid, words in _maps() if pid not in family and len(words) > 5}
    return {str(path) for path in Path("/dev/shm").iterdir() if str(path) not in foreign}


def _sockets(family: set[int]) -> set[str]:
    words = (PROC / "net/unix").read_text(encoding="utf-8").split()
    names = [word for word in words if "howdah" in word]
    return {f"socket {name}" for name in names if any(str(pid) in name for pid in family)}


def _mappings(family: set[int], arenas: set[str]) -> set[str]:
    return {
        f"process {pid} maps arena {words[4]}"
        for pid, words in _maps()
        if len(words) > 5 and "memfd:howdah" in words[5]
        if words[4] in arenas or pid in family
    }


def _maps() -> Iterator[tuple[int, list[str]]]:
    """Process and words of every mapping: addresses, rights, offset, device, inode, path."""
    for entry in PROC.glob("[0-9]*"):
        with suppress(OSError):
            for line in (entry / "maps").read_text(encoding="utf-8").splitlines():
                yield int(entry.name), line.split()


def _processes(family: set[int]) -> set[str]:
    return {f"process {pid}" for pid in family if (PROC / str(pid)).exists()}
