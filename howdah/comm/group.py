"""Group: the collectives of the ranks along one axis of the mesh; every byte sent is counted.

    group.all_reduce(x)              in place: the sum over the ranks, on every rank
    group.reduce_scatter(out, x)     out: this rank's share of the sum of x
    group.all_gather(out, x)         out: the tensors x of all ranks, in rank order
    group.broadcast(x, root)         in place: the root's x, on every rank
    group.all_to_all(out, x)         slice p of x goes to rank p; slice p of out is from rank p
    group.send(x, to)                sends one tensor to rank `to`, which must call
    group.receive(x, source)         … with a tensor of equal size and dtype

Tensors are cut along their first dim into shares (`plan.flat_buffers.share`: sizes differ by at
most one, so any length works). Without `x`, reduce_scatter and all_gather work in place on full
buffers, as flat buffers of gradients and weights need it. Several buffers can go in one call:

    reduce_scatter([f])     rank 0: a₀ b₀ c₀      a = a₀ + a₁ + a₂, the rest is left as it was
    all_gather([f])         rank 0: a . .         a b c

An all-reduce is a reduce-scatter and then an all-gather, and is counted as these two. The owner of
each share adds its terms in rank order, and the other ranks copy the sum. So all ranks have equal
bits.

All ranks must call the operations of a group in the same order. Asynchronous operations run on the
group's progress thread, in the order of their calls. A synchronous operation waits for them and
then runs on the caller's thread. Every operation returns a handle; that of a synchronous one is
already done.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import Checks
from howdah.comm.counters import Counters, add
from howdah.comm.handle import DONE, Handle, OnThread
from howdah.comm.reduction import check_reduction
from howdah.comm.signature import caller
from howdah.comm.staging import check_tensor, from_host, to_host
from howdah.comm.transport import Transport, shares
from howdah.plan.flat_buffers import share
from howdah.plan.recording import Traffic

Tensors = Tensor | Sequence[Tensor]


class Group:
    """Collectives over tensors of any device and shape, which all ranks call in the same order.

    axis      the label under which bytes are counted
    counters  counts what this rank sends; several groups may share them
    """

    def __init__(
        self, transport: Transport, *, axis: str = "world", counters: Counters | None = None
    ) -> None:
        self.axis, self.link = axis, transport.link
        self.rank, self.size = transport.rank, transport.size
        self.counters = counters or Counters()
        self._checks = Checks(self.rank, self.size)
        self._transport, self._table = transport, self.counters.table()
        self._recorder = self.counters.recorder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{axis}-progress")
        self._last: Handle | None = None

    def own_shard(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """A view of the share of `whole`, along its first dim, that `rank` (or this rank) owns."""
        rank = self.rank if rank is None else self._checks.peer(rank)
        start, stop = share(len(whole), self.size, rank)
        return whole[start:stop]

    # -- collectives

    def all_reduce(
        self, x: Tensors, *, op: str = "sum", async_op: bool = False, after: Handle = DONE
    ) -> Handle:
        """Replaces `x` on all ranks by its sum (or mean, min, max, product) over the ranks.

        after  a handle to wait for, such as an operation of another group on the same tensors
        """
        wholes = _listed(x)
        for whole in wholes:
            check_tensor("all_reduce", whole, written=True)
            check_reduction(whole.dtype, op)
        return self._run(partial(self._all_reduce, wholes, op), async_op, after)

    def _all_reduce(self, wholes: list[Tensor], op: str) -> None:
        hosts, began = [to_host(whole) for whole in wholes], perf_counter()
        if len(hosts) == 1:
            sent = self._transport.all_reduce(hosts[0], op)
        else:
            sent = self._together([partial(self._transport.all_reduce, h, op) for h in hosts])
        first = sum([self._others(host) for host in hosts])
        self._count("all_reduce", {"reduce_scatter": first, "all_gather": sent - first}, began)
        for whole, host in zip(wholes, hosts, strict=True):
            from_host(whole, host)

    def reduce_scatter(
        self,
        out: Tensors,
        x: Tensor | None = None,
        *,
        op: str = "sum",
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Writes this rank's share of the sum of `x` over the ranks to `out`.

        Without `x`, `out` is the full buffer: this rank's share of it becomes the sum, and the rest
        is unchanged. `after` is that of `all_reduce`.
        """
        outs, wholes = self._parts("reduce_scatter", out, x)
        for whole in wholes:
            check_reduction(whole.dtype, op)

        def work() -> None:
            hosts, began = [to_host(whole) for whole in wholes], perf_counter()
            cuts = [self._cut(*pair) for pair in zip(wholes, hosts, strict=True)]
            parts = [host.split(cut)[self.rank] for host, cut in zip(hosts, cuts, strict=True)]
            if x is not None:
                parts = [to_host(part) for part in outs]
            reduce = self._transport.reduce_scatter
            jobs = zip(parts, hosts, cuts, strict=True)
            sent = self._together([partial(reduce, *job, op) for job in jobs])
            self._count("reduce_scatter", sent, began)
            for part, host in zip(outs, hosts if x is None else parts, strict=True):
                from_host(part, host)

        return self._run(work, async_op, after)

    def all_gather(
        self,
        out: Tensors,
        x: Tensor | None = None,
        *,
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Writes the `x` of all ranks, in rank order, to `out`; each `x` is its rank's share.

        Without `x`, each rank sends its own share of `out` to all ranks. `after` is that of
        `all_reduce`.
        """
        parts, wholes = self._parts("all_gather", out, x)

        def work() -> None:
            hosts, began = [to_host(whole) for whole in wholes], perf_counter()
            cuts = [self._cut(*pair) for pair in zip(wholes, hosts, strict=True)]
            owns = [host.split(cut)[self.rank] for host, cut in zip(hosts, cuts, strict=True)]
            if x is not None:
                owns = [to_host(part) for part in parts]
            jobs = zip(hosts, owns, cuts, strict=True)
            sent = self._together([partial(self._transport.all_gather, *job) for job in jobs])
            self._count("all_gather", sent, began)
            for whole, host in zip(wholes, hosts, strict=True):
                from_host(whole, host)

        return self._run(work, async_op, after)

    def broadcast(self, x: Tensor, root: int, *, async_op: bool = False) -> Handle:
        """Copies the root's `x` to the `x` of all ranks."""
        check_tensor("broadcast", x, written=True)
        root = self._checks.peer(root, operation="broadcast")

        def work() -> None:
            host, began = to_host(x), perf_counter()
            sent = self._transport.broadcast(host, root)
            self._count("broadcast", sent, began)
            from_host(x, host)

        return self._run(work, async_op)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        *,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Sends slice p of `x` to rank p, and writes the slice from rank p to slice p of `out`.

        sent, received  numbers of rows for and from each rank; by default `x` is cut into shares,
                        and must have the same length on all ranks
        """
        for tensor in (out, x):
            check_tensor("all_to_all", tensor, written=tensor is out)
        rows = self._checks.counts(shares(_rows(x), self.size) if sent is None else sent)
        back = self._checks.counts([rows[self.rank]] * self.size if received is None else received)
        for tensor, cut in ((x, rows), (out, back)):
            if sum(cut) != _rows(tensor) or tensor.dtype != x.dtype:
                name = "out" if tensor is out else "x"
                raise UserError(
                    f"all_to_all: {name} is {_spell(tensor)}, and {cut.tolist()} rows of {x.dtype} "
                    f"are to {'come from' if tensor is out else 'go to'} {self.size} ranks"
                )

        def work() -> None:
            landing, host, began = to_host(out), to_host(x), perf_counter()
            width = host.numel() // max(sum(rows), 1), landing.numel() // max(sum(back), 1)
            counts = [n * width[0] for n in rows], [n * width[1] for n in back]
            self._count("all_to_all", self._transport.all_to_all(landing, host, *counts), began)
            from_host(out, landing)

        return self._run(work, async_op)

    def send(self, x: Tensor, to: int, *, async_op: bool = False) -> Handle:
        """Sends `x` to rank `to`. `x` may be changed when the handle is done."""
        check_tensor("send", x, written=False)
        to = self._checks.peer(to, other=True, operation="send")

        def work() -> None:
            host, began = to_host(x), perf_counter()
            sent = self._transport.send(host, to)
            self._count("send", sent, began)

        return self._run(work, async_op)

    def receive(self, x: Tensor, source: int, *, async_op: bool = False) -> Handle:
        """Writes the next tensor that rank `source` sends to this rank to `x`."""
        check_tensor("receive", x, written=True)
        source = self._checks.peer(source, other=True, operation="receive")

        def work() -> None:
            host, began = to_host(x), perf_counter()
            self._transport.receive(host, source)
            self._count("receive", 0, began)
            from_host(x, host)

        return self._run(work, async_op)

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """The sums of a few numbers over the ranks, in float64, with equal bits on all ranks."""
        try:
            mine = torch.tensor([float(value) for value in values], dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"sum_scalars: takes a list of numbers, not {values!r}") from None
        heard = torch.empty(self.size, len(mine), dtype=torch.float64)

        def work() -> None:
            began, counts = perf_counter(), [len(mine)] * self.size
            sent = self._transport.all_gather(heard.view(-1), mine, counts)
            self._count("scalars", sent, began)

        self._run(work, async_op=False)
        return [sum(column) for column in zip(*heard.tolist(), strict=True)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""

        def work() -> None:
            began = perf_counter()
            self._transport.barrier()
            self._count("barrier", 0, began)

        self._run(work, async_op=False)

    def abort(self) -> None:
        """Ends the waits of all ranks, and of this rank's progress thread, with an error. For a
        rank that cannot continue.
        """
        self._transport.abort()

    def close(self) -> None:
        """Ends the progress thread after it has finished all started operations."""
        self._thread.shutdown()

    # -- how they run

    def _run(self, work: Callable[[], None], async_op: bool, after: Handle = DONE) -> Handle:
        if after is not DONE and not isinstance(after, Handle):
            raise UserError(f"an operation comes after a handle, not after {after!r}")
        if async_op:
            try:
                self._last = OnThread(self._thread.submit(self._for, caller(), work, after))
            except RuntimeError:
                raise UserError("this group is closed: it starts nothing more") from None
            return self._last
        if after is not DONE:
            after.result()
        if self._last is not None:
            self._last.result()
            self._last = None
        work()
        return DONE

    def _for(self, site: str, work: Callable[[], None], after: Handle) -> None:
        """Runs an operation on the progress thread. `site` is the line that called it."""
        after.result()
        self._transport.site = site
        try:
            work()
        finally:
            self._transport.site = ""

    def _together(self, calls: list[Callable[[], int]]) -> int:
        """Runs the calls, several of them started together; returns the bytes that they sent."""
        if len(calls) == 1:
            return calls[0]()
        with self._transport.group() as batch:
            sent = sum(call() for call in calls)
        return sent + batch.sent

    def _parts(
        self, operation: str, out: Tensors, x: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The lists (shares, full tensors) of an operation; in place, both are the full tensors."""
        if x is None:
            for whole in _listed(out):
                check_tensor(operation, whole, written=True)
            return _listed(out), _listed(out)
        if not isinstance(out, Tensor):
            raise UserError(f"{operation}: several buffers go in place, without x")
        part, whole = (out, x) if operation == "reduce_scatter" else (x, out)
        check_tensor(operation, out, written=True)
        check_tensor(operation, x, written=False)
        own = self._cut(whole, whole)[self.rank]
        if part.numel() != own or part.dtype != whole.dtype:
            raise UserError(
                f"{operation}: rank {self.rank} of {self.size} has {own} elements of "
                f"{_spell(whole)}, but its part is {_spell(part)}"
            )
        return [part], [whole]

    def _cut(self, whole: Tensor, host: Tensor) -> list[int]:
        """Numbers of elements of `host`, the flat form of `whole`, in each rank's rows."""
        width = host.numel() // max(_rows(whole), 1)
        return [rows * width for rows in shares(_rows(whole), self.size)]

    def _others(self, flat: Tensor) -> int:
        """Bytes of all shares but this rank's."""
        start, stop = share(flat.numel(), self.size, self.rank)
        return (flat.numel() - stop + start) * flat.element_size()

    def _count(self, operation: str, sent: int | dict[str, int], began: float) -> None:
        """Counts a call that has just ended.

        sent   its bytes; for an all-reduce, the bytes of its two halves by name
        began  perf_counter() at its start
        """
        ended, parts = perf_counter(), {operation: sent} if isinstance(sent, int) else sent
        rows = {Traffic(self.axis, part, self.link): count for part, count in parts.items()}
        add(self._table, rows, ended - began)
        if self._recorder.runs:
            total = sum(parts.values())
            self._recorder.call(self.axis, operation, sent=total, began=began, ended=ended)


def _listed(x: Tensors) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def _rows(x: Tensor) -> int:
    return x.shape[0] if x.ndim else 1


def _spell(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
