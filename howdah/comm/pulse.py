"""The pulse: detects a rank that is stopped, or whose machine is suspended, in runs on several
machines.

The links of a stopped rank stay up, because its kernel still answers (`heartbeat.py`), and ranks
would wait for it forever. So each rank counts in the launcher's store, and watches one other rank:

    rank r    every EVERY seconds: adds one to its own number, and reads that of rank r + 1;
              if that number is unchanged for SILENT seconds, writes "lost" for all ranks to read

    rank 0    1 2 3 4 5        rank 1    1 2 3 3 3        rank 2    1 2 3 4 5
              └ reads rank 1: it has stopped ────────── "lost" ──────────┘

A check takes three short requests per rank, for any number of ranks. It runs on a thread, so a rank
may compute for any time. Time in which this process was itself suspended does not count.
"""

from threading import Event, Thread, main_thread
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience

EVERY, SILENT = 2.0, 20.0  # seconds
LEFT = 1 << 40  # added by a rank that has closed, which is then not watched any more


class Loser(Protocol):
    """An object, such as a transport, whose waits must end when a rank is lost."""

    def lose(self, said: str) -> None:
        """Ends all waits with an error that contains the sentence `said`."""
        ...


class Pulse:
    """The thread that reports this rank as alive, and watches the next rank.

    store  a separate connection: on a shared one it would wait for the requests of other threads
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._next = store, rank, (rank + 1) % size
        self._told: WeakSet[Loser] = WeakSet()
        self._heard, self._silence = -1, Patience(SILENT, every=EVERY)
        self._closed, self._lost = Event(), ""
        self._thread = Thread(target=self._beat, name="pulse")

    def tell(self, loser: Loser) -> None:
        """Registers an object (by weak reference) whose `lose` is called on the pulse's thread
        when a rank is lost.
        """
        self._told.add(loser)

    def start(self) -> None:
        """Starts the thread. It runs until `close`, a lost rank, or the end of the store."""
        self._thread.start()

    def heed(self) -> None:
        """Raises PeerLost when a rank is lost: for waits that belong to no transport yet."""
        if self._lost:
            raise PeerLost(self._lost)

    def look(self) -> str:
        """Counts once and checks once; returns a sentence that names a lost rank, or ""."""
        self._store.add(f"pulse/{self._rank}", 1)
        if self._store.check(["lost"]):
            self._lost = str(self._store.get("lost").decode(errors="replace"))
            return self._lost
        number = self._store.add(f"pulse/{self._next}", 0)
        if number != self._heard or number >= LEFT:
            self._heard, self._silence = number, Patience(SILENT, every=EVERY)
        elif not self._silence.look():
            return self._say()
        return ""

    def _say(self) -> str:
        said = (
            f"rank {self._next} has not been heard of for {SILENT:g} s, as rank {self._rank} saw: "
            "it is stopped, or its machine is"
        )
        self._lost = said
        self._store.set("lost", said)
        return said

    def close(self) -> None:
        """Ends the thread. The other ranks stop watching this rank."""
        if self._thread.is_alive():
            self._closed.set()
            self._thread.join(EVERY)  # a limit, because the link to the store may be down

    def _beat(self) -> None:
        try:
            # Not a daemon thread: Python must not exit while one runs code of torch.
            while not self._closed.wait(EVERY) and main_thread().is_alive():
                if said := self.look():
                    for loser in list(self._told):
                        loser.lose(said)
                    return
            self._store.add(f"pulse/{self._rank}", LEFT)
        except RuntimeError:
            return  # the store's machine is down: its closed links end all waits
