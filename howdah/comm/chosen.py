"""The transport that runs chosen algorithms, over the messages of another transport.

    group.all_reduce(x)
      └ Chosen          which program? (`collectives/choice.py`)    none: the transport's own way
          └ way_of      where its chunks lie (`collectives/places.py`)
              └ carry       its messages: over TCP or gloo, or the engine's

All ranks choose alike, by operation and size, and each call is compared between them with the name
of its algorithm before anything is written. Tensors of GPUs are not concerned: NCCL chooses itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.distributed import Store

from howdah.base.errors import UserError, nearest, shown
from howdah.collectives.choice import (
    FORWARDING,
    Chosen,
    chunk_sizes,
    everywhere,
    placement,
    program_of,
    rules,
    unusable,
)
from howdah.collectives.places import GIVEN, KEPT, SCRATCH, Way, way_of
from howdah.comm.both import Both
from howdah.comm.checks import Checks, flat, reduction
from howdah.comm.direct import Direct
from howdah.comm.lane import Lane
from howdah.comm.near import Near
from howdah.comm.programs import OnTensors
from howdah.comm.rounds import Calls, Carrier
from howdah.comm.signature import both_ways, spell
from howdah.comm.staging import Scratch
from howdah.comm.transport import Counts, SubgroupFactory, Transport
from howdah.plan.comm import DIRECT, Algorithms

KEPT_WAYS = 512  # ways that are remembered; a training step has some dozen sizes
NOTHING = torch.empty(0)


def choosing(transport: Transport, algorithms: Algorithms) -> Transport:
    """`transport` with these algorithms, also for its subgroups; itself if none is chosen.

    Raises UserError where the transport has its own, as MPI.
    """
    if not algorithms or transport.size == 1:
        return transport
    host = transport.host if isinstance(transport, Both) else transport
    if not hasattr(host, "exchange"):
        raise UserError(
            f"the algorithms of {host.link} are its own: leave algorithm out, or take "
            "transport=engine or transport=torch"
        )
    return Choosing(transport, cast(Carrier, host), algorithms)


def carrier_of(transport: Transport) -> Carrier | Near:
    """What carries the messages of programs between the ranks of a group. A Near is to be closed.

    Raises UserError where the transport has algorithms of its own, as MPI.
    """
    wire = beneath(transport)
    host = wire.host if isinstance(wire, Both) else wire
    if not hasattr(host, "exchange"):
        raise UserError(f"{host.link} carries no rounds of messages: take transport=torch")
    return _near(wire, host) or cast(Carrier, host)


def _near(wire: Transport, host: Transport) -> Near | None:
    """The shared memory of a group's ranks on this machine, where the group spans several."""
    wires = host.among.wires
    if len(wires.nodes) != host.size or wires.inside == host.link:
        return None
    here = [rank for rank, node in enumerate(wires.nodes) if node == wires.nodes[host.rank]]
    alone = len(here) in (1, host.size)
    return None if alone else Near(cast(Direct, host), wire.among(here), here)


def algorithms_of(chosen: str | Mapping[str, str]) -> Algorithms:
    """The algorithms that a caller names, by one text or by operation. Raises UserError."""
    if isinstance(chosen, str):
        return everywhere(chosen) if chosen else DIRECT
    known = DIRECT.__dataclass_fields__
    for op, text in chosen.items():
        if op not in known:
            raise UserError(f"no operation is called {shown(op)}{nearest(str(op), known)}")
        rules(op, text)
    return Algorithms(**chosen)


def require_usable(algorithms: Algorithms, ranks: int) -> None:
    """Raises UserError for algorithms that cannot use so many ranks."""
    for op in algorithms.by_operation:
        for problem in unusable(algorithms, op, ranks):
            raise UserError(problem)


def beneath(transport: Transport) -> Transport:
    """The transport without chosen algorithms, for a few scalars, whose time is that of a way."""
    return transport.wire if isinstance(transport, Choosing) else transport


def runs_program(transport: Transport, op: str, x: Tensor) -> bool:
    """Whether the transport has a chosen program for an operation on x."""
    return isinstance(transport, Choosing) and transport.chosen(op, x, x.nbytes) is not None


def near_sent(transport: Transport) -> int:
    """Bytes that programs have sent over shared memory, in a group that spans machines."""
    near = transport.near if isinstance(transport, Choosing) else None
    return near.sent if near else 0


class _Among:
    """Creates subgroups with the same algorithms."""

    def __init__(self, among: SubgroupFactory, algorithms: Algorithms) -> None:
        self._among, self._algorithms, self.wires = among, algorithms, among.wires

    @property
    def aside(self) -> Store | None:
        return self._among.aside

    @property
    def address(self) -> str:
        return self._among.address

    def __call__(self, ranks: Sequence[int]) -> Transport:
        return choosing(self._among(ranks), self._algorithms)


class Choosing:
    """A transport with chosen algorithms; see `transport.Transport` for the operations.

    wire        the transport beneath
    host        the wire of its CPU tensors, which has `exchange`
    near        shared memory beside it, between ranks of one machine
    """

    def __init__(self, wire: Transport, host: Carrier, algorithms: Algorithms) -> None:
        self.wire, self._host, self.algorithms = wire, host, algorithms
        self.rank, self.size, self.link = wire.rank, wire.size, wire.link
        self.checked = wire.checked
        self.send, self.receive = wire.send, wire.receive
        self.signal, self.wait = wire.signal, wire.wait
        self.allocate, self.check, self.compare = wire.allocate, wire.check, wire.compare
        self.near = _near(wire, host)
        self.among: SubgroupFactory = _Among(wire.among, algorithms)
        nodes = host.among.wires.nodes
        self._placed = placement(nodes) if len(nodes) == self.size else (None, ())
        self._checks = Checks(self.rank, self.size)
        self._scratch, self._open = Scratch(), False
        self._ways: dict[tuple[int, tuple[int, ...]], Way] = {}

    @property
    def staging(self) -> int:
        """Bytes of the staging of its programs: as much as the largest has needed."""
        return self._scratch.nbytes

    @property
    def site(self) -> str:
        """The line to name in errors."""
        return self.wire.site

    @site.setter
    def site(self, line: str) -> None:
        self.wire.site = line

    # -- operations

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        if (one := self.chosen("all_reduce", x, x.nbytes)) is None:
            return self.wire.all_reduce(x, op)
        x = self._reducible(x, op)
        call = spell("all_reduce", x.dtype, [x.numel()], f"{op}, {one.spelled}")
        return self._run(one, call, [x.numel()], (x, x), op)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        if (one := self.chosen("reduce_scatter", x, x.nbytes)) is None:
            return self.wire.reduce_scatter(out, x, counts, op)
        x, (counts, *_) = self._reducible(x, op), self._checks.cut(x, out, counts)
        call = spell("reduce_scatter", x.dtype, counts, f"{op}, {one.spelled}")
        return self._run(one, call, counts, (x, flat(out)), op)

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        if (one := self.chosen("all_gather", x, out.nbytes)) is None:
            return self.wire.all_gather(out, x, counts)
        out, x, (counts, *_) = flat(out), flat(x), self._checks.cut(out, x, counts)
        return self._run(one, spell("all_gather", x.dtype, counts, one.spelled), counts, (x, out))

    def broadcast(self, x: Tensor, root: int) -> int:
        root = self._checks.peer(root)
        if (one := self.chosen("broadcast", x, x.nbytes, root)) is None:
            return self.wire.broadcast(x, root)
        x = flat(x)
        call = spell("broadcast", x.dtype, [x.numel()], f"root {root}, {one.spelled}")
        return self._run(one, call, [x.numel()], (x if self.rank == root else None, x))

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        root = self._checks.peer(root)
        if (one := self.chosen("reduce", x, x.nbytes, root)) is None:
            return self.wire.reduce(x, root, op)
        x = self._reducible(x, op)
        call = spell("reduce", x.dtype, [x.numel()], f"{op}, root {root}, {one.spelled}")
        return self._run(one, call, [x.numel()], (x, x if self.rank == root else None), op)

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        size = sum(counts) * x.element_size()
        if (one := self.chosen("gather", x, size, root)) is None:
            return self.wire.gather(out, x, root, counts)
        out = self._checks.on_root(root, "out", out)
        (counts, *_), x = self._checks.cut(out, x, counts), flat(x)
        call = spell("gather", x.dtype, counts, f"root {root}, {one.spelled}")
        return self._run(one, call, counts, (x, None if out is None else flat(out)))

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        size = sum(counts) * out.element_size()
        if (one := self.chosen("scatter", out, size, root)) is None:
            return self.wire.scatter(out, x, root, counts)
        x = self._checks.on_root(root, "x", x)
        (counts, *_), out = self._checks.cut(x, out, counts), flat(out)
        call = spell("scatter", out.dtype, counts, f"root {root}, {one.spelled}")
        return self._run(one, call, counts, (None if x is None else flat(x), out))

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        if (one := self.chosen("all_to_all", x, 0)) is None:
            return self.wire.all_to_all(out, x, sent, received)
        out, x = flat(out), flat(x)
        sent, received = self._checks.exchange(out, x, sent, received)
        told, table = 0, [0] * self.size**2
        if f"all_to_all/{one.program.name}" in FORWARDING:
            table, told = self._table(sent, received)
        for peer in range(self.size):
            table[self.rank * self.size + peer] = sent[peer]
            table[peer * self.size + self.rank] = received[peer]
        calls: dict[int, str] = {}
        for peer in range(self.size):
            if peer != self.rank:
                counts, way = both_ways(self.rank, peer, [sent[peer], received[peer]])
                calls[peer] = spell("all_to_all", x.dtype, counts, f"{way}, {one.spelled}")
        return told + self._run(one, calls, table, (x, out))

    def _table(self, sent: Counts, received: Counts) -> tuple[list[int], int]:
        """What each rank has for each other one, for ranks that pass it on; and the bytes that this
        rank sends to tell its own.
        """
        if self._open:
            raise UserError(
                "all_to_all by an algorithm that forwards tells all ranks the sizes first: it "
                "starts alone, outside of together(); or take pairwise"
            )
        own = torch.tensor([*sent], dtype=torch.int64)
        heard = torch.empty(self.size * self.size, dtype=torch.int64)
        told = self.wire.all_gather(heard, own, [self.size] * self.size)
        table = heard.tolist()
        if (mine := table[self.rank :: self.size]) != [*received]:
            raise UserError(
                f"all_to_all: rank {self.rank} expects {[*received]} elements of the ranks, which "
                f"have {mine} for it"
            )
        return table, told

    def barrier(self) -> None:
        """A program's messages have a byte each, and are not counted, as the calls' records."""
        if (one := self.chosen("barrier", NOTHING, 0)) is None:
            self.wire.barrier()
            return
        own, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(self.size, dtype=torch.uint8)
        self._run(one, f"barrier({one.spelled})", [1] * self.size, (own, heard))

    # -- how they run

    def chosen(self, op: str, x: Tensor, size: int, root: int = 0) -> Chosen | None:
        """The program of an operation on x; None for the transport's own.

        size  bytes of the whole vector
        """
        if not x.is_cpu or not getattr(self.algorithms, op):
            return None
        each, order = self._placed
        try:
            return program_of(
                self.algorithms,
                op,
                size=size,
                ranks=self.size,
                root=root,
                per_node=each,
                order=order,
            )
        except UserError:  # refused for the run's groups before; others go the transport's own way
            return None

    def _reducible(self, x: Tensor, op: str) -> Tensor:
        reduction(x := flat(x), op)
        return x

    def _run(
        self,
        one: Chosen,
        call: Calls,
        counts: Sequence[int],
        tensors: tuple[Tensor | None, Tensor | None],
        op: str = "sum",
    ) -> int:
        """Runs a program.

        counts   elements of each block
        tensors  the input, and the place of the result
        """
        given, kept = tensors
        key = id(one.program), tuple(counts)
        if key not in self._ways:
            if len(self._ways) >= KEPT_WAYS:
                self._ways.clear()
            self._ways[key] = way_of(one.program, self.rank, chunk_sizes(one.program, counts))
        way, like = self._ways[key], given if given is not None else kept
        assert like is not None
        if not self._open:
            self._scratch.begin()
        memories = {SCRATCH: self._scratch.lend((way.scratch,), like.dtype, like.device)}
        memories |= {name: x for name, x in ((GIVEN, given), (KEPT, kept)) if x is not None}

        def finish() -> None:
            if op == "mean" and kept is not None:
                kept.div_(self.size)

        carrier = self.near or self._host
        return carrier.carry(call, OnTensors(way, memories, op, finish))

    @contextmanager
    def group(self) -> Iterator[None]:
        with self._host.group():
            self._scratch.begin()
            self._open = True
            try:
                yield
            finally:
                self._open = False

    def lane_of(self, x: Tensor) -> Lane | None:
        """The lane of the transport beneath."""
        return self.wire.lane_of(x)

    def wire_of(self, x: Tensor) -> Transport:
        """Itself for CPU tensors."""
        return self if x.is_cpu else self.wire.wire_of(x)

    def abort(self, why: str = "") -> None:
        self.wire.abort(why)
        if self.near:
            self.near.abort(why)

    def close(self) -> None:
        if self.near:
            self.near.close()
        self.wire.close()
