"""Collectives over the point-to-point messages of a torch process group (gloo, over TCP).

gloo's own reduce-scatter is a whole all-reduce, so only its messages are used. An operation is a
list of rounds; the rounds of operations that are started together travel together:

    all_reduce    round 1  every share to its owner; the owner adds
                  round 2  the own share to everyone

A record of each call (signature.py) goes to every peer that takes part, beside the first round.
gloo ends the process where a message is longer than the tensor that waits for it, so the
payload's tag is made from the call: what belongs to another call is not received at all, and the
records tell why. They cost no round trip of their own; their bytes are counted apart.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.comm.reduction import reduce_in_order
from howdah.comm.signature import CALL, RECORD, caller, compare, pack, spell
from howdah.comm.transport import Among, Batch, Counts, Nothing, keep, shares

ALIGN = 64  # bytes: a cache line

Message = tuple[Tensor, int]  # a flat tensor, and the peer it goes to or comes from


@dataclass(frozen=True)
class Round:
    """Messages that travel together; then `after` is called."""

    sends: Sequence[Message] = ()
    receives: Sequence[Message] = ()
    after: Callable[[], object] = lambda: None


class TorchTransport:
    """The ranks of a torch process group."""

    link = "tcp"
    among: Among

    def __init__(self, wire: dist.ProcessGroup) -> None:
        self._wire, self.site = wire, ""
        self.rank, self.size = wire.rank(), wire.size()
        self.record_bytes = 0  # sent beside the payload, so that calls can be compared
        self._peers = [(self.rank + hop) % self.size for hop in range(1, self.size)]
        self._calls = [0] * self.size  # so far, with each peer
        self._together: list[tuple[dict[int, str], list[Round]]] | None = None
        self._room, self._used = torch.empty(0, dtype=torch.uint8), 0

    # -- operations: each is a list of rounds

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        counts = shares(x.numel(), self.size)
        own = x.split(counts)[self.rank]
        rounds = [self._scatter_round(own, x, counts, op), self._gather_round(x, own, counts)]
        return self._do(spell("all_reduce", x.dtype, [x.numel()], op), rounds)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        call = spell("reduce_scatter", x.dtype, counts, op)
        return self._do(call, [self._scatter_round(out, x, counts, op)])

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        return self._do(spell("all_gather", x.dtype, counts), [self._gather_round(out, x, counts)])

    def broadcast(self, x: Tensor, root: int) -> int:
        one = Round([], [(x, root)])
        if self.rank == root:
            one = Round([(x, peer) for peer in self._peers])
        return self._do(spell("broadcast", x.dtype, [x.numel()], f"root {root}"), [one])

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        one = Round([(x, root)])
        if self.rank == root:
            parts = self._land(x, root)
            one = Round([], self._from(parts), partial(reduce_in_order, x, parts, op))
        return self._do(spell("reduce", x.dtype, [x.numel()], f"{op}, root {root}"), [one])

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        one = Round([(x, root)])
        if out is not None and self.rank == root:
            parts = out.split(list(counts))
            one = Round([], self._from(parts), partial(keep, parts[root], x))
        return self._do(spell("gather", x.dtype, counts, f"root {root}"), [one])

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        one = Round([], [(out, root)])
        if x is not None and self.rank == root:
            parts = x.split(list(counts))
            one = Round(self._from(parts), [], partial(keep, out, parts[root]))
        return self._do(spell("scatter", out.dtype, counts, f"root {root}"), [one])

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        outgoing, incoming = x.split(list(sent)), out.split(list(received))
        own = partial(keep, incoming[self.rank], outgoing[self.rank])
        calls = {}
        for peer in self._peers:
            there, back = sent[peer], received[peer]
            pair = (there, back) if self.rank < peer else (back, there)  # the lower rank's first
            calls[peer] = spell("all_to_all", x.dtype, pair)
        return self._do(calls, [Round(self._from(outgoing), self._from(incoming), own)])

    def barrier(self) -> None:
        self._do("barrier", [])

    def send(self, x: Tensor, to: int) -> int:
        call = spell("send", x.dtype, [x.numel()], f"{self.rank} to {to}")
        return self._do({to: call}, [Round([(x, to)])])

    def receive(self, x: Tensor, source: int) -> None:
        call = spell("send", x.dtype, [x.numel()], f"{source} to {self.rank}")
        self._do({source: call}, [Round([], [(x, source)])])

    @contextmanager
    def group(self) -> Iterator[Batch]:
        together: list[tuple[dict[int, str], list[Round]]] = []
        self._together = together
        try:
            yield Nothing()
        finally:
            self._together = None
        self._run(together)

    def give_up(self) -> None:
        """Closes all connections: whoever waits for a message of this rank is told."""
        self._wire.abort()

    def close(self) -> None:
        """Torch closes its connections when the process group is let go."""

    # -- the rounds

    def _scatter_round(self, out: Tensor, x: Tensor, counts: Counts, op: str) -> Round:
        pieces = x.split(list(counts))
        parts = self._land(pieces[self.rank], self.rank)
        add = partial(reduce_in_order, out, parts, op)
        return Round(self._from(pieces), self._from(parts), add)

    def _gather_round(self, out: Tensor, x: Tensor, counts: Counts) -> Round:
        pieces = out.split(list(counts))
        own = partial(keep, pieces[self.rank], x)
        return Round([(x, peer) for peer in self._peers], self._from(pieces), own)

    def _from(self, pieces: Sequence[Tensor]) -> list[Message]:
        """Every piece but the own, with the rank that it belongs to."""
        return [(pieces[peer], peer) for peer in self._peers]

    def _land(self, own: Tensor, rank: int) -> list[Tensor]:
        """Room for a tensor like `own` from every peer, and `own` itself at `rank`.

        The room is used again by the next call: fresh memory would be mapped page by page.
        """
        step = -(-own.nbytes // ALIGN) * ALIGN
        start, self._used = self._used, self._used + step * self.size
        if self._used > self._room.numel():
            self._room = torch.empty(self._used, dtype=torch.uint8)
        room = self._room[start : self._used].view(own.dtype).view(self.size, -1)
        return [own if r == rank else room[r, : own.numel()] for r in range(self.size)]

    # -- how they travel

    def _do(self, calls: str | dict[int, str], rounds: list[Round]) -> int:
        if isinstance(calls, str):
            calls = dict.fromkeys(self._peers, calls)
        if self._together is None:
            self._run([(calls, rounds)])
        else:
            self._together.append((calls, rounds))
        return sum(tensor.nbytes for one in rounds for tensor, _ in one.sends)

    def _run(self, started: list[tuple[dict[int, str], list[Round]]]) -> None:
        peers = sorted({peer for calls, _ in started for peer in calls})
        place = self.site or caller()
        records = {}
        for peer in peers:
            self._calls[peer] += 1
            words = [calls[peer] for calls, _ in started if peer in calls]
            records[peer] = pack(self._calls[peer], "; ".join(words), place)
        check = self._swap(records)
        for together in zip_longest(*(rounds for _, rounds in started), fillvalue=Round()):
            work = self._post(together, records)
            check()
            for message in work:
                message.wait()
            for one in together:
                one.after()
        check()
        self._used = 0

    def _swap(self, records: dict[int, bytes]) -> Callable[[], None]:
        """Starts to exchange records; what it returns waits, and compares them the first time."""
        theirs = {peer: torch.empty(RECORD, dtype=torch.uint8) for peer in records}
        work = [self._wire.recv([record], peer, 0) for peer, record in theirs.items()]
        for peer, record in records.items():
            outgoing = torch.frombuffer(bytearray(record), dtype=torch.uint8)
            work.append(self._wire.send([outgoing], peer, 0))
            self.record_bytes += RECORD

        def check() -> None:
            while work:
                work.pop(0).wait()
            for peer, record in theirs.items():
                compare(self.rank, records[peer], peer, record.numpy().tobytes())
            theirs.clear()

        return check

    def _post(self, rounds: Sequence[Round], records: dict[int, bytes]) -> list[dist.Work]:
        tags = {peer: 1 + crc32(record[:CALL]) % (2**31 - 1) for peer, record in records.items()}
        receives = [message for one in rounds for message in one.receives if message[0].numel()]
        sends = [message for one in rounds for message in one.sends if message[0].numel()]
        work = [self._wire.recv([tensor], peer, tags[peer]) for tensor, peer in receives]
        return work + [self._wire.send([tensor], peer, tags[peer]) for tensor, peer in sends]


def torch_transport(
    store: dist.Store, *, rank: int, size: int, seconds: float = 600
) -> TorchTransport:
    """Connects `size` ranks that share a store. A silent peer is given up after `seconds`."""
    gloo: Any = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
    return TorchTransport(gloo)
