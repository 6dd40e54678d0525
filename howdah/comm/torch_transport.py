"""Collectives over the point-to-point messages of a torch process group (gloo, over TCP).

gloo implements reduce-scatter as a full all-reduce, so only its messages are used here. An
operation is a list of rounds. Operations that are started together send their rounds together:

    all_reduce    round 1  every share to its owner; the owner adds
                  round 2  the own share to all other ranks

With the first round, a record of the call (signature.py) is sent to every peer in the operation.
gloo ends the process when a message is longer than the tensor that receives it. So the tag of the
payload is computed from the call: a message of another call is not received at all, and the records
show the reason. They need no extra round trip; their bytes are counted separately.

gloo's errors contain an address and no rank. The errors here name the peer whose message was
awaited: it ended, was silent, or lost its link (`heartbeat.py`).
"""

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import NamedTuple
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import Checks, flat, reduction
from howdah.comm.heartbeat import hang_up, is_down, keep_alive, open_sockets
from howdah.comm.pulse import Pulse
from howdah.comm.reduction import reduce_in_order
from howdah.comm.rounds import Calls, Message, Round, bytes_sent
from howdah.comm.signature import (
    CALL,
    RECORD,
    agree,
    both_ways,
    caller,
    disagreement,
    in_one_order,
    is_message,
    look_alike,
    number,
    pack,
    spell,
)
from howdah.comm.transport import (
    Counts,
    OneLink,
    PeerLost,
    SubgroupFactory,
    copy_own,
    shares,
)

ALIGN = 64  # bytes: a cache line
EXPLAINED = timedelta(seconds=5)  # of waiting for the full call of a rank that disagrees
FORGOTTEN = timedelta(seconds=1)  # of waiting for the end of a send after a link went down
SILENT = ("Timed out waiting", "Application timeout")  # in gloo's messages about a timeout

WHOLE = 1 << 16  # the most bytes of a full call
RECEIVED = {"send": "receive", "signal": "wait"}


class Posted(NamedTuple):
    """A message that has been started, to (`sent`) or from rank `peer`."""

    work: dist.Work
    peer: int
    sent: bool


class TorchTransport(OneLink):
    """The transport over a torch process group; see `transport.Transport` for the operations."""

    link = "tcp"
    among: SubgroupFactory

    def __init__(self, wire: dist.ProcessGroup, *, seconds: float) -> None:
        self._wire, self._seconds, self.site = wire, seconds, ""
        self._links: dict[str, int] = {}  # its sockets: descriptor numbers by name
        self.rank, self.size = wire.rank(), wire.size()
        self._checks = Checks(self.rank, self.size)
        self._closed = self._gave_up = False
        self._why = ""  # the reason of an abort that came from the pulse
        self.pulse: Pulse | None = None  # of all ranks; closed with this transport
        self._said = ""  # the running call, and the line that made it
        self.record_bytes = 0  # bytes of records sent, besides the payload
        self._peers = [(self.rank + hop) % self.size for hop in range(1, self.size)]
        self._calls = [0] * self.size  # number of calls so far with each peer
        self._together: list[tuple[dict[int, str], list[Round]]] | None = None
        self._room, self._used = torch.empty(0, dtype=torch.uint8), 0

    # -- operations: each is a list of rounds

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        x = self._reducible(x, op)
        counts = shares(x.numel(), self.size)
        own = x.split(counts)[self.rank]
        rounds = [self._scatter_round(own, x, counts, op), self._gather_round(x, own, counts)]
        return self._do(spell("all_reduce", x.dtype, [x.numel()], op), rounds)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        x, (counts, *_) = self._reducible(x, op), self._checks.cut(x, out, counts)
        out, call = flat(out), spell("reduce_scatter", x.dtype, counts, op)
        return self._do(call, [self._scatter_round(out, x, counts, op)])

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        out, x, (counts, *_) = flat(out), flat(x), self._checks.cut(out, x, counts)
        return self._do(spell("all_gather", x.dtype, counts), [self._gather_round(out, x, counts)])

    def broadcast(self, x: Tensor, root: int) -> int:
        x, root = flat(x), self._checks.peer(root)
        one = Round([], [(x, root)])
        if self.rank == root:
            one = Round([(x, peer) for peer in self._peers])
        return self._do(spell("broadcast", x.dtype, [x.numel()], f"root {root}"), [one])

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        x, root = self._reducible(x, op), self._checks.peer(root)
        one = Round([(x, root)])
        if self.rank == root:
            parts = self._land(x, root)
            one = Round([], self._from(parts), partial(reduce_in_order, x, parts, op))
        return self._do(spell("reduce", x.dtype, [x.numel()], f"{op}, root {root}"), [one])

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        out = self._checks.on_root(root, "out", out)
        (counts, *_), x = self._checks.cut(out, x, counts), flat(x)
        one = Round([(x, root)])
        if out is not None:
            parts = flat(out).split(list(counts))
            one = Round([], self._from(parts), partial(copy_own, parts[root], x))
        return self._do(spell("gather", x.dtype, counts, f"root {root}"), [one])

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        x = self._checks.on_root(root, "x", x)
        (counts, *_), out = self._checks.cut(x, out, counts), flat(out)
        one = Round([], [(out, root)])
        if x is not None:
            parts = flat(x).split(list(counts))
            one = Round(self._from(parts), [], partial(copy_own, out, parts[root]))
        return self._do(spell("scatter", out.dtype, counts, f"root {root}"), [one])

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        out, x = flat(out), flat(x)
        sent, received = self._checks.exchange(out, x, sent, received)
        outgoing, incoming = x.split(list(sent)), out.split(list(received))
        own = partial(copy_own, incoming[self.rank], outgoing[self.rank])
        calls = {}
        for peer in self._peers:
            pair = both_ways(self.rank, peer, [sent[peer], received[peer]])
            calls[peer] = spell("all_to_all", x.dtype, *pair)
        return self._do(calls, [Round(self._from(outgoing), self._from(incoming), own)])

    def barrier(self) -> None:
        self._do("barrier", [])

    def send(self, x: Tensor, to: int) -> int:
        x, to = flat(x), self._checks.peer(to, other=True)
        call = spell("send", x.dtype, [x.numel()], f"{self.rank} to {to}")
        return self._do({to: call}, [Round([(x, to)])])

    def receive(self, x: Tensor, source: int) -> None:
        x, source = flat(x), self._checks.peer(source, other=True)
        call = spell("send", x.dtype, [x.numel()], f"{source} to {self.rank}")
        self._do({source: call}, [Round([], [(x, source)])])

    def signal(self, to: int) -> None:
        to = self._checks.peer(to, other=True)
        self._do({to: f"signal({self.rank} to {to})"}, [])

    def wait(self, source: int) -> None:
        source = self._checks.peer(source, other=True)
        self._do({source: f"signal({source} to {self.rank})"}, [])

    @contextmanager
    def group(self) -> Iterator[None]:
        if self._together is not None:
            raise UserError("a group is open already: groups are not nested")
        together: list[tuple[dict[int, str], list[Round]]] = []
        self._together = together
        try:
            yield
        finally:
            self._together = None
        self._run(
            sorted(together, key=lambda started: not all(map(is_message, started[0].values())))
        )

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

    def abort(self) -> None:
        """Closes all connections: waits for messages of this rank, and its own waits, raise."""
        if not self._closed:
            self._gave_up = True
            if self._links:
                hang_up(self._links)
            else:  # not on Linux: the waits of this rank end at their timeout
                self._wire.abort()

    def lose(self, said: str) -> None:
        """Ends all waits with the error `said`. Called by the pulse when a rank is lost."""
        self._why = said
        self.abort()

    def close(self) -> None:
        """Ends the transport. Torch closes the connections when the process group is freed."""
        self._closed = True
        if self.pulse is not None:
            self.pulse.close()

    # -- the rounds

    def _reducible(self, x: Tensor, op: str) -> Tensor:
        x = flat(x)
        reduction(x, op)
        return x

    def _scatter_round(self, out: Tensor, x: Tensor, counts: Counts, op: str) -> Round:
        pieces = x.split(list(counts))
        parts = self._land(pieces[self.rank], self.rank)
        add = partial(reduce_in_order, out, parts, op)
        return Round(self._from(pieces), self._from(parts), add)

    def _gather_round(self, out: Tensor, x: Tensor, counts: Counts) -> Round:
        pieces = out.split(list(counts))
        own = partial(copy_own, pieces[self.rank], x)
        return Round([(x, peer) for peer in self._peers], self._from(pieces), own)

    def _from(self, pieces: Sequence[Tensor]) -> list[Message]:
        """Every piece but this rank's, as messages to or from the rank that it belongs to."""
        return [(pieces[peer], peer) for peer in self._peers]

    def _land(self, own: Tensor, rank: int) -> list[Tensor]:
        """For each rank a buffer of the size of `own`; at index `rank` it is `own` itself.

        The next call uses the same buffers again: new memory would be mapped page by page.
        """
        step = -(-own.nbytes // ALIGN) * ALIGN
        start, self._used = self._used, self._used + step * self.size
        if self._used > self._room.numel():
            self._room = torch.empty(self._used, dtype=torch.uint8)
        room = self._room[start : self._used].view(own.dtype).view(self.size, -1)
        return [own if r == rank else room[r, : own.numel()] for r in range(self.size)]

    # -- running rounds

    def exchange(self, call: Calls, rounds: Sequence[Round]) -> int:
        """Runs the rounds of a program (`rounds.py`)."""
        return self._do(call, [*rounds])

    def _do(self, calls: Calls, rounds: list[Round]) -> int:
        if isinstance(calls, str):
            calls = dict.fromkeys(self._peers, calls)
        if self._together is None:
            self._run([(calls, rounds)])
        else:
            self._together.append((calls, rounds))
        return bytes_sent(rounds)

    def _run(self, started: list[tuple[dict[int, str], list[Round]]]) -> None:
        if self._closed:
            raise UserError("this transport is closed")
        peers = sorted({peer for calls, _ in started for peer in calls})
        site, texts, records = self.site or caller(), {}, {}
        for peer in peers:
            self._calls[peer] += 1
            words = in_one_order(
                [calls[peer] for calls, _ in started if peer in calls], {self.rank, peer}
            )
            self._said = f"{words[0]} at {site}"
            if words[0].endswith(f" to {self.rank})"):  # both ends compare one name
                name, rest = self._said.split("(", 1)
                self._said = f"{RECEIVED[name]}({rest}"
            texts[peer] = number(self._calls[peer], "; ".join(words))
            records[peer] = pack(texts[peer], site)
        check = self._swap(texts, records)
        for together in zip_longest(*(rounds for _, rounds in started), fillvalue=Round()):
            work = self._post(together, records)
            check()
            for one in together:
                one.beside()
            self._finish(work)
            for one in together:
                one.after()
        check()
        self._used = 0

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

    def _post(self, rounds: Sequence[Round], records: dict[int, bytes]) -> list[Posted]:
        tags = {peer: 1 + crc32(record[:CALL]) % (2**31 - 1) for peer, record in records.items()}
        receives = [message for one in rounds for message in one.receives if message[0].numel()]
        sends = [message for one in rounds for message in one.sends if message[0].numel()]
        work = [self._receive(tensor, peer, tags[peer]) for tensor, peer in receives]
        return work + [self._send(tensor, peer, tags[peer]) for tensor, peer in sends]

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
            lost = self._why or f"rank {self.rank} gave up; what it says tells why"
        elif any(words in str(error) for words in SILENT) and not is_down(self._links):
            lost = f"rank {peer} was silent for {self._seconds:g} s, as rank {self.rank} saw"
        else:
            lost = f"rank {peer} ended, or its link is down, as rank {self.rank} saw"
        return PeerLost(f"{lost}; this rank called {self._said}")


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _read(text: Tensor) -> str:
    return text.numpy().tobytes().decode(errors="replace").strip(" \0")
