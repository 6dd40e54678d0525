"""Collectives over the point-to-point messages of a torch process group (gloo, over TCP).

gloo implements reduce-scatter as a full all-reduce, so only its messages are used here, in rounds
(`direct.py`).

gloo ends the process when a message is longer than the tensor that receives it. So the tag of the
payload is computed from the call: a message of another call is not received at all, and the records
show the reason. They need no extra round trip; their bytes are counted separately.

gloo's errors contain an address and no rank. The errors here name the peer whose message was
awaited: it ended, was silent, or lost its link (`heartbeat.py`).
"""

from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from datetime import timedelta
from heapq import heappop, heappush
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.comm.direct import Direct, Spelled
from howdah.comm.flow import Flows
from howdah.comm.heartbeat import hang_up, is_down, keep_alive, open_sockets
from howdah.comm.signature import CALL, RECORD, agree, caller, disagreement, look_alike
from howdah.comm.transport import PeerLost, gave_up

EXPLAINED = timedelta(seconds=5)  # of waiting for the full call of a rank that disagrees
FORGOTTEN = timedelta(seconds=1)  # of waiting for the end of a send after a link went down
SILENT = ("Timed out waiting", "Application timeout")  # in gloo's messages about a timeout

WHOLE = 1 << 16  # the most bytes of a full call


class Posted(NamedTuple):
    """A message that has been started, to (`sent`) or from rank `peer`."""

    work: dist.Work
    peer: int
    sent: bool


class TorchTransport(Direct):
    """The transport over a torch process group; see `transport.Transport` for the operations."""

    def __init__(self, wire: dist.ProcessGroup, *, seconds: float) -> None:
        super().__init__(wire.rank(), wire.size())
        self._wire, self._seconds = wire, seconds
        self._links: dict[str, int] = {}  # its sockets: descriptor numbers by name

    def greet(self, known: Container[str], *, heartbeats: bool) -> None:
        """Exchanges one byte with every peer, which opens all links, and notes their sockets.

        known       names of the sockets that existed before: they are no links
        heartbeats  set heartbeats on the links
        """
        self._said = f"connect at {caller()}"
        bytes = [torch.zeros(1, dtype=torch.uint8) for _ in range(2 * self.size)]
        work = [self._receive(bytes.pop(), peer, 0) for peer in self._peers]
        self._finish(work + [self._send(bytes.pop(), peer, 0) for peer in self._peers])
        self._links = {name: n for name, n in open_sockets().items() if name not in known}
        if heartbeats:
            keep_alive(self._links)

    def abort(self, why: str = "") -> None:
        """Closes all connections: waits for messages of this rank, and its own waits, raise."""
        if not self._closed:
            self._gave_up = True
            if self._links:
                hang_up(self._links)
            else:  # not on Linux: the waits of this rank end at their timeout
                self._wire.abort()

    def _carry(self, spelled: Spelled, flows: Flows) -> None:
        texts, records = spelled
        tags = {peer: 1 + crc32(record[:CALL]) % (2**31 - 1) for peer, record in records.items()}
        check = self._swap(texts, records)
        under_way: list[tuple[int, int, list[Posted]]] = []  # turn, number, its messages

        def start(numbers: Sequence[int]) -> None:
            for number in numbers:
                task = flows.tasks[number]
                post = self._send if task.sends else self._receive
                posted = [post(x, task.peer, tags[task.peer]) for x in task.tensors]
                heappush(under_way, (task.turn, number, posted))

        def wait() -> None:
            """For the message of the first turn: those of later ones may depend on it."""
            _, number, posted = heappop(under_way)
            self._finish(posted)
            flows.done(number)

        for peer in records:
            both = (flows.first(peer, sends=sends) for sends in (False, True))
            start([number for number in both if number is not None])
        check()
        flows.run(start, wait)

    def _swap(self, texts: dict[int, str], records: dict[int, bytes]) -> Callable[[], None]:
        """Starts to exchange records. Returns a function that waits for them, and compares them at
        its first call.
        """
        theirs = {peer: torch.empty(RECORD, dtype=torch.uint8) for peer in records}
        work = [self._receive(record, peer, 0) for peer, record in theirs.items()]
        for peer, record in records.items():
            work.append(self._send(_bytes(record), peer, 0))
            self.record_bytes += RECORD

        def check() -> None:
            self._finish(work)
            heard = {peer: record.numpy().tobytes() for peer, record in theirs.items()}
            theirs.clear()
            alike = [peer for peer, record in heard.items() if look_alike(records[peer], record)]
            wholes = self._swap_wholes(alike, texts) if alike else {}
            for peer, record in heard.items():
                if not agree(records[peer], record):
                    whole = texts[peer], wholes.get(peer) or texts[peer]
                    raise disagreement(self.rank, records[peer], peer, record, whole)

        return check

    def _swap_wholes(self, peers: list[int], texts: dict[int, str]) -> dict[int, str]:
        """Exchanges full calls with those peers whose records look equal but are not."""
        heard = {peer: torch.zeros(WHOLE, dtype=torch.uint8) for peer in peers}
        with suppress(RuntimeError):  # a peer has aborted: its call stays cut
            work = [self._receive(text, peer, 0) for peer, text in heard.items()]
            for peer in peers:
                text = texts[peer].encode()[:WHOLE].ljust(WHOLE)
                work.append(self._send(_bytes(text), peer, 0))
            for message in work:
                message.work.wait(EXPLAINED)
        return {peer: _read(text) for peer, text in heard.items()}

    # -- one message

    def _send(self, tensor: Tensor, peer: int, tag: int) -> Posted:
        try:
            return Posted(self._wire.send([tensor], peer, tag), peer, sent=True)
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def _receive(self, tensor: Tensor, peer: int, tag: int) -> Posted:
        try:
            return Posted(self._wire.recv([tensor], peer, tag), peer, sent=False)
        except RuntimeError as error:
            raise self._lost(peer, error) from None

    def _finish(self, work: list[Posted]) -> None:
        """Waits for all these messages, in their order."""
        down: bool | None = None
        while work:
            message, peer, sent = work.pop(0)
            if sent and down is None:
                down = is_down(self._links)
            try:
                if self._gave_up:  # by another thread: a wait that starts now might not end
                    raise RuntimeError
                # gloo drops a send that it started as the link went down; its wait has no end.
                message.wait(FORGOTTEN) if sent and down else message.wait()
            except RuntimeError as error:
                raise self._lost(peer, error) from None

    def _lost(self, peer: int, error: RuntimeError) -> PeerLost:
        """The error for a failed connection to `peer`, in the form of the engine's errors."""
        if self._gave_up:
            lost = self._why or gave_up(self.rank)
        elif any(words in str(error) for words in SILENT) and not is_down(self._links):
            lost = f"rank {peer} was silent for {self._seconds:g} s, as rank {self.rank} saw"
        else:
            ended = f"rank {peer} ended, or its link is down, as rank {self.rank} saw"
            lost = self.cause(ended)
        return PeerLost(f"{lost}; this rank called {self._said}")


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read(text: Tensor) -> str:
    return text.numpy().tobytes().decode(errors="replace").strip(" \0")
