"""Joining: ranks begin to share memory, or are connected by TCP, either all of them or none.

every rank    maps the memory, or opens its connections, and counts itself in the store
every rank    continues when the last rank has done so

A rank that fails on the way writes the reason to the store, which the other ranks check while they
wait; and all ranks notice when a process ends. So no rank waits for one that will not join.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch.distributed import DistNetworkError, Store

from howdah.base.errors import UserError
from howdah.comm.memory import lacking
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience, ended

NAP, LOOK = 0.001, 0.1  # seconds: the first sleep, and the longest time between two checks
CAME, ALL_CAME = "came", "all came"  # keys of the store
FAILED = "!"  # first character of the value of ALL_CAME if a rank cannot join; the reason follows


class Told(UserError):
    """Another rank cannot join; the message is the reason that it wrote to the store."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that are joining, as seen by one of them (`rank` of `size`).

    processes  process numbers by rank; empty if processes cannot be watched
    watched    their descriptors (pidfd) by rank; empty too in that case
    patience   how long this rank waits for the others, in total
    """

    store: Store
    rank: int
    size: int
    processes: tuple[int, ...]
    watched: tuple[int, ...]
    patience: Patience

    def hear(self, key: str) -> str:
        """Waits for a value in the store, and returns it. Raises Told, PeerLost, UserError."""
        nap = NAP
        try:
            while not self.store.check([key]):
                ended(self.watched, seconds=nap)
                nap = min(2 * nap, LOOK)
                self.look()
            return self._read(key)
        except DistNetworkError:
            raise PeerLost("the process through which the ranks meet has ended") from None

    def look(self) -> None:
        """Raises the error that keeps the ranks from joining, if there is one by now."""
        gone = ended(self.watched)
        if self.store.check([ALL_CAME]):
            self._read(ALL_CAME)  # a rank may end after this: all have joined
        elif gone is not None:
            process = self.processes[gone]
            raise PeerLost(f"rank {gone} (process {process}) ended before all were connected")
        elif not self.patience.look():
            raise UserError(f"not all of {self.size} ranks came in time: do they live?")

    def _read(self, key: str) -> str:
        said = self.store.get(key).decode(errors="replace")
        if said.startswith(FAILED):
            raise Told(said.removeprefix(FAILED))
        return said


@contextmanager
def told_to_all(
    store: Store, rank: int, what: str = "share memory with the others"
) -> Iterator[None]:
    """If the block raises, writes the reason to the store for the other ranks: why `rank` cannot do
    what they are about to. The first reason stays, and is told by all that fail.
    """
    try:
        yield
    except (Told, PeerLost):  # the other ranks notice these by themselves
        raise
    except Exception as error:
        why = lacking(error) if isinstance(error, OSError) else str(error)
        said = f"rank {rank} cannot {what}: {why}"
        with suppress(RuntimeError):  # the store may be what failed
            first = store.compare_set(ALL_CAME, "", FAILED + said)
            said = first.decode(errors="replace").removeprefix(FAILED)
        if isinstance(error, UserError | OSError):
            raise UserError(said) from None
        raise


def all_came(ranks: Ranks) -> None:
    """Returns when all ranks have called it. Raises the reason of a rank that could not."""
    if ranks.store.add(CAME, 1) == ranks.size:
        ranks.store.set(ALL_CAME, "")
    ranks.hear(ALL_CAME)
