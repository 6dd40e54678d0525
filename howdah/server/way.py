"""How a worker reaches its servers, and for how long it tries."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from howdah.plan.comm import Tls
from howdah.server.addresses import Address
from howdah.server.messages import SILENCE
from howdah.server.outbox import WINDOW

PATIENCE = 20.0  # seconds until a server that does not answer is given up
STILL = 6 * SILENCE  # a server that waits for its disk may read nothing for a while


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
    tls: Tls | None = None

    def of(self, number: int) -> list[Address]:
        """Where a server may be, the likeliest first."""
        others = self.others[number] if self.others else ()
        return [self.addresses[number], *others]
