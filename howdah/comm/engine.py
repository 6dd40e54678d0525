"""Engine: the transport of ranks on one machine, through shared memory.

engine.c does the work and says how; here is the thin side that checks what is asked for, packs it
into one descriptor and calls the library, which lets go of the interpreter's lock.

    engine.all_reduce(x)                      any contiguous CPU tensor: copied through the arena
    x = engine.allocate(1000, torch.float32)  a tensor in the arena: others read it where it lies
    with engine.group(): ...                  several operations, one call; messages all at once

Ranks that make different calls get a `Disagreement` that names both; a rank that dies, leaves,
stops or stays away makes the calls of all others raise `PeerLost`. After either, close the engine.
"""

import os
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, c_int
from typing import NoReturn
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import Store

from howdah.comm.arena import Arena, map_arena
from howdah.comm.build import engine_library
from howdah.comm.engine_errors import Failure
from howdah.comm.library import (
    CODES,
    DTYPES,
    KINDS,
    OP,
    PULSE,
    load_library,
    words,
)
from howdah.comm.reduction import check_reduction
from howdah.comm.settings import read_settings
from howdah.comm.signature import caller
from howdah.comm.transport import Among, Counts
from howdah.plan.problems import BadInput

RANKS = 64  # the most; as in engine.c
LINE = 64  # bytes: tensors in the arena start on a cache line
DEADLINE = 600.0  # seconds: longer than one rank saves or compiles while the others wait for it
STOPPED_FOR = 5.0  # seconds: a shorter stop, as by a debugger, is waited for
ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, GATHER, BROADCAST, SCATTER = range(7)
ALL_TO_ALL, BARRIER, SEND, RECEIVE, SIGNAL, WAIT = range(7, len(KINDS))


def connect_engine(
    store: Store,
    processes: Sequence[int],
    *,
    rank: int,
    arena_bytes: int | None = None,
    deadline: float = DEADLINE,
    stopped_for: float = STOPPED_FOR,
) -> "Engine":
    """Joins the ranks that share a store and have met. Raises NoCompiler, or BadInput.

    processes    of all ranks, in their order, on this machine
    arena_bytes  that each rank can allocate, by default its part of the machine's memory. Only
                 what is written takes memory.
    deadline     seconds after which a rank that lives but does not come is given up
    stopped_for  seconds after which one that is stopped (SIGSTOP) is; one that is dead, at once
    """
    size = len(processes)
    if size > RANKS:
        raise BadInput(f"the engine joins at most {RANKS} ranks, not {size}")
    functions = load_library(engine_library(read_settings()))
    if arena_bytes is None:
        arena_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // size
    total = functions.howdah_arena_bytes(size, arena_bytes)
    memory = map_arena(store, rank=rank, size=size, bytes=total, deadline=deadline)
    arena = Arena(memory, rank, tuple(processes), arena_bytes)
    return Engine(functions, arena, deadline=deadline, stopped_for=stopped_for)


class Engine:
    """The ranks of one machine. One operation at a time, in the same order on all ranks.

    Operations return the bytes that this rank sent, counted as if each rank talked to every
    other directly. Tensors are contiguous and on the CPU, or refused. `site`, where it is set,
    is told as the place of a call that fails; otherwise it is the line that made the call, in
    the innermost file outside of howdah.comm.
    """

    link = "shared"
    among: Among

    def __init__(
        self, functions: CDLL, arena: Arena, *, deadline: float, stopped_for: float
    ) -> None:
        self.rank, self.size, self.site = arena.rank, len(arena.processes), ""
        self._functions, self._processes = functions, arena.processes
        self._bytes = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self._heap, self._used = arena.heap, 0  # this rank's, in bytes
        self._batch: Batch | None = None
        self._interruptions: list[BaseException] = []
        heed = _heed_signals(self._interruptions)
        self._pulse = PULSE(heed.__next__)
        next(heed)
        watched = [os.pidfd_open(process) for process in arena.processes]
        ints = c_int * self.size
        self._run_ops: Callable[..., int] = functions.howdah_run
        self._handle = functions.howdah_open(
            self._bytes.data_ptr(),
            *(arena.heap, self.rank, self.size),
            *(ints(*arena.processes), ints(*watched), deadline, stopped_for, self._pulse),
        )
        self._leave = finalize(self, _leave, functions, self._handle, watched, self._bytes)

    # -- reductions, in rank order

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        """The reduction of all ranks' x, in every rank's x."""
        code, width, op_code = _reducible(x, op)
        at = x.data_ptr()
        return self._run(OP.pack(ALL_REDUCE, code, op_code, width, 0, x.numel(), at, at, 0, 0), x)

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        """The reduction of all ranks' x, in the root's x; the others keep theirs."""
        code, width, op_code = _reducible(x, op)
        at, count = x.data_ptr(), x.numel()
        self._know(root)
        return self._run(OP.pack(REDUCE, code, op_code, width, root, count, at, at, 0, 0), x)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        """The reduction of one part of all ranks' x: x is cut into counts[0], counts[1], ...

        `out` has counts[rank] elements; it may be that part of x itself.
        """
        code, width, op_code = _reducible(x, op)
        cut = self._cut(x, out, counts)
        where = x.data_ptr(), out.data_ptr(), cut.buffer_info()[0], 0
        call = OP.pack(REDUCE_SCATTER, code, op_code, width, 0, x.numel(), *where)
        return self._run(call, x, out, cut)

    # -- moves, of any dtype

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        """Every rank's x, one after the other, in every rank's out. x may be its part of out."""
        return self._gather(ALL_GATHER, out, x, 0, counts)

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        """Every rank's x, one after the other, in the root's out. The others give None."""
        self._know(root)
        return self._gather(GATHER, self._only_on(root, "out", out), x, root, counts)

    def broadcast(self, x: Tensor, root: int) -> int:
        """The root's x in every rank's x."""
        (code, width), at = _movable(x), x.data_ptr()
        self._know(root)
        call = OP.pack(BROADCAST, code, 0, width, root, x.numel(), at, at, 0, 0)
        return self._run(call, x)

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        """One part of the root's x in every rank's out, which may be that part itself."""
        self._know(root)
        code, width = _movable(out)
        x = self._only_on(root, "x", x)
        cut = self._cut(x, out, counts)
        where = 0 if x is None else x.data_ptr(), out.data_ptr(), cut.buffer_info()[0], 0
        call = OP.pack(SCATTER, code, 0, width, root, sum(counts), *where)
        return self._run(call, x, out, cut)

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        """sent[p] elements of x to each rank p, and received[p] from it, in rank order in out."""
        code, width = _movable(x)
        self._fit("x", x, sent)
        self._fit("out", out, received)
        if out.dtype != x.dtype or not _apart(out, x):
            raise BadInput("all_to_all: out must have x's dtype, and lie apart from x")
        gives, takes = array("q", sent), array("q", received)
        where = x.data_ptr(), out.data_ptr(), gives.buffer_info()[0], takes.buffer_info()[0]
        call = OP.pack(ALL_TO_ALL, code, 0, width, 0, x.numel(), *where)
        return self._run(call, x, out, gives, takes)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._run(OP.pack(BARRIER, 0, 0, 1, 0, 0, 0, 0, 0, 0))

    # -- between two ranks

    def send(self, x: Tensor, to: int) -> int:
        """Returns when x may be changed: it is then on its way, or taken."""
        code, width = _movable(x)
        self._know(to, other=True)
        call = OP.pack(SEND, code, 0, width, to, x.numel(), x.data_ptr(), 0, 0, 0)
        return self._run(call, x)

    def receive(self, x: Tensor, source: int) -> None:
        """The next tensor that `source` sent here, which must have x's dtype and size."""
        code, width = _movable(x)
        self._know(source, other=True)
        call = OP.pack(RECEIVE, code, 0, width, source, x.numel(), 0, x.data_ptr(), 0, 0)
        self._run(call, x)

    def signal(self, to: int) -> None:
        """Lets one `wait` of rank `to` for this rank pass: all written before is seen after it."""
        self._know(to, other=True)
        self._run(OP.pack(SIGNAL, 0, 0, 1, to, 0, 0, 0, 0, 0))

    def wait(self, source: int) -> None:
        """Returns when `source` has signalled once more than it was waited for."""
        self._know(source, other=True)
        self._run(OP.pack(WAIT, 0, 0, 1, source, 0, 0, 0, 0, 0))

    @contextmanager
    def group(self) -> Iterator["Batch"]:
        """Operations called inside start together when the block ends, in one call.

        Messages go first and all at once, so ranks may all send before they receive; the rest
        follows in order. Inside, every operation returns 0; `sent` of the batch tells the sum.
        """
        if self._batch is not None:
            raise BadInput("a group is open already: groups are not nested")
        batch = self._batch = Batch()
        try:
            yield batch
        finally:
            self._batch = None
        if batch.calls:
            calls = b"".join(batch.calls)
            batch.sent = self._run_ops(self._handle, calls, len(batch.calls))
            if batch.sent < 0:
                self._fail(batch.sent, calls)

    # -- the arena

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of zeros in the arena, which operations read without copying it there first.

        Its place is not given to another one when it goes, for other ranks may read it still:
        allocate large ones, once.
        """
        if self._handle is None:
            _closed()
        needed, free = count * dtype.itemsize, self._heap - self._used
        if needed > free:
            raise BadInput(
                f"{needed} bytes do not fit into the {free} that are free of this rank's arena of "
                f"{self._heap}: connect with arena_bytes={self._used + needed} or more"
            )
        start = self._functions.howdah_heap_offset(self.size, self._heap, self.rank)
        place = start + self._used
        self._used += -(-needed // LINE) * LINE
        return self._bytes[place : place + needed].view(dtype)

    def there(self, x: Tensor, rank: int) -> Tensor:
        """What lies at x's place in another rank's arena: x there, if all allocated alike.

        With signal and wait around it, `x.copy_(engine.there(x, rank))` is a one-sided copy.
        """
        self._know(rank)
        at, heap = x.data_ptr() - self._bytes.data_ptr(), self._functions.howdah_heap_offset
        start, other = (heap(self.size, self._heap, r) for r in (self.rank, rank))
        if not x.is_contiguous() or not start <= at <= start + self._used - x.nbytes:
            raise BadInput("there() takes a contiguous tensor that allocate() gave")
        place = at - start + other
        return self._bytes[place : place + x.nbytes].view(x.dtype).view(x.shape)

    def give_up(self) -> None:
        """Ends all waits of all ranks, those of other threads of this one too."""
        if self._handle is not None:
            self._functions.howdah_give_up(self._handle)

    def close(self) -> None:
        """Leaves the group, and lets go of the arena, which lives while tensors of it are held."""
        if self._handle is not None:
            self._leave()
            self._handle, self._run_ops, self._heap = None, _closed, 0
            self._bytes = torch.empty(0, dtype=torch.uint8)

    # -- how they run

    def _run(self, call: bytes, *kept: object) -> int:
        if self._batch is not None:
            self._batch.calls.append(call)
            self._batch.kept.append(kept)  # what the call points to must live until it runs
            return 0
        sent = self._run_ops(self._handle, call, 1)
        return sent if sent >= 0 else self._fail(sent, call)

    def _fail(self, code: int, calls: bytes) -> NoReturn:
        if self._interruptions:
            raise self._interruptions.pop()
        kind, dtype, op, _, root, count = OP.unpack_from(calls)[:6]
        call, site = words(kind, dtype, op, root, count), self.site or caller()
        failure = Failure(self._functions, self._handle, call, site, self._processes)
        raise failure.explain(code)

    # -- what can be wrong with a call

    def _gather(self, kind: int, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        code, width = _movable(x)
        cut = self._cut(out, x, counts)
        where = x.data_ptr(), 0 if out is None else out.data_ptr(), cut.buffer_info()[0], 0
        call = OP.pack(kind, code, 0, width, root, sum(counts), *where)
        return self._run(call, x, out, cut)

    def _cut(self, whole: Tensor | None, part: Tensor, counts: Counts) -> "array[int]":
        """The counts for C, when `whole` has as many elements and `part` is this rank's."""
        if len(counts) != self.size or min(counts) < 0 or part.numel() != counts[self.rank]:
            raise BadInput(
                f"counts are {list(counts)}: {self.size} are needed, one for each rank, and rank "
                f"{self.rank} gives a tensor of {part.numel()} elements for its own"
            )
        if not part.is_contiguous() or not part.is_cpu:
            _movable(part)
        if whole is not None:
            self._fit("the whole tensor", whole, counts)
            own = whole.data_ptr() + sum(counts[: self.rank]) * whole.itemsize
            if whole.dtype != part.dtype or not (part.data_ptr() == own or _apart(part, whole)):
                raise BadInput(
                    f"the tensor of rank {self.rank}'s part must have the dtype of the whole, and "
                    "be its own part of it or lie apart"
                )
        return array("q", counts)

    def _fit(self, name: str, x: Tensor, counts: Counts) -> None:
        _movable(x)
        if len(counts) != self.size or min(counts) < 0 or sum(counts) != x.numel():
            raise BadInput(
                f"{name} has {x.numel()} elements, and counts are {list(counts)}: {self.size} "
                "are needed, one for each rank, with that sum"
            )

    def _know(self, rank: int, *, other: bool = False) -> None:
        if not 0 <= rank < self.size or (other and rank == self.rank):
            raise BadInput(f"rank {self.rank} of {self.size} names rank {rank} as its peer")

    def _only_on(self, root: int, name: str, x: Tensor | None) -> Tensor | None:
        if self.rank == root and x is None:
            raise BadInput(f"rank {root} is the root and gives no {name}")
        return x if self.rank == root else None


class Batch:
    """The operations of one `group()`; afterwards, the bytes that they sent."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.kept: list[object] = []
        self.sent = 0


def _movable(x: Tensor) -> tuple[int, int]:
    """The engine's number for x's dtype, and the bytes of an element."""
    if not x.is_contiguous():
        raise BadInput("the engine takes contiguous tensors: call .contiguous() first")
    if not x.is_cpu:
        raise BadInput(f"the engine takes tensors of the CPU, not of {x.device}")
    try:
        return DTYPES[x.dtype]
    except KeyError:
        raise BadInput(f"the engine cannot move {x.dtype}") from None


def _reducible(x: Tensor, op: str) -> tuple[int, int, int]:
    """The engine's numbers for x's dtype, its bytes, and the reduction `op`."""
    check_reduction(x.dtype, op)
    return *_movable(x), CODES[op]


def _apart(x: Tensor, y: Tensor) -> bool:
    a, b = x.data_ptr(), y.data_ptr()
    return a + x.nbytes <= b or b + y.nbytes <= a


def _heed_signals(raised: list[BaseException]) -> Generator[int, None, None]:
    """A sleeping rank resumes this now and then, and Python handles its signals here.

    Python does so as it enters a frame. What a handler raises would be lost if that were a
    function's frame, which ctypes calls; a generator is entered inside its try. It does not know
    the engine: a cycle of references would keep an arena until the collector happens to come by,
    and then free those of many engines at once, in the middle of anything.
    """
    while True:
        try:
            while True:
                yield 0
        except GeneratorExit:
            raise
        except BaseException as error:
            raised.append(error)
        yield 1


def _leave(functions: CDLL, handle: int, watched: list[int], memory: Tensor) -> None:
    """Takes leave of the others, at `close` or when the program ends; `memory` lives until then."""
    functions.howdah_close(handle)
    for process in watched:
        os.close(process)


def _closed(*_: object) -> NoReturn:
    raise BadInput("this engine is closed")
