"""The pulse: detects a rank that is stopped, or whose machine is suspended, in runs on several
machines.

The links of a stopped rank stay up, because its kernel still answers (`heartbeat.py`), and ranks
would wait for it forever. So each rank counts in the launcher's store, and watches one other rank:

    rank r    every EVERY seconds: adds one to its own number, and reads that of rank r + 1, or
              of the next one behind it that has not left; if that number is unchanged for SILENT
              seconds, writes "lost" for all ranks to read

    rank 0    1 2 3 4 5        rank 1    1 2 3 3 3        rank 2    1 2 3 4 5
              └ reads rank 1: it has stopped ────────── "lost" ──────────┘

A check takes three short requests per rank, for any number of ranks. It runs on a thread, so a rank
may compute for any time. Time in which this process was itself suspended does not count.

Who has lost a rank ends its connections, perhaps in the middle of a frame, where it cannot say why.
So it writes down whom it has lost before it ends them, if nobody has yet, and names who was written
down first (`cause`): a rank whose peer has ended a connection names the one that the peer has lost.
Rank 0, or its launcher, keeps the store: its thread stays until all others have read who was lost.

A request of a store whose process is stopped never ends. So a second thread looks whether the first
one still beats; where it does not, and rank 0 keeps the store, rank 0 is lost.
"""

from collections.abc import Container
from contextlib import suppress
from threading import Condition, Thread, current_thread, main_thread
from time import sleep
from typing import Protocol
from weakref import WeakSet

import torch.distributed as dist

from howdah.comm.heartbeat import ease, hang_up
from howdah.comm.transport import PeerLost
from howdah.comm.watch import Patience

EVERY, SILENT = 2.0, 20.0  # seconds
ANSWER = 0.5  # seconds in which a check that is asked for must have ended
STAYS, OFTEN = 5.0, 0.05  # seconds: how long rank 0 stays for others, and between two looks at them
LEFT = 1 << 40  # added by a rank that has closed, which is then not watched any more


class Loser(Protocol):
    """An object, such as a transport, whose waits must end when a rank is lost."""

    def lose(self, said: str) -> None:
        """Ends all waits with an error that contains the sentence `said`."""
        ...


class Pulse:
    """The threads that report this rank as alive, and watch the next rank and the store.

    store  a separate connection: on a shared one it would wait for the requests of other threads
    links  the names of its sockets
    kept   whether rank 0 keeps the store, and no launcher
    """

    def __init__(
        self,
        store: dist.Store,
        *,
        rank: int,
        size: int,
        links: Container[str] = (),
        kept: bool = False,
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next = (rank + 1) % size
        self._told: WeakSet[Loser] = WeakSet()
        self._heard, self._silence = -1, Patience(SILENT, every=EVERY)
        self._lost, self._eased = "", set[str]()
        self._saw, self._first = "", ""  # whom this rank has lost; who was written down first
        self._turn, self._closed = Condition(), False
        self._asked = self._answered = 0  # checks that were asked for
        self._links, self._kept, self._beats = links, kept, 0
        self._thread = Thread(target=self._beat, name="pulse")
        self._second = Thread(target=self._look_after, name="pulse's pulse", daemon=True)

    def tell(self, loser: Loser) -> None:
        """Registers an object (by weak reference) whose `lose` is called on the pulse's thread
        when a rank is lost, or at once if one is.
        """
        with self._turn:
            self._told.add(loser)
        if self._lost:
            loser.lose(self._lost)

    def start(self) -> None:
        """Starts the threads. They run until `close`, a lost rank, or the end of the store."""
        self._thread.start()
        self._second.start()

    def heed(self) -> None:
        """Raises PeerLost when a rank is lost: for waits that belong to no transport yet."""
        if self._lost:
            raise PeerLost(self._lost)

    def cause(self, saw: str) -> str:
        """The sentence that names who was lost first: `saw`, of what this rank has seen, unless any
        rank has told one before.
        """
        with self._turn:
            asks = not self._lost and self._thread.is_alive()
            if asks and current_thread() is not self._thread:
                self._saw = self._saw or saw
                self._asked += 1
                mine = self._asked
                self._turn.notify_all()
                self._turn.wait_for(lambda: self._answered >= mine, ANSWER)
        return self._lost or self._first or saw

    def look(self) -> str:
        """Counts once and checks once; returns a sentence that names a lost rank, or ""."""
        self._store.add(f"pulse/{self._rank}", 1)
        if self._store.check(["lost"]):
            self._lost = str(self._store.get("lost").decode(errors="replace"))
            return self._lost
        if self._saw:
            first = self._store.compare_set("first", "", self._saw)
            self._first = first.decode(errors="replace")
        number = self._store.add(f"pulse/{self._next}", 0)
        left = number >= LEFT
        if left:  # it watches nobody any more; this rank's own number, if all have left, grows
            self._next = (self._next + 1) % self._size
        if left or number != self._heard:
            self._heard, self._silence = number, Patience(SILENT, every=EVERY)
        elif not self._silence.look():
            return self._say()
        return ""

    def _say(self) -> str:
        said = (
            f"rank {self._next} has not been heard of for {SILENT:g} s, as rank {self._rank} saw: "
            "it is stopped, or its machine is"
        )
        # of two that are lost at once, all are told of the same one
        self._lost = self._store.compare_set("lost", "", said).decode(errors="replace")
        return self._lost

    def close(self) -> None:
        """Ends the threads. The other ranks stop watching this rank."""
        if self._thread.is_alive():
            with self._turn:
                self._closed = True
                self._turn.notify_all()
            # a limit, because the link to the store may be down, or who keeps it is stopped
            self._thread.join(STAYS if self._lost else EVERY)
            if self._thread.is_alive():
                hang_up(self._links)

    def _beat(self) -> None:
        try:
            # Not a daemon thread: Python must not exit while one runs code of torch.
            while (asked := self._wait()) >= 0 and main_thread().is_alive():
                said = self.look()
                self._beats += 1
                self._answer(asked)
                if said:
                    self._tell_all(said)
                    self._stay()
                    return
            self._store.add(f"pulse/{self._rank}", LEFT)
            self._store.add("told", 1)  # it need not be told any more
        except RuntimeError:
            return  # the store has gone, and its machine or rank 0: closed links end waits
        finally:
            self._answer(LEFT)  # all that will ever ask

    def _tell_all(self, said: str) -> None:
        with self._turn:  # another thread may add one
            told = [*self._told]
        for loser in told:
            loser.lose(said)

    def _look_after(self) -> None:
        """Keeps limits off full connections, and looks whether the store still answers."""
        beats, silence = self._beats, Patience(SILENT, every=EVERY)
        while self._thread.is_alive() and silence.look():
            with suppress(OSError):  # no free descriptor
                self._eased = ease(self._eased)
            self._thread.join(EVERY)
            if beats != self._beats:
                beats, silence = self._beats, Patience(SILENT, every=EVERY)
        if self._thread.is_alive() and self._kept and not self._lost:
            self._lost = (
                f"rank 0, which keeps the store of the run, has not answered for {SILENT:g} s, as "
                f"rank {self._rank} saw: it is stopped, or its machine is"
            )
            self._tell_all(self._lost)
            hang_up(self._links)  # the other thread waits there
        with suppress(OSError):
            ease(self._eased, over=True)

    def _stay(self) -> None:
        """Counts who has been told. Rank 0 waits until all have but the one that is lost."""
        told, patience = self._store.add("told", 1), Patience(STAYS, every=OFTEN)
        while self._rank == 0 and told < self._size - 1 and patience.look():
            sleep(OFTEN)
            told = self._store.add("told", 0)

    def _wait(self) -> int:
        """Waits for the next check; how many were asked for by then, or -1: there is none."""
        with self._turn:
            self._turn.wait_for(lambda: self._closed or self._asked > self._answered, EVERY)
            return -1 if self._closed else self._asked

    def _answer(self, asked: int) -> None:
        with self._turn:
            self._answered = max(self._answered, asked)
            self._turn.notify_all()
