"""A wire and streams that only record: what one rank would give to NCCL, without any GPU.

In place of NCCL's object, `Backend` notes each call, with the stream that is current. In place of a
GPU's streams, `Streams` note what each is given and which events it waits for. The wire of the
hosts notes its calls, too: there a host waits for the others. The other ranks always say what this
one says. Tensors are on torch's device `meta`: they have shapes and no data.

`recorded_steps.py` runs whole layouts on this wire; `wire_checks.py` says what must hold for the
lists of all ranks.
"""

from collections import Counter
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from howdah.comm.both import Both
from howdah.comm.lane import Lane
from howdah.comm.native import Native
from howdah.comm.transport import SingleRank
from howdah.plan.recording import Wires

META = torch.device("meta")
LINK = "recorded"


# -- what is recorded ------------------------------------------------------------------


class Wire(NamedTuple):
    """A communicator: its ranks, and which of several with these ranks."""

    ranks: tuple[int, ...]
    number: int

    def __str__(self) -> str:
        return f"{'-'.join(map(str, self.ranks))}/{self.number}"


class Op(NamedTuple):
    """A call of NCCL.

    counts   elements of what is sent and of what is received; of an all-to-all, for each rank
    choice   the reduction, or the root
    peer     the other rank of a send or receive
    offsets  bytes from the beginning of the memory to each tensor
    plain    whether every tensor is contiguous, and the call runs on the current stream
    """

    wire: Wire
    name: str
    dtype: torch.dtype
    counts: tuple[int, ...]
    choice: str
    peer: int | None
    offsets: tuple[int, ...]
    plain: bool

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.name}({self.dtype} {list(self.counts)}{self.choice}){peer} on {self.wire}"


class Call(NamedTuple):
    """The operations of one NCCL group, or a single one, on a stream."""

    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.ops))


class Wait(NamedTuple):
    """A stream waits until another one has done its first `length` entries."""

    stream: int
    length: int

    def __str__(self) -> str:
        return f"entry {self.length} of stream {self.stream}"


class Given(NamedTuple):
    """The host gives a stream a Call or a Wait."""

    stream: int
    what: Call | Wait

    def __str__(self) -> str:
        return f"{self.what} (on stream {self.stream})"


class Met(NamedTuple):
    """The host calls, and waits for, an operation of the hosts' wire, or the making of a wire."""

    wire: Wire
    text: str

    def __str__(self) -> str:
        return f"{self.text} (its host, on {self.wire})"


class Read(NamedTuple):
    """The host waits until a stream has done its first `length` entries."""

    stream: int
    length: int

    def __str__(self) -> str:
        return f"a number of entry {self.length} of stream {self.stream}"


class Recorded(NamedTuple):
    """What one rank did.

    streams  0 is that of the computation; the others are lanes
    ledgers  of each wire: the number of calls and their checksum
    """

    entries: list[Given | Met | Read]
    streams: int
    ledgers: dict[Wire, tuple[int, int]]

    @property
    def calls(self) -> list[tuple[int, Call]]:
        """The calls of NCCL in the order of the program, each with its stream."""
        return [
            (entry.stream, entry.what)
            for entry in self.entries
            if isinstance(entry, Given) and isinstance(entry.what, Call)
        ]


# -- streams -----------------------------------------------------------------------------


class Stream:
    def __init__(self, streams: "Streams", number: int) -> None:
        self._streams, self.number, self.length = streams, number, 0

    def give(self, what: Call | Wait) -> None:
        self._streams.entries.append(Given(self.number, what))
        self.length += 1

    def wait_event(self, event: "Event") -> None:
        if event.length and event.stream is not self:
            self.give(Wait(event.stream.number, event.length))

    def wait_stream(self, other: "Stream") -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)


class Event:
    stream: Stream
    length: int

    def record(self, stream: Stream) -> None:
        self.stream, self.length = stream, stream.length

    def query(self) -> bool:
        return True  # a lane then forgets the operation

    def synchronize(self) -> None:
        self.stream._streams.entries.append(Read(self.stream.number, self.length))


class Streams:
    """The streams of one rank's GPU, as `CudaStreams` has them, and all that its host does."""

    def __init__(self) -> None:
        self.entries: list[Given | Met | Read] = []
        self.count = 0
        self._current = self.new()

    def current(self) -> Stream:
        return self._current

    def new(self) -> Stream:
        self.count += 1
        return Stream(self, self.count - 1)

    @contextmanager
    def inside(self, stream: Stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def event(self) -> Event:
        return Event()


# -- wires -------------------------------------------------------------------------------


class Backend:
    """In place of ProcessGroupNCCL."""

    supports_coalescing = True

    def __init__(self, streams: Streams, wire: Wire, rank: int) -> None:
        self._streams, self._wire, self._rank = streams, wire, rank
        self._together: list[Op] | None = None

    def rank(self) -> int:
        return self._wire.ranks.index(self._rank)

    def size(self) -> int:
        return len(self._wire.ranks)

    def shutdown(self) -> None:
        pass

    def _note(
        self,
        name: str,
        tensors: Any,
        options: Any = None,
        *,
        choice: str = "",
        peer: int | None = None,
        counts: tuple[int, ...] = (),
    ) -> None:
        op = Op(
            self._wire,
            name,
            tensors[0].dtype,
            counts or tuple(x.numel() for x in tensors),
            choice,
            None if peer is None else self._wire.ranks[peer],
            tuple(x.storage_offset() * x.element_size() for x in tensors),
            all(x.is_contiguous() for x in tensors) and not (options and options.asyncOp),
        )
        if any(x.device != META or x.dtype != op.dtype for x in tensors):
            raise AssertionError(f"{op} has tensors of the host, or of several dtypes")
        if self._together is None:
            self._streams.current().give(Call((op,)))
        else:
            self._together.append(op)

    def _start_coalescing(self) -> None:
        self._together = []

    def _end_coalescing(self) -> None:
        ops, self._together = tuple(self._together or ()), None
        self._streams.current().give(Call(ops))

    def allreduce(self, tensors: Any, options: Any) -> None:
        self._note("all_reduce", tensors, options, choice=_reduction(options))

    def _reduce_scatter_base(self, out: Any, x: Any, options: Any) -> None:
        self._note("reduce_scatter", (x, out), options, choice=_reduction(options))

    def _allgather_base(self, out: Any, x: Any, options: Any) -> None:
        self._note("all_gather", (x, out), options)

    def broadcast(self, tensors: Any, options: Any) -> None:
        self._note("broadcast", tensors, options, choice=f" root {options.rootRank}")

    def reduce(self, tensors: Any, options: Any) -> None:
        choice = f"{_reduction(options)} root {options.rootRank}"
        self._note("reduce", tensors, options, choice=choice)

    def alltoall_base(self, out: Any, x: Any, received: Any, sent: Any, options: Any) -> None:
        self._note("all_to_all", (x, out), options, counts=(*sent, *received))

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        self._note("send", tensors, peer=peer)

    def recv(self, tensors: Any, peer: int, tag: int) -> None:
        self._note("receive", tensors, peer=peer)


def _reduction(options: Any) -> str:
    ops = ("SUM", "MIN", "MAX", "PRODUCT")
    return f" {next(op for op in ops if options.reduceOp == getattr(dist.ReduceOp, op))}"


class HostWire(SingleRank):
    """The wire of the hosts: every rank says what this one says. Moving anything but a few numbers
    over it is an error.
    """

    def __init__(self, streams: Streams, wire: Wire, rank: int) -> None:
        self._streams, self._wire = streams, wire
        self.rank, self.size = wire.ranks.index(rank), len(wire.ranks)

    def meet(self, text: str) -> None:
        self._streams.entries.append(Met(self._wire, text))

    def all_gather(self, out: Any, x: Any, counts: Any) -> int:
        self.meet(f"all_gather of {x.numel()}")
        assert x.nbytes < 1000, f"{x.nbytes} bytes go over the wire of the hosts"
        out.view(self.size, -1).copy_(x)
        return (self.size - 1) * x.nbytes

    def barrier(self) -> None:
        self.meet("barrier")

    def nothing_else(self, *_: Any, **__: Any) -> int:
        raise AssertionError("a step moves tensors over the wire of the hosts")

    all_reduce = reduce_scatter = broadcast = reduce = gather = scatter = nothing_else
    all_to_all = send = receive = nothing_else


class Joining:
    """Makes the wires of groups of ranks, as `comm/rendezvous.py` does."""

    wires = Wires(LINK, LINK, cards=LINK)

    def __init__(self, streams: Streams, rank: int, backend: type[Backend]) -> None:
        self._streams, self._rank, self._backend = streams, rank, backend
        self._times: Counter[tuple[int, ...]] = Counter()
        self.made: dict[Wire, Native] = {}

    def __call__(self, ranks: Any) -> Both:
        wire = Wire(tuple(ranks), self._times[tuple(ranks)])
        self._times[wire.ranks] += 1
        host = HostWire(self._streams, wire, self._rank)
        host.meet("make the wire")  # NCCL's start waits for all of its ranks
        backend = self._backend(self._streams, wire, self._rank)
        native = Native(backend, link=LINK, device=META)
        native.lane = Lane(self._streams, check=native.check)
        self.made[wire] = native
        both = Both(host, native)
        both.among = self
        return both
