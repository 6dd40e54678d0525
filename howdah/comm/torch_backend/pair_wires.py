"""The wires of the messages between this rank and each other one, made when the first is needed.

    rank 0   sends to 1, for the first time: `open` into the store, and waits
    rank 1   receives from 0, later: finds `open`, makes it `joined`
    both     a transport for 0 → 1, and one for 1 → 0, in this order

Both ways are made at once, so that two ranks may each send first. The wait ends when the group is
closed, by `left`, and when the other rank's process ends. What was `joined` is not left any more:
the other rank would wait for one that does not come.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock

import torch.distributed as dist

from howdah.comm.engine import Engine
from howdah.comm.joining import LOOK, NAP
from howdah.comm.transport import PeerLost, Transport
from howdah.comm.watch import Patience, ended

Join = Callable[[dist.Store, int], Transport]  # through a store, as rank 0 or 1 of two
STATE, OPEN, JOINED, LEFT = "state", "open", "joined", "left"


class PairWires:
    """The wires of one rank of a group.

    wire     that of the group's collectives
    store    in which ranks say that they are here
    join     connects two ranks
    seconds  after which a rank counts as lost that does not come
    """

    def __init__(self, wire: Transport, store: dist.Store, join: Join, *, seconds: float) -> None:
        self._wire, self._store, self._join, self._seconds = wire, store, join, seconds
        self._locks = [Lock() for _ in range(wire.size)]
        self._made: dict[int, tuple[Transport, Transport]] = {}
        self._closed = False

    def wire(self, peer: int, *, out: bool) -> Transport:
        """The transport to a peer, or from it. Raises PeerLost, UserError."""
        with self._locks[peer]:
            if peer not in self._made:
                self._made[peer] = self._meet(peer)
                if self._closed:  # meanwhile: what waits for the new wires is told as well
                    self.abort()
            return self._made[peer][0 if out else 1]

    def _meet(self, peer: int) -> tuple[Transport, Transport]:
        own, low = self._wire.rank, min(self._wire.rank, peer)
        store = dist.PrefixStore(f"pair/{low}-{max(own, peer)}", self._store.clone())  # type: ignore[attr-defined]
        self._agree(store, peer)
        ways = [self._join(dist.PrefixStore(way, store), int(own > low)) for way in ("up", "down")]
        return (ways[0], ways[1]) if own == low else (ways[1], ways[0])

    def _agree(self, store: dist.Store, peer: int) -> None:
        """Returns when both ranks are going to join. Raises PeerLost."""
        first = store.add("came", 1) == 1
        if first:
            store.set(STATE, OPEN)
        try:
            self._wait_until(
                lambda: store.check([STATE]) and (not first or _is_joined(store)), peer
            )
        except PeerLost:
            if first and store.compare_set(STATE, OPEN, LEFT) == JOINED.encode():
                return
            raise
        if not first and store.compare_set(STATE, OPEN, JOINED) != JOINED.encode():
            raise self._lost(peer, "has left the group")

    def _wait_until(self, ready: Callable[[], bool], peer: int) -> None:
        """Raises PeerLost."""
        patience, nap = Patience(self._seconds, every=LOOK), NAP
        with ExitStack() as undo:
            watched = []
            if isinstance(self._wire, Engine):
                process = self._wire.processes[peer]
                try:
                    watched.append(os.pidfd_open(process))
                except ProcessLookupError:
                    raise self._lost(peer, f"(process {process}) died") from None
                undo.callback(os.close, watched[0])
            while not ready():
                if ended(watched, seconds=nap) is not None:
                    raise self._lost(peer, f"(process {process}) died")
                if self._closed:
                    raise self._lost(peer, "was not met before this group was closed")
                if not patience.look():
                    raise self._lost(peer, f"sent and received nothing for {self._seconds:g} s")
                nap = min(2 * nap, LOOK)

    def _lost(self, peer: int, why: str) -> PeerLost:
        return PeerLost(f"rank {peer} {why}, as rank {self._wire.rank} saw")

    def abort(self) -> None:
        """Ends all waits."""
        self._closed = True
        for ways in list(self._made.values()):
            for way in ways:
                way.abort()

    def close(self) -> None:
        """Ends all wires; no thread uses one any more."""
        for ways in self._made.values():
            for way in ways:
                way.close()


def _is_joined(store: dist.Store) -> bool:
    return bytes(store.get(STATE)) == JOINED.encode()
