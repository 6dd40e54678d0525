"""Which link of a run is slow: the kernel knows how fast each connection has delivered what it was
given (`tcp_info`), and a link that was never fast is named.

    rank 1    with rank 0   118 MB/s    with rank 2   117 MB/s    with rank 3   12 MB/s   ← slow

A rank looks at its own links, so both ends of a slow link name it, and of a slow card all others
do. What is compared is the most that was ever delivered: others may use a link now and then. Sums
are right on a slow link, and a run goes on; it waits for that link, and nobody would know.
"""

import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from time import monotonic

from howdah.base.quantities import spell

EVERY = 0.5  # seconds between two looks
ENOUGH = 64 << 20  # bytes that were delivered on a link before it is compared
SLOW = 0.4  # of the median of the others
OTHERS = 2  # links that a slow one is compared with, at least
ACKED, RATE, SIZE = 120, 160, 168  # where struct tcp_info of linux/tcp.h has these, and its length


class SlowLinks:
    """The links of a rank with ranks of other machines.

    rank     this rank
    by_peer  connections with each peer
    """

    def __init__(self, rank: int, by_peer: Mapping[int, Sequence[socket.socket]]) -> None:
        self._rank = rank
        self._far = {peer: socks for peer, socks in by_peer.items() if _leaves(socks[0])}
        self._fastest = dict.fromkeys(self._far, 0.0)
        self._enough, self._told, self._looked = set[int](), set[int](), 0.0

    def look(self) -> list[str]:
        """A sentence for each link that is found to be slow, once. To be called often."""
        now = monotonic()
        if len(self._far) <= OTHERS or now - self._looked < EVERY:
            return []
        self._looked = now
        for peer, socks in self._far.items():
            found = [one for one in map(_delivered, socks) if one]
            self._fastest[peer] = max([self._fastest[peer], *(rate for _, rate in found)])
            if sum(acked for acked, _ in found) >= ENOUGH:
                self._enough.add(peer)
        return [self._sentence(peer) for peer in self._slow()]

    def _slow(self) -> list[int]:
        found = []
        for peer in sorted(self._enough - self._told):
            others = [self._fastest[one] for one in self._enough if one != peer]
            if len(others) >= OTHERS and self._fastest[peer] < SLOW * median(others):
                self._told.add(peer)
                found.append(peer)
        return found

    def _sentence(self, peer: int) -> str:
        others = median(self._fastest[one] for one in self._enough if one != peer)
        return (
            f"the link between ranks {self._rank} and {peer} has delivered "
            f"{spell(self._fastest[peer], 'bytes/s')} at most, others of rank {self._rank} "
            f"{spell(others, 'bytes/s')}: the run waits for it; `howdah doctor --hosts` measures "
            "all links"
        )


def _leaves(sock: socket.socket) -> bool:
    """Whether a connection leads to another machine, and the kernel may know its speed."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return bool(sock.getsockname()[0] != sock.getpeername()[0])
    except OSError:  # its peer has gone
        return False


def _delivered(sock: socket.socket) -> tuple[int, float] | None:
    """Bytes that were acknowledged, and bytes/s of the latest of them; None: it is not known."""
    with suppress(OSError, struct.error):  # it is closed; an older kernel
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
        (acked,), (rate,) = (struct.unpack_from("=Q", told, at) for at in (ACKED, RATE))
        return acked, float(rate)
    return None
