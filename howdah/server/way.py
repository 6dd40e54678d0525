"""How a worker reaches its servers, and for how long it tries."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from time import monotonic, sleep

from howdah.comm.frames import FrameError, Frames
from howdah.comm.handshake import CALLER, Stranger, greet
from howdah.comm.tls import Seal
from howdah.plan.comm import Tls
from howdah.server.addresses import Address, connected, spell
from howdah.server.messages import JOIN, SILENCE, Fields
from howdah.server.outbox import WINDOW

AGAIN = 0.05  # seconds between attempts
PATIENCE = 20.0  # seconds until a server that does not answer is given up
STILL = 6 * SILENCE  # a server that waits for its disk may read nothing for a while


class ServerGone(FrameError):
    """A server does not want this worker any more, or cannot be reached; the message says which."""


class ServerAway(ServerGone):
    """A server cannot be reached; the message says for how long, and what to check."""


@dataclass(frozen=True)
class Way:
    """How a worker reaches its servers.

    addresses  of the servers, in order
    secret     of the run
    hello      what the servers must be told: see `Host`
    patience   seconds until a server that does not answer is given up
    silence    seconds without a byte, after which a connection is made again
    window     bytes of pushes under way to each server
    fifo       whether chunks are sent in the order in which they come, not by urgency
    others     of each server, where its replicas listen when they take its place
    over       whether the run is known to have ended, so that no server is waited for
    leave      whether the worker is asked to leave
    moved      the servers whose place others have taken so far; one is there once for each time
    tls        what encrypts the connections
    """

    addresses: Sequence[Address]
    secret: bytes
    hello: Mapping[str, object]
    patience: float = PATIENCE
    silence: float = STILL
    window: int = WINDOW
    fifo: bool = False
    others: Sequence[Sequence[Address]] = ()
    over: Callable[[], object] | None = None
    leave: Callable[[], object] | None = None
    moved: Callable[[], Sequence[int]] | None = None
    tls: Tls | None = None

    def of(self, number: int) -> list[Address]:
        """Where a server may be, the likeliest first."""
        others = self.others[number] if self.others else ()
        return [self.addresses[number], *others]


def reach(way: Way, number: int, seat: tuple[int, int], incarnation: int, seal: Seal) -> Frames:
    """A connection to a server, which was asked to be joined: tries again and again. Raises
    ServerAway.

    seat  the worker's place, and its rank
    """
    until, why = monotonic() + way.patience, ""
    for address in cycle(there := way.of(number)):
        if monotonic() >= until or (way.over and way.over()):
            break
        try:
            sock = connected(address, seal)
            try:
                hello = {**way.hello, "place": seat[0], "rank": seat[1]}
                greet(sock, way.secret, json.dumps(hello).encode(), role=CALLER)
                frames = Frames(sock, f"server {number}", seconds=way.silence, most=1 << 32)
                frames.send(JOIN, Fields(key=incarnation).packed)
            except BaseException:
                sock.close()
                raise
            return frames
        except (OSError, Stranger, FrameError) as error:
            why = str(error)
            sleep(AGAIN)
    raise ServerAway(
        f"server {number} at {' or '.join(map(spell, there))} did not answer for "
        f"{way.patience:g} s ({why}); check that it runs there, that this machine "
        "reaches it, and that both have the same secret"
    )
