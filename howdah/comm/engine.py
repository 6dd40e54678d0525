"""Engine: the transport of ranks on one machine, through shared memory.

engine.c moves and reduces the data, and documents how. The Python side checks the arguments of an
operation, packs them into one record and calls the library, which releases the interpreter's lock.

    engine.all_reduce(x)                      any contiguous CPU tensor: copied through the arena
    x = engine.allocate(1000, torch.float32)  a tensor in the arena: peers read it without a copy
    with engine.group(): ...                  several operations, one call; messages all at once

If ranks make different calls, each raises a `Disagreement` that names both calls. If a rank dies,
leaves, is stopped or is too late, the calls of all others raise `PeerLost`. After either error,
close the engine.
"""

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ctypes import CDLL, c_int
from typing import NamedTuple, NoReturn
from weakref import finalize

import torch
from torch import Tensor
from torch.distributed import Store

from howdah.base.errors import UserError
from howdah.comm import engine_abi as library
from howdah.comm.arena import Arena, default_heap, map_arena
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.checks import MOST, Checks, duration, movable, reduction, room, whole_number
from howdah.comm.engine_abi import KINDS, OP, PULSE, load_library
from howdah.comm.engine_errors import Failure, spoken
from howdah.comm.joining import LOOK, Ranks, all_came, told_to_all
from howdah.comm.rounds import Calls, Round, Started, Work, bytes_sent, run_rounds
from howdah.comm.settings import read_settings
from howdah.comm.signature import caller
from howdah.comm.transport import Counts, OneLink, SubgroupFactory
from howdah.comm.watch import Patience, release, watch

RANKS = library.RANKS
LINE = 64  # bytes: tensors in the arena start on a cache line
DEADLINE = 600.0  # seconds: longer than one rank saves or compiles while the others wait for it
STOPPED_FOR = 5.0  # seconds: shorter stops, for example by a debugger, are tolerated
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
    """Connects the ranks that share a store and have met. Raises UserError, or PeerLost.

    processes    process numbers of all ranks, in rank order, on this machine
    arena_bytes  bytes that each rank can allocate, by default those of `default_heap`. Only pages
                 that are written take memory.
    deadline     seconds after which a rank counts as lost that runs but does not make its call
    stopped_for  seconds after which a rank counts as lost that is stopped (SIGSTOP). A rank that
                 has died counts as lost at once.
    """
    size, processes = len(processes), tuple(processes)
    if not 1 <= size <= RANKS:
        raise UserError(f"the engine joins at most {RANKS} ranks, not {size}")
    rank = Checks(0, size).peer(rank)
    deadline = duration("deadline", deadline)
    stopped_for = duration("stopped_for", stopped_for)
    if arena_bytes is None:
        arena_bytes = default_heap(size)
    heap = whole_number("arena_bytes", arena_bytes, most=MOST // RANKS)
    with told_to_all(store, rank), ExitStack() as undo:
        watched = tuple(watch(processes))
        undo.callback(release, watched)
        if processes[rank] != os.getpid():
            raise UserError(f"process {processes[rank]} is said to be rank {rank}, this one's")
        functions = _load()
        ranks = Ranks(store, rank, size, processes, watched, Patience(deadline, every=LOOK))
        memory = map_arena(ranks, functions.howdah_arena_bytes(size, heap))
        arena = Arena(memory, rank, processes, watched, heap)
        engine = Engine(functions, arena, deadline=deadline, stopped_for=stopped_for)
        undo.pop_all()
        undo.callback(engine.close)
        all_came(ranks)
        undo.pop_all()
    return engine


def _load() -> CDLL:
    """The engine's library. It must exist: all ranks have reported so before they chose it."""
    try:
        return load_library(engine_library(read_settings()))
    except NoCompiler as lack:
        raise UserError(str(lack)) from None


class Engine(OneLink):
    """The transport between the ranks of one machine. All ranks call the same operations in the
    same order, one at a time.

    Operations return the bytes that this rank sent, counted as if each rank sent to every other
    rank directly. Tensors must be contiguous and on the CPU. Errors name the line that made the
    failed call: `site` if it is set, otherwise the innermost line outside of howdah.comm.
    """

    link = "shared"
    among: SubgroupFactory

    def __init__(
        self, functions: CDLL, arena: Arena, *, deadline: float, stopped_for: float
    ) -> None:
        self.rank, self.size, self.site = arena.rank, len(arena.processes), ""
        self._checks = Checks(self.rank, self.size)
        self._functions, self.processes = functions, arena.processes
        self._bytes = torch.frombuffer(arena.memory, dtype=torch.uint8)
        self._heap, self._used = arena.heap, 0  # of this rank, in bytes
        self._batch: _Batch | None = None
        self._interruptions: list[BaseException] = []
        heed = _heed_signals(self._interruptions)
        self._pulse = PULSE(heed.__next__)
        next(heed)
        ints = c_int * self.size
        self._run_ops: Callable[..., int] = functions.howdah_run
        self._bytes_of: Callable[..., int] = functions.howdah_bytes_sent
        self._handle = functions.howdah_open(
            self._bytes.data_ptr(),
            *(arena.heap, self.rank, self.size),
            *(ints(*arena.processes), ints(*arena.watched), deadline, stopped_for, self._pulse),
        )
        if self._handle is None:
            raise MemoryError("no memory is left for the engine")
        self._leave = finalize(self, _leave, functions, self._handle, arena.watched, self._bytes)

    # -- reductions, in rank order

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        """Replaces every rank's x by the reduction of all ranks' x."""
        code, width, at = movable(x)
        op_code = reduction(x, op)
        return self._run(OP.pack(ALL_REDUCE, code, op_code, width, 0, x.numel(), at, at, 0, 0), x)

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        """Replaces the root's x by the reduction of all ranks' x; other ranks' x is unchanged."""
        code, width, at = movable(x)
        op_code = reduction(x, op)
        root, count = self._checks.peer(root), x.numel()
        return self._run(OP.pack(REDUCE, code, op_code, width, root, count, at, at, 0, 0), x)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        """Writes this rank's slice of the reduction of all ranks' x to `out`.

        x is cut into slices of counts[0], counts[1], ... elements. `out` has counts[rank] elements;
        it may be that slice of x itself.
        """
        _some(x)
        cut, code, width, at, to = self._checks.cut(x, out, counts)
        op_code = reduction(x, op)
        where = at, to, cut.buffer_info()[0], 0
        call = OP.pack(REDUCE_SCATTER, code, op_code, width, 0, x.numel(), *where)
        return self._run(call, x, out, cut)

    # -- moves, of any dtype

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        """Writes every rank's x, in rank order, to every rank's out. x may be its slice of out."""
        _some(out)
        return self._gather(ALL_GATHER, out, x, 0, counts)

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        """Writes every rank's x, in rank order, to the root's out. `out` of other ranks is None."""
        root = self._checks.peer(root)
        return self._gather(GATHER, self._checks.on_root(root, "out", out), x, root, counts)

    def _gather(self, kind: int, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        cut, code, width, to, at = self._checks.cut(out, x, counts)
        where = at, to, cut.buffer_info()[0], 0
        call = OP.pack(kind, code, 0, width, root, sum(cut), *where)
        return self._run(call, x, out, cut)

    def broadcast(self, x: Tensor, root: int) -> int:
        """Copies the root's x to every rank's x."""
        code, width, at = movable(x)
        root = self._checks.peer(root)
        call = OP.pack(BROADCAST, code, 0, width, root, x.numel(), at, at, 0, 0)
        return self._run(call, x)

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        """Writes one slice of the root's x to each rank's out. On the root, `out` may be its slice
        itself; on other ranks, x is None.
        """
        root = self._checks.peer(root)
        x = self._checks.on_root(root, "x", x)
        cut, code, width, at, to = self._checks.cut(x, out, counts)
        where = at, to, cut.buffer_info()[0], 0
        call = OP.pack(SCATTER, code, 0, width, root, sum(cut), *where)
        return self._run(call, x, out, cut)

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        """Sends sent[p] elements of x to each rank p, and writes received[p] elements of each rank
        p, in rank order, to out.
        """
        (code, width, at), (_, _, to) = movable(x), movable(out)
        gives, takes = self._checks.exchange(out, x, sent, received)
        where = at, to, gives.buffer_info()[0], takes.buffer_info()[0]
        call = OP.pack(ALL_TO_ALL, code, 0, width, 0, x.numel(), *where)
        return self._run(call, x, out, gives, takes)

    def barrier(self) -> None:
        """Returns when all ranks have called it."""
        self._run(OP.pack(BARRIER, 0, 0, 1, 0, 0, 0, 0, 0, 0))

    # -- between two ranks

    def send(self, x: Tensor, to: int) -> int:
        """Sends x to rank `to`. Returns when x may be changed; `to` may receive it later."""
        code, width, at = movable(x)
        to = self._checks.peer(to, other=True)
        call = OP.pack(SEND, code, 0, width, to, x.numel(), at, 0, 0, 0)
        return self._run(call, x)

    def receive(self, x: Tensor, source: int) -> None:
        """Writes to x the next tensor that `source` sends to this rank, of equal dtype and size."""
        code, width, at = movable(x)
        source = self._checks.peer(source, other=True)
        call = OP.pack(RECEIVE, code, 0, width, source, x.numel(), 0, at, 0, 0)
        self._run(call, x)

    def signal(self, to: int) -> None:
        """Lets one `wait(this rank)` on rank `to` return. After it, `to` sees all that this rank
        wrote to the arena before.
        """
        to = self._checks.peer(to, other=True)
        self._run(OP.pack(SIGNAL, 0, 0, 1, to, 0, 0, 0, 0, 0))

    def wait(self, source: int) -> None:
        """Waits for a `signal` of rank `source`; each `signal` lets one `wait` return."""
        source = self._checks.peer(source, other=True)
        self._run(OP.pack(WAIT, 0, 0, 1, source, 0, 0, 0, 0, 0))

    @contextmanager
    def group(self) -> Iterator[None]:
        """Operations called inside start together when the block ends, in one call.

        Messages between two ranks go first and all at once, so all ranks may send before they
        receive; the other operations follow in order.
        """
        if self._batch is not None:
            raise UserError("a group is open already: groups are not nested")
        batch = self._batch = _Batch([], [], [])
        try:
            yield
        finally:
            self._batch = None
        if batch.calls:
            calls = b"".join(batch.calls)
            code = self._run_ops(self._handle, calls, len(batch.calls))
            if code < 0:
                self._fail(code, calls)
        if batch.started:
            run_rounds(self, batch.started)

    def exchange(self, call: Calls, rounds: Sequence[Round]) -> int:
        """Runs the rounds of a program (`rounds.py`); in a group, behind all else."""
        if self._batch is not None:
            self._batch.started.append((call, rounds))
        else:
            run_rounds(self, [(call, rounds)])
        return bytes_sent(rounds)

    def carry(self, call: Calls, work: Work) -> int:
        """Runs a program, round by round."""
        return self.exchange(call, work.rounds())

    # -- the arena

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """A tensor of `count` zeros in the arena, which operations read without a copy.

        Its memory is not reused after the tensor is freed, because other ranks may still read it:
        allocate few, large tensors, once.
        """
        self._check_home()
        needed = room(count, dtype)
        free = self._heap - self._used
        if needed > free:
            raise UserError(
                f"{needed} bytes do not fit into the {free} that are free of this rank's arena of "
                f"{self._heap}: connect with arena_bytes={self._used + needed} or more"
            )
        start = self._functions.howdah_heap_offset(self.size, self._heap, self.rank)
        offset = start + self._used
        self._used += -(-needed // LINE) * LINE
        return self._bytes[offset : offset + needed].view(dtype)

    def there(self, x: Tensor, rank: int) -> Tensor:
        """The memory of another rank's arena at the same offset as x, a tensor of `allocate`. It is
        x of that rank if all ranks made the same `allocate` calls.

        With signal and wait around it, `x.copy_(engine.there(x, rank))` is a one-sided copy.
        """
        self._check_home()
        ranks, heap = (self.rank, self._checks.peer(rank)), self._functions.howdah_heap_offset
        start, other = (heap(self.size, self._heap, r) for r in ranks)
        at = movable(x)[2] - self._bytes.data_ptr()
        if not start <= at <= start + self._used - x.nbytes:
            raise UserError("there() takes a contiguous tensor that allocate() gave")
        offset = at - start + other
        return self._bytes[offset : offset + x.nbytes].view(x.dtype).view(x.shape)

    def abort(self, why: str = "") -> None:
        """Ends all waits of all ranks with an error, also those of other threads of this rank."""
        if self._handle is not None:
            self._functions.howdah_abort(self._handle)

    def close(self) -> None:
        """Leaves the group and releases the arena, which exists as long as tensors in it do."""
        if self._handle is not None:
            self._leave()
            self._handle, self._heap = None, 0
            self._run_ops = self._bytes_of = _closed
            self._bytes = torch.empty(0, dtype=torch.uint8)

    def _check_home(self) -> None:
        """Raises UserError unless the engine is open and this process opened it."""
        if self._handle is None:
            _closed()
        if self.processes[self.rank] != os.getpid():
            raise UserError("this engine belongs to the process that forked this one")

    # -- how they run

    def _run(self, call: bytes, *kept: object) -> int:
        if self._batch is not None:
            self._batch.calls.append(call)
            self._batch.kept.append(kept)
            return self._bytes_of(self._handle, call)
        sent = self._run_ops(self._handle, call, 1)
        return sent if sent >= 0 else self._fail(sent, call)

    def _fail(self, code: int, calls: bytes) -> NoReturn:
        if self._interruptions:
            raise self._interruptions.pop()
        site = self.site or caller()
        failure = Failure(self._functions, self._handle, spoken(calls), site, self.processes)
        raise failure.explain(code)


class _Batch(NamedTuple):
    """The packed operations of one `group()`, what must live until they have run, and programs."""

    calls: list[bytes]
    kept: list[object]
    started: list[Started]


def _some(x: Tensor | None) -> None:
    """Raises UserError if x is None: without a root, every rank must pass the full tensor."""
    if x is None:
        raise UserError("collectives take dense tensors, not None")


def _heed_signals(raised: list[BaseException]) -> Generator[int, None, None]:
    """A generator in which Python runs its signal handlers while a rank sleeps in the engine. It
    yields 1 if a handler raised an exception, which it appends to `raised`, otherwise 0.

    The engine resumes it from time to time. Python runs signal handlers when it enters a frame. In
    a function called by ctypes, the exception of a handler would be lost; a generator is resumed
    inside its try block. It has no reference to the engine: a reference cycle would keep an arena
    until the garbage collector runs, which would then free many arenas at once, at any moment.
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


def _leave(functions: CDLL, handle: int, watched: Sequence[int], memory: Tensor) -> None:
    """Leaves the group, at `close` or when the program ends; `memory` is kept until then.

    In a forked child, which has copies of the handle and the descriptors, the parent stays joined.
    """
    functions.howdah_close(handle)
    release(watched)


def _closed(*_: object) -> NoReturn:
    raise UserError("this engine is closed")
