"""Messages of the torch backend: between two ranks, in any order with everything else.

    lane to p      header and payload of each message, in the order of their calls
    lane from p    reads a header; if no call wants its tag yet, keeps the payload

Each direction of each pair has a transport of its own (`pair_wires.py`). So a rank may send while
it receives, and while all ranks are in a collective.

    header   tag, bytes, the line that sent it
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from howdah.comm.engine import Engine
from howdah.comm.signature import Disagreement, caller
from howdah.comm.staging import DIRECT
from howdah.comm.torch_backend.pair_wires import PairWires
from howdah.comm.torch_backend.work import Lane, Queued, Work
from howdah.comm.transport import PeerLost, Transport

SITE = 120  # bytes of the sender's line
HEADER = struct.Struct(f"=qq{SITE}s")
NO_ROWS = (0, 0)


class Pairs:
    """The messages of one rank of a group."""

    def __init__(self, rank: int, size: int, wires: PairWires) -> None:
        self._rank, self._size, self._wires = rank, size, wires
        self._outgoing: dict[int, _Outgoing] = {}
        self._incoming: dict[int, _Incoming] = {}
        self._lock = Lock()

    def send(self, x: Tensor, to: int, tag: int, *, now: bool) -> Work | None:
        """Sends x; `now`: returns when x may be written, else at once."""
        with self._lock:
            if to not in self._outgoing:
                self._outgoing[to] = _Outgoing(self._wires, to)
        way, site = self._outgoing[to], ""
        if not now:
            site = caller()
        return way.start(lambda: way.send(x, tag, site or caller()), [x], now=now)

    def receive(self, x: Tensor, source: int, tag: int, *, now: bool) -> Work | None:
        """Receives x from one rank."""
        way = self._from(source)
        return way.start(lambda: way.receive(x, tag), [x], now=now)

    def receive_any(self, x: Tensor, tag: int) -> Work:
        """Receives x from the rank whose message with this tag is read first."""
        claim = _Claim(x, tag, self._size - 1)
        for peer in range(self._size):
            if peer != self._rank:
                way = self._from(peer)
                way.start(partial(way.offer, claim), [], now=False)
        return claim.work

    def _from(self, peer: int) -> "_Incoming":
        with self._lock:
            if peer not in self._incoming:
                self._incoming[peer] = _Incoming(self._wires, peer)
            return self._incoming[peer]

    def abort(self) -> None:
        """Ends all waits."""
        self._wires.abort()

    def close(self) -> None:
        """Ends all lanes; messages that nobody waits for are given up."""
        ways: list[_Way] = [*self._outgoing.values(), *self._incoming.values()]
        if any(way.busy for way in ways):
            self.abort()
        for way in ways:
            way.close()
        self._wires.close()


class _Way:
    """One direction between this rank and a peer."""

    def __init__(self, wires: PairWires, peer: int, *, out: bool) -> None:
        self.peer, self._wires, self._out = peer, wires, out
        self._made: Transport | None = None
        self._lane = Lane(f"{'to' if out else 'from'}-{peer}", self._starts, grace=0)

    def start(
        self, job: Callable[[], None], results: Sequence[Tensor], *, now: bool
    ) -> Work | None:
        """Runs a job on this lane; `now`: on this thread."""
        if now:
            self._lane.now(job)
            return None
        return self._lane.later(job, results)

    @property
    def wire(self) -> Transport:
        """The transport, made at the first message."""
        if self._made is None:
            self._made = self._wires.wire(self.peer, out=self._out)
        return self._made

    @property
    def other(self) -> int:
        """The peer's number in the transport."""
        return 1 - self.wire.rank

    def _starts(self, site: str) -> None:
        if self._made is not None:
            self._made.site = site

    @property
    def busy(self) -> bool:
        """Whether a message waits."""
        return self._lane.busy

    def close(self) -> None:
        """Ends the lane."""
        self._lane.close()


class _Outgoing(_Way):
    """Messages to a peer."""

    def __init__(self, wires: PairWires, peer: int) -> None:
        super().__init__(wires, peer, out=True)

    def send(self, x: Tensor, tag: int, site: str) -> None:
        """Sends a header and the elements."""
        flat = DIRECT.take(x).view(torch.uint8)
        head = HEADER.pack(tag, flat.numel(), site.encode()[-SITE:])
        header = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        if isinstance(self.wire, Engine):
            with self.wire.group():
                self.wire.send(header, self.other)
                self.wire.send(flat, self.other)
        else:
            self.wire.send(header, self.other)
            self.wire.send(flat, self.other)


class _Incoming(_Way):
    """Messages from a peer."""

    def __init__(self, wires: PairWires, peer: int) -> None:
        super().__init__(wires, peer, out=False)
        self._kept: deque[tuple[int, Tensor, str]] = deque()  # with tags that nobody wanted yet
        self._header: tuple[int, int, str] | None = None  # read, and not its payload

    def receive(self, x: Tensor, tag: int) -> None:
        """Receives the next message with this tag."""
        if self._take_kept(x, tag):
            return
        while True:
            found, size, site = self._read()
            if found == tag:
                self._payload(x, size, site)
                return
            self._keep()

    def offer(self, claim: "_Claim") -> None:
        """Receives for a call that takes a message of any rank, unless another lane has."""
        try:
            while not claim.taken:
                kept = any(tag == claim.tag for tag, _, _ in self._kept)
                if not kept and self._read()[0] != claim.tag:
                    self._keep()
                elif claim.take():
                    self.receive(claim.x, claim.tag)
                    claim.done(self.peer)
        except Exception as error:
            claim.fail(error)

    def _read(self) -> tuple[int, int, str]:
        """The next header; its payload has not been read."""
        if self._header is None:
            header = torch.empty(HEADER.size, dtype=torch.uint8)
            self.wire.receive(header, self.other)
            tag, size, site = HEADER.unpack(header.numpy().tobytes())
            self._header = tag, size, site.rstrip(b"\0").decode(errors="replace")
        return self._header

    def _keep(self) -> None:
        """Reads a message that nobody wants yet."""
        tag, size, site = self._read()
        room = torch.empty(size, dtype=torch.uint8)
        self.wire.receive(room, self.other)
        self._kept.append((tag, room, site))
        self._header = None

    def _take_kept(self, x: Tensor, tag: int) -> bool:
        for index, (other, payload, site) in enumerate(self._kept):
            if other == tag:
                del self._kept[index]
                self._check(x, payload.numel(), site)
                DIRECT.give(
                    x, DIRECT.take(x, NO_ROWS).view(torch.uint8).copy_(payload).view(x.dtype)
                )
                return True
        return False

    def _payload(self, x: Tensor, size: int, site: str) -> None:
        self._check(x, size, site)
        flat = DIRECT.take(x, NO_ROWS)
        self.wire.receive(flat.view(torch.uint8), self.other)
        self._header = None
        DIRECT.give(x, flat)

    def _check(self, x: Tensor, size: int, site: str) -> None:
        if x.nbytes != size:
            where = self.wire.site or caller()
            self.wire.abort()
            raise Disagreement(
                f"this rank receives {x.nbytes} bytes from rank {self.peer} at {where}, which sent "
                f"{size} at {site}"
            )


class _Claim:
    """A call that takes a message of any rank; the first lane that has one takes it."""

    def __init__(self, x: Tensor, tag: int, lanes: int) -> None:
        self.x, self.tag, self.taken = x, tag, False
        self._lock, self._left = Lock(), lanes
        self.work = Queued(None, _never, [x])

    def take(self) -> bool:
        """Whether the asking lane is the first."""
        with self._lock:
            first, self.taken = not self.taken, True
        return first

    def done(self, source: int) -> None:
        """The message has arrived."""
        self.work.source = source
        self.work.end()

    def fail(self, error: Exception) -> None:
        """A lane cannot receive; when none can, nobody waits any more."""
        with self._lock:
            self._left -= 1
        last = self.taken or not self._left or not isinstance(error, PeerLost)
        if last and not self.work.is_completed():
            self.work.error = error
            self.work.end()


def _never() -> None:
    raise AssertionError("lanes run it")
