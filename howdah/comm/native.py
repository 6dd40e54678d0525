"""Collectives of a backend object of torch: NCCL's between GPUs, MPI's, and gloo's in tests.

The object is used directly, without torch's default process group and its global state. Operations
are given to the stream that is current (`lane.py`): they return at once, and only the GPU waits. On
the CPU they return when they are done.

What the transports of the CPU promise, and this one does not: the order of additions is the
backend's own, and depends on sizes and on the network. All ranks have equal bits; the bits of
another transport may differ in the last places. bf16 is added in bf16.

The calls of all ranks are not compared before they run, because NCCL has no place for a record of
the call. Each rank keeps a ledger instead (`ledger.py`).

Counts that are equal for all ranks go as one operation of the backend; others as one broadcast or
reduction for each rank, which is slower. Buffers of weights and gradients are padded for this.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ErrorType  # not in torch.distributed

from howdah.base.errors import UserError
from howdah.comm.checks import Checks
from howdah.comm.lane import Lane
from howdah.comm.ledger import Ledger
from howdah.comm.reduction import check_reduction
from howdah.comm.signature import caller, spell
from howdah.comm.transport import (
    Counts,
    PeerLost,
    SubgroupFactory,
    Transport,
    copy_own,
    gave_up,
    shares,
)

MOST_TOGETHER = 256  # operations of one NCCL group; longer ones were seen to hang (pytorch #174288)
REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # and a division: gloo has no mean
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class Native:
    """The transport over a backend object; see `transport.Transport` for the operations.

    device  that of the tensors
    link    the class of its links, such as nccl
    lane    where operations on a GPU's tensors run; None: on the caller's thread
    ledger  the calls so far
    lost    the error of a wire that was aborted; empty while it works
    agree   called when a collective was noted, before it is made
    """

    among: SubgroupFactory
    site, checked = "", False

    def __init__(
        self,
        backend: Any,
        *,
        link: str,
        device: torch.device | None = None,
        lane: Lane | None = None,
    ) -> None:
        self._backend, self.link, self.lane = backend, link, lane
        self.device = device or torch.device("cpu")
        self.rank, self.size = backend.rank(), backend.size()
        self.ledger, self.lost = Ledger(), ""
        self.agree: Callable[[], None] = lambda: None
        self._checks = Checks(self.rank, self.size)
        self._together: list[Any] | None = None
        self._later: list[Callable[[], Any]] = []  # what follows the operations of the open group
        self._closed = False

    def lane_of(self, x: Tensor) -> Lane | None:
        """Its lane, for tensors of its device."""
        return self.lane if x.device == self.device else None

    def wire_of(self, x: Tensor) -> Transport:
        """Itself."""
        return self

    # -- reductions

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        check_reduction(x.dtype, op)
        own = shares(x.numel(), self.size)[self.rank]
        options = _options(dist.AllreduceOptions, op)
        self._call("all_reduce", x, [x.numel()], op, lambda: self._backend.allreduce([x], options))
        self._divide(x, op)
        return (x.numel() - own + (self.size - 1) * own) * x.element_size()

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        check_reduction(x.dtype, op)
        if len(set(counts)) == 1:
            options = _options(dist.ReduceScatterOptions, op)
            run = partial(self._backend._reduce_scatter_base, out, x, options)
            self._call("reduce_scatter", x, counts, op, run)
        else:
            self._reduce_each(out, x, counts, op)
        self._divide(out, op)
        return (x.numel() - counts[self.rank]) * x.element_size()

    def _reduce_each(self, out: Tensor, x: Tensor, counts: Counts, op: str) -> None:
        """One reduction for each rank. The pieces are copied: some backends write to all terms."""
        pieces = [piece.clone() for piece in x.split(list(counts))]
        self._keep(pieces)
        with self.group():
            for root, piece in enumerate(pieces):
                self._reduce(piece, root, op)
        self._then(partial(out.copy_, pieces[self.rank]))

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        check_reduction(x.dtype, op)
        root = self._checks.peer(root)
        term = x if self.rank == root else x.clone()
        self._keep([term])
        self._reduce(term, root, op)
        if self.rank == root:
            self._divide(x, op)
        return 0 if self.rank == root else x.nbytes

    def _reduce(self, x: Tensor, root: int, op: str) -> None:
        if x.numel():
            options = _options(dist.ReduceOptions, op, root=root)
            run = partial(self._backend.reduce, [x], options)
            self._call("reduce", x, [x.numel()], f"{op}, root {root}", run)

    def _keep(self, made: list[Tensor]) -> None:
        if self.lane is not None:
            self.lane.keep(made)

    def _divide(self, x: Tensor, op: str) -> None:
        if op == "mean":
            self._then(partial(x.div_, self.size))

    # -- moves

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        if len(set(counts)) == 1:
            options = _options(AllgatherOptions)
            run = partial(self._backend._allgather_base, out, x, options)
            self._call("all_gather", x, counts, "", run)
        else:
            pieces = out.split(list(counts))
            copy_own(pieces[self.rank], x)
            with self.group():
                for root, piece in enumerate(pieces):
                    self._broadcast(piece, root)
        return (self.size - 1) * x.nbytes

    def broadcast(self, x: Tensor, root: int) -> int:
        root = self._checks.peer(root)
        self._broadcast(x, root)
        return (self.size - 1) * x.nbytes if self.rank == root else 0

    def _broadcast(self, x: Tensor, root: int) -> None:
        if x.numel():
            options = _options(dist.BroadcastOptions, root=root)
            run = partial(self._backend.broadcast, [x], options)
            self._call("broadcast", x, [x.numel()], f"root {root}", run)

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        out = self._checks.on_root(root, "out", out)
        self._note("gather", x, counts, f"root {root}")
        with self.group():
            if out is None:
                self.send(x, root)
            else:
                for peer, piece in enumerate(out.split(list(counts))):
                    if peer == root:
                        copy_own(piece, x)
                    else:
                        self.receive(piece, peer)
        return 0 if self.rank == root else x.nbytes

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        root = self._checks.peer(root)
        x = self._checks.on_root(root, "x", x)
        self._note("scatter", out, counts, f"root {root}")
        with self.group():
            if x is None:
                self.receive(out, root)
            else:
                for peer, piece in enumerate(x.split(list(counts))):
                    if peer == root:
                        copy_own(out, piece)
                    else:
                        self.send(piece, peer)
        return 0 if x is None else x.nbytes - out.nbytes

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        sent, received = self._checks.exchange(out, x, sent, received)
        options = dist.AllToAllOptions()
        run = partial(
            self._backend.alltoall_base, out, x, list(received), list(sent), _launched(options)
        )
        # Every pair of ranks has counts of its own, so the ledgers of all ranks have none.
        self._call("all_to_all", x, [], "", run)
        return (x.numel() - sent[self.rank]) * x.element_size()

    def send(self, x: Tensor, to: int) -> int:
        to = self._checks.peer(to, other=True)
        if x.numel():
            self._call("send", x, [x.numel()], "", lambda: self._backend.send([x], to, 0), pair=to)
        return x.nbytes

    def receive(self, x: Tensor, source: int) -> None:
        source = self._checks.peer(source, other=True)
        if x.numel():
            run = partial(self._backend.recv, [x], source, 0)
            self._call("receive", x, [x.numel()], "", run, pair=source)

    def barrier(self) -> None:
        self._without_lane("barrier")
        self._call("barrier", torch.empty(0), [], "", self._backend.barrier)

    def signal(self, to: int) -> None:
        self._without_lane("signal")
        self.send(torch.zeros(1, dtype=torch.uint8), to)

    def wait(self, source: int) -> None:
        self._without_lane("wait")
        self.receive(torch.zeros(1, dtype=torch.uint8), source)

    def _without_lane(self, operation: str) -> None:
        if self.lane is not None:
            raise UserError(f"{operation} is for the host: call that of the transport beside it")

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of this process."""
        return torch.zeros(count, dtype=dtype)

    @contextmanager
    def group(self) -> Iterator[None]:
        if self._together is not None:  # an operation that is several, inside of a group
            yield
            return
        self._together = []
        try:
            yield
        finally:
            together, self._together = self._together, None
            later, self._later = self._later, []
        for start in range(0, len(together), MOST_TOGETHER):
            self._launch(together[start : start + MOST_TOGETHER])
        for work in later:
            work()

    # -- how they run

    def _call(
        self,
        operation: str,
        x: Tensor,
        counts: Counts,
        choice: str,
        run: Callable[[], Any],
        *,
        pair: int | None = None,
    ) -> None:
        """Notes an operation, and gives it to the backend, or to the open group."""
        self._note(operation, x, counts, choice, pair)
        if self._together is None:
            self._finish(run)
        else:
            self._together.append(run)

    def _note(
        self, operation: str, x: Tensor, counts: Counts, choice: str, pair: int | None = None
    ) -> None:
        """Notes an operation in the ledger."""
        if self._closed:
            raise UserError("this transport is closed")
        if x.dtype == torch.int16 and self.lane is not None:
            raise UserError(f"{operation}: NCCL has no int16; send int32, or the bytes of x")
        self.check()
        call = spell(operation, x.dtype, counts, choice)
        self.ledger.note(call, self.site or caller(), pair=pair)
        if pair is None:
            self.agree()

    def _then(self, work: Callable[[], Any]) -> None:
        """Does `work` behind the operations so far: now, or behind those of the open group."""
        if self._together is None:
            work()
        else:
            self._later.append(work)

    def _launch(self, runs: Sequence[Callable[[], Any]]) -> None:
        if len(runs) > 1 and self._backend.supports_coalescing and self.lane is not None:
            self._finish(partial(self._coalesced, runs))
            return
        works = [self._started(run) for run in runs]
        for work in works:
            self._finish(lambda work=work: work)  # type: ignore[misc]

    def _coalesced(self, runs: Sequence[Callable[[], Any]]) -> Any:
        self._backend._start_coalescing()
        for run in runs:
            run()
        return self._backend._end_coalescing()

    def _started(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except RuntimeError as error:
            raise self._failed(error) from None

    def _finish(self, run: Callable[[], Any]) -> None:
        """On a lane, `wait` makes the current stream wait; on the CPU, this thread."""
        work = self._started(run)
        if work is not None:
            self._started(work.wait)

    def _failed(self, error: RuntimeError) -> PeerLost:
        last = self.ledger.last
        why = self.lost or f"the collectives of rank {self.rank} failed: {_first_line(error)}"
        return PeerLost(f"{why}; this rank called {last}")

    # -- its end

    def check(self) -> None:
        """Raises PeerLost if the wire was aborted."""
        if self.lost:
            raise PeerLost(f"{self.lost}; this rank called {self.ledger.last}")

    def compare(self) -> None:
        """Does nothing: it carries no words; the wire of the host compares (`both.py`)."""

    def error(self) -> str:
        """The error that the backend has found by itself; empty if none, or if it looks for none. A
        timeout is the watcher's to explain.

        Any thread may ask.
        """
        try:
            found = self._backend.get_error()
        except (AttributeError, RuntimeError):  # gloo looks for none
            return ""
        return "" if found in (ErrorType.SUCCESS, ErrorType.TIMEOUT) else str(found.name)

    def lose(self, said: str) -> None:
        """Ends all waits, those of the GPU too, with the error `said`. Called on any thread."""
        if not self.lost:
            self.lost = said
            self.end_waits()

    def end_waits(self) -> None:
        """Aborts the backend; `lost` has been set."""
        if not self._closed:
            with suppress(RuntimeError):  # it may be broken already
                self._backend.abort()

    def abort(self, why: str = "") -> None:
        self.lose(gave_up(self.rank, why))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self.lost:  # an aborted backend is freed, and not shut down
                self._backend.shutdown()


def _options(kind: Any, op: str = "", root: int | None = None) -> Any:
    options = kind()
    if op:
        options.reduceOp = REDUCTIONS[op]
    if root is not None:
        options.rootRank = root
    return _launched(options)


def _launched(options: Any) -> Any:
    """With `asyncOp` false, NCCL's operation runs on the current stream, and not on its own."""
    options.asyncOp = False
    return options


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
