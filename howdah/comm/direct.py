"""Collectives in which every rank sends to every other one directly, as rounds of messages.

An operation is a list of rounds. Operations that are started together send their rounds together:

    all_reduce    round 1  every share to its owner; the owner adds
                  round 2  the own share to all other ranks

Over TCP what is long goes in turns: in the k-th to the k-th rank behind, from the k-th before. At
all times a card sends one message and receives one, where three at once would wait for each other's
acknowledgements, and for the slowest (`paced`). What is added, and in which order, is the same.
Over gloo all goes at once, which is faster there.

What carries the messages, gloo (`torch_transport.py`) or TCP (`tcp.py`), runs the rounds, and the
flows of programs (`flow.py`). With the first messages it sends a record of the call
(`signature.py`) to every peer in the operation, and no payload of a call is taken before the
records were found equal. Records need no round trip of their own; their bytes are counted apart.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import Checks, flat, reduction
from howdah.comm.flow import Flow, Flows, as_one, by_meetings, in_turns
from howdah.comm.flow import bytes_sent as bytes_in
from howdah.comm.pulse import Pulse
from howdah.comm.reduction import reduce_in_order
from howdah.comm.rounds import Calls, Message, Round, Work, bytes_sent
from howdah.comm.signature import (
    both_ways,
    caller,
    in_one_order,
    is_message,
    number,
    pack,
    spell,
)
from howdah.comm.transport import Counts, OneLink, SubgroupFactory, copy_own, shares

ALIGN = 64  # bytes: a cache line
LONG = 128 << 10  # bytes of a message that goes in turns
RECEIVED = {"send": "receive", "signal": "wait"}


class Started(NamedTuple):
    """An operation: calls by peer, and what runs: rounds, or the flow of a program."""

    calls: dict[int, str]
    rounds: list[Round]
    flow: Flow


class Spelled(NamedTuple):
    """Operations that start together, as each peer compares them: by peer, text and record."""

    texts: dict[int, str]
    records: dict[int, bytes]


class Direct(OneLink, ABC):
    """A transport over messages between all pairs; see `transport.Transport` for the operations."""

    link = "tcp"
    turns = False  # whether long messages go in turns
    among: SubgroupFactory

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.site = rank, size, ""
        self._checks = Checks(rank, size)
        self._closed = self._gave_up = False
        self._why = ""  # the reason of an abort that came from the pulse
        self.cause: Callable[[str], str] = str  # who was lost first, by the pulse, or as was seen
        self.pulse: Pulse | None = None  # of all ranks; closed with this transport
        self._said = ""  # the running call, and the line that made it
        self.record_bytes = 0  # bytes of records sent, besides the payload
        self._peers = [(rank + hop) % size for hop in range(1, size)]
        self._calls = [0] * size  # number of calls so far with each peer
        self._together: list[Started] | None = None
        self._room, self._used = torch.empty(0, dtype=torch.uint8), 0

    @abstractmethod
    def abort(self, why: str = "") -> None:
        """Ends all waits of all ranks for this one, and its own; see `transport.Transport`."""

    @abstractmethod
    def _carry(self, spelled: Spelled, flows: Flows) -> None:
        """Compares the calls with all peers, and runs the flows. Raises Disagreement, PeerLost."""

    def lose(self, said: str) -> None:
        """Ends all waits with the error `said`. Called by the pulse when a rank is lost."""
        self._why = said
        self.abort(said)

    def close(self) -> None:
        """Ends the transport."""
        self._closed = True
        if self.pulse is not None:
            self.pulse.close()

    # -- operations: each is a list of rounds

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        x = self._reducible(x, op)
        counts = shares(x.numel(), self.size)
        own = x.split(counts)[self.rank]
        sums, (first, *rest) = self._scatter(own, x, counts, op), self._gather(x, own, counts)
        rounds = [*sums, first._replace(meets=len(sums) > 1), *rest]
        return self._do(spell("all_reduce", x.dtype, [x.numel()], op), rounds)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        x, (counts, *_) = self._reducible(x, op), self._checks.cut(x, out, counts)
        out, call = flat(out), spell("reduce_scatter", x.dtype, counts, op)
        return self._do(call, self._scatter(out, x, counts, op))

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        out, x, (counts, *_) = flat(out), flat(x), self._checks.cut(out, x, counts)
        return self._do(spell("all_gather", x.dtype, counts), self._gather(out, x, counts))

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
        every = Round(self._from(outgoing), self._from(incoming), own)
        return self._do(calls, self._paced(every, (*sent, *received), x))

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
        together: list[Started] = []
        self._together = together
        try:
            yield
        finally:
            self._together = None
        self._run(
            sorted(together, key=lambda started: not all(map(is_message, started.calls.values())))
        )

    # -- the rounds

    def _reducible(self, x: Tensor, op: str) -> Tensor:
        x = flat(x)
        reduction(x, op)
        return x

    def _scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str) -> list[Round]:
        pieces = x.split(list(counts))
        parts = self._land(pieces[self.rank], self.rank)
        add = partial(reduce_in_order, out, parts, op)
        return self._paced(Round(self._from(pieces), self._from(parts), add), counts, x)

    def _gather(self, out: Tensor, x: Tensor, counts: Counts) -> list[Round]:
        pieces = out.split(list(counts))
        own = partial(copy_own, pieces[self.rank], x)
        every = Round([(x, peer) for peer in self._peers], self._from(pieces), own)
        return self._paced(every, counts, x)

    def _paced(self, every: Round, counts: Counts, x: Tensor) -> list[Round]:
        """The round in turns, if any of these messages is long. Of operations with several rounds
        all ranks know all counts: so they agree on how many turns there are.
        """
        long = max(counts) * x.element_size() >= LONG
        return paced(self.rank, self.size, every) if self.turns and long else [every]

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
        """Runs rounds (`rounds.py`)."""
        return self._do(call, [*rounds])

    def carry(self, call: Calls, work: Work) -> int:
        """Runs a program (`programs.py`)."""
        return self.run(call, work.flow())

    def run(self, call: Calls, flow: Flow) -> int:
        """Runs a flow (`flow.py`); returns the bytes that this rank sends."""
        return self._do(call, [], flow)

    def _do(self, calls: Calls, rounds: list[Round], flow: Flow | None = None) -> int:
        if isinstance(calls, str):
            calls = dict.fromkeys(self._peers, calls)
        started = Started(calls, rounds, flow or [])
        if self._together is None:
            self._run([started])
        else:
            self._together.append(started)
        return bytes_sent(rounds) + bytes_in(started.flow)

    def _run(self, started: list[Started]) -> None:
        if self._closed:
            raise UserError("this transport is closed")
        flows = [one.flow for one in started]
        for rounds in by_meetings(as_one([one.rounds for one in started])):
            self._run_part(started, Flows([in_turns(rounds), *flows]))
            flows = []
        self._used = 0

    def _run_part(self, started: list[Started], flows: Flows) -> None:
        """Compares the calls of the operations with all peers, and runs a part of them."""
        peers = sorted({peer for one in started for peer in one.calls})
        site, texts, records = self.site or caller(), {}, {}
        for peer in peers:
            self._calls[peer] += 1
            words = in_one_order(
                [one.calls[peer] for one in started if peer in one.calls], {self.rank, peer}
            )
            self._said = f"{words[0]} at {site}"
            if words[0].endswith(f" to {self.rank})"):  # both ends compare one name
                name, rest = self._said.split("(", 1)
                self._said = f"{RECEIVED[name]}({rest}"
            texts[peer] = number(self._calls[peer], "; ".join(words))
            records[peer] = pack(texts[peer], site)
        try:
            self._carry(Spelled(texts, records), flows)
        except BaseException:
            flows.give_up()
            raise


def paced(rank: int, size: int, every: Round) -> list[Round]:
    """A round in which each rank exchanges with all others, in as many turns as there are ranks:
    long messages go in the turn that is the distance of their ends, short ones in turn 0. Both ends
    know the size of a message, so they agree on its turn, and every rank has all turns.

    A rank that is ahead of the others waits after turn 0, with which the calls are compared: else
    it would send to one that still receives from another, and the turns would never meet again. So
    the calls of an all-reduce are compared a second time between its halves.
    """
    if size == 2:
        return [every]
    turns: list[tuple[list[Message], list[Message]]] = [([], []) for _ in range(size)]
    for way, messages in enumerate((every.sends, every.receives)):
        for tensor, peer in messages:
            distance = (rank - peer if way else peer - rank) % size
            turns[distance if tensor.nbytes >= LONG else 0][way].append((tensor, peer))
    *rounds, last = (Round(*both) for both in turns)
    return [*rounds, last._replace(after=every.after)]
