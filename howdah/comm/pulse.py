"""The pulse: a rank of several machines that is stopped, or whose machine sleeps, is noticed.

Its links stay up, for its kernel goes on answering (`heartbeat.py`), and whoever waits for it waits
for ever. So each rank says in the launcher's store that it goes on, and watches one other:

    rank r    every EVERY seconds adds one to its own number, and reads that of rank r + 1
              a number that stays for SILENT seconds: it says who in the store, for all to read

    rank 0    1 2 3 4 5        rank 1    1 2 3 3 3        rank 2    1 2 3 4 5
              └ reads rank 1: it has stopped ────────── "lost" ──────────┘

Three short requests per rank and look, however many ranks there are. A thread does it, so a rank
may compute as long as it likes. Time in which this process was itself suspended does not count.
"""

from threading import Event, Thread, main_thread
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

from howdah.comm.watch import Patience

EVERY, SILENT = 2.0, 20.0  # seconds
LEFT = 1 << 40  # is added by a rank that has closed: it is not watched any more


class Loser(Protocol):
    """What can be told that a rank is lost."""

    def lose(self, said: str) -> None:
        """All waits end with this sentence."""
        ...


class Pulse:
    """Says that this rank goes on, and hears of one that does not.

    store  a connection of its own: on one that is shared, it would wait for others' requests
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int) -> None:
        self._store, self._rank, self._next = store, rank, (rank + 1) % size
        self._told: WeakSet[Loser] = WeakSet()
        self._heard, self._silence = -1, Patience(SILENT, every=EVERY)
        self._closed = Event()
        self._thread = Thread(target=self._beat, name="pulse")

    def tell(self, loser: Loser) -> None:
        """It is told, on the pulse's thread, when a rank is lost; while anybody else holds it."""
        self._told.add(loser)

    def start(self) -> None:
        """Beats until it is closed, a rank is lost, or the store has gone."""
        self._thread.start()

    def look(self) -> str:
        """One beat and one look; who is lost, in a sentence, or nothing."""
        self._store.add(f"pulse/{self._rank}", 1)
        if self._store.check(["lost"]):
            return str(self._store.get("lost").decode(errors="replace"))
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
        self._store.set("lost", said)
        return said

    def close(self) -> None:
        """Ends the thread; the others stop watching this rank."""
        if self._thread.is_alive():
            self._closed.set()
            self._thread.join(EVERY)  # no longer: a link to the store may be down

    def _beat(self) -> None:
        try:
            # Not a daemon: Python may not end while one is inside of torch.
            while not self._closed.wait(EVERY) and main_thread().is_alive():
                if said := self.look():
                    for loser in list(self._told):
                        loser.lose(said)
                    return
            self._store.add(f"pulse/{self._rank}", LEFT)
        except RuntimeError:
            return  # the launcher's machine has left: its links say so
