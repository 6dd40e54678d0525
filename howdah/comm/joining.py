"""Joining: the ranks of a machine come to share memory, all of them or none.

every rank    makes or maps it, and says that it came
every rank    goes on when the last one has come

A rank that fails on the way says why in the store, where the others look while they wait; and all
see when a process ends. So nobody waits for a rank that does not come.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from torch.distributed import DistNetworkError, Store

from howdah.base.errors import UserError
from howdah.comm.memory import lacking
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience, ended

NAP, LOOK = 0.001, 0.1  # seconds: the first nap, and the longest time between two looks
CAME, ALL_CAME = "came", "all came"  # keys of the store
FAILED = "!"  # begins the value of ALL_CAME when one cannot come: it says why


class Told(UserError):
    """What kept another rank from joining."""


@dataclass(frozen=True)
class Ranks:
    """Those who share memory, as one of them sees the others.

    processes  by rank, and watched, their descriptors: both empty where they cannot be watched
    patience   how long it waits for the others, in all
    """

    store: Store
    rank: int
    size: int
    processes: tuple[int, ...]
    watched: tuple[int, ...]
    patience: Patience

    def hear(self, key: str) -> str:
        """What the store holds under a key, once it does. Raises Told, PeerLost, UserError."""
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
        """Raises what keeps the ranks from sharing memory, if anything does by now."""
        gone = ended(self.watched)
        if self.store.check([ALL_CAME]):
            self._read(ALL_CAME)  # and who ends now has done its part
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
def told_to_all(store: Store, rank: int) -> Iterator[None]:
    """Where this rank fails, the others are told why."""
    try:
        yield
    except (Told, PeerLost):  # which the others hear, or see for themselves
        raise
    except Exception as error:
        why = lacking(error) if isinstance(error, OSError) else str(error)
        said = f"rank {rank} cannot share memory with the others: {why}"
        with suppress(RuntimeError):  # the store may be what failed
            store.set(ALL_CAME, FAILED + said)
        if isinstance(error, UserError | OSError):
            raise UserError(said) from None
        raise


def all_came(ranks: Ranks) -> None:
    """Returns when all ranks have called it. Raises what kept one of them from that."""
    if ranks.store.add(CAME, 1) == ranks.size:
        ranks.store.set(ALL_CAME, "")
    ranks.hear(ALL_CAME)
