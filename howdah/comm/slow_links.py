"""Which link of a run is slow: the kernel knows how many bytes each connection has delivered, and
for how long it had any on their way (`tcp_info`).

    rank 1    with rank 0   112 MB/s    with rank 2   110 MB/s    with rank 3   6 MB/s   ← slow

A rank looks at what it sends itself, so of a slow card all others tell. The time in which the other
end had no room does not count: it computes. Short messages wait more than they move, so only links
are compared that carry long ones. Sums are right on a slow link, and a run goes on; it waits for
that link, and nobody would know.
"""

import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import monotonic

from howdah.base.quantities import spell

EVERY = 0.5  # seconds between two looks
LONG = 128 << 10  # bytes of a message that shows how fast a link is
ENOUGH = 64 << 20  # bytes of such messages on a link before it is compared
MOSTLY = 0.9  # of what it has delivered, at least
SLOW = 0.4  # of the median of the others
OTHERS = 2  # links that a slow one is compared with, at least
# Where struct tcp_info of linux/tcp.h has bytes, and microseconds; its length up to there.
ACKED, BUSY, NO_ROOM, SIZE = 120, 168, 176, 184


class SlowLinks:
    """The links of a rank with ranks of other machines.

    rank     this rank
    by_peer  connections with each peer
    """

    def __init__(self, rank: int, by_peer: Mapping[int, Sequence[socket.socket]]) -> None:
        self._rank = rank
        self._far = {peer: socks for peer, socks in by_peer.items() if _leaves(socks[0])}
        self._told, self._looked = set[int](), 0.0

    def look(self, long: Mapping[int, int]) -> list[str]:
        """A sentence for each link that is found to be slow, once. To be called often.

        long  bytes of long messages to each peer
        """
        now = monotonic()
        if len(self._far) <= OTHERS or now - self._looked < EVERY:
            return []
        self._looked, rates = now, dict[int, float]()
        for peer, socks in self._far.items():
            found = [_delivered(one) for one in socks]
            acked, seconds = (sum(column) for column in zip(*found, strict=True))
            if seconds > 0 and long[peer] >= max(ENOUGH, MOSTLY * acked):
                rates[peer] = acked / seconds
        return [*self._sentences(rates)]

    def _sentences(self, rates: Mapping[int, float]) -> Iterator[str]:
        for peer in sorted(rates.keys() - self._told):
            others = [rate for one, rate in rates.items() if one != peer]
            if len(others) >= OTHERS and rates[peer] < SLOW * median(others):
                self._told.add(peer)
                own, usual = (spell(rate, "bytes/s") for rate in (rates[peer], median(others)))
                yield (
                    f"the link from rank {self._rank} to rank {peer} delivers {own}, others of "
                    f"rank {self._rank} {usual}: the run waits for it; `howdah doctor --hosts` "
                    "measures all links"
                )


def _leaves(sock: socket.socket) -> bool:
    """Whether a connection leads to another machine, and the kernel may know its speed."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return bool(sock.getsockname()[0] != sock.getpeername()[0])
    except OSError:  # its peer has gone
        return False


def _delivered(sock: socket.socket) -> tuple[int, float]:
    """Bytes that were acknowledged, and seconds in which bytes were on their way and the peer had
    room for more; none where it is not known.
    """
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
        acked, busy, no_room = (
            struct.unpack_from("=Q", told, at)[0] for at in (ACKED, BUSY, NO_ROOM)
        )
    except (OSError, struct.error):  # it is closed; an older kernel
        return 0, 0.0
    return acked, (busy - no_room) / 1e6
