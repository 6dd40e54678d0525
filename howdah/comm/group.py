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
bits. Where another algorithm was chosen (`chosen.py`), its program runs, and is counted by its own
name; scalars always go the direct way.

All ranks must call the operations of a group in the same order. Asynchronous operations run on the
group's progress thread, in the order of their calls. A synchronous operation waits for them and
then runs on the caller's thread. Every operation returns a handle; that of a synchronous one is
already done. Where the transport has a lane for a GPU's tensors (`lane.py`), operations on them run
there, and only the GPU waits.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.chosen import beneath, runs_program
from howdah.comm.handle import DONE, Handle
from howdah.comm.messages import NONE, Messages, spell
from howdah.comm.reduction import REDUCIBLE, check_reduction
from howdah.comm.running import Steps
from howdah.comm.staging import Narrowed, Stage, check_tensor
from howdah.comm.transport import shares
from howdah.plan.flat_buffers import share

Tensors = Tensor | Sequence[Tensor]


class Group(Messages):
    """Collectives over tensors of any device and shape, which all ranks call in the same order."""

    def own_shard(self, whole: Tensor, rank: int | None = None) -> Tensor:
        """A view of the share of `whole`, along its first dim, that `rank` (or this rank) owns."""
        rank = self.rank if rank is None else self._checks.peer(rank)
        start, stop = share(len(whole), self.size, rank)
        return whole[start:stop]

    # -- collectives

    def all_reduce(
        self,
        x: Tensors,
        *,
        op: str = "sum",
        dtype: torch.dtype | None = None,
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Replaces `x` on all ranks by its sum (or mean, min, max, product) over the ranks.

        dtype  what is sent, such as bfloat16 for float32 tensors: each rank's term and the result
               are rounded to it; None: the tensors' own
        after  a handle to wait for, such as an operation of another group on the same tensors
        """
        wholes = _listed(x)
        for whole in wholes:
            check_tensor("all_reduce", whole, written=True)
            check_reduction(dtype or whole.dtype, op)

        def work(stage: Stage) -> Steps:
            stage = self._narrowed(stage, dtype, wholes)
            flats = [stage.take(whole) for whole in wholes]
            sent = yield [partial(self._transport.all_reduce, flat, op) for flat in flats]
            for whole, flat in zip(wholes, flats, strict=True):
                stage.give(whole, flat)
            return self._halves(flats, sent)

        return self._run("all_reduce", work, wholes, async_op, after)

    def reduce_scatter(
        self,
        out: Tensors,
        x: Tensor | None = None,
        *,
        op: str = "sum",
        dtype: torch.dtype | None = None,
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Writes this rank's share of the sum of `x` over the ranks to `out`.

        Without `x`, `out` is the full buffer: this rank's share of it becomes the sum, and the rest
        is unchanged. `dtype` and `after` are those of `all_reduce`.
        """
        outs, wholes = self._parts("reduce_scatter", out, x)
        for whole in wholes:
            check_reduction(dtype or whole.dtype, op)

        def work(stage: Stage) -> Steps:
            stage = self._narrowed(stage, dtype, wholes)
            flats = [stage.take(whole) for whole in wholes]
            cuts = [self._cut(whole) for whole in wholes]
            parts = [flat.split(cut)[self.rank] for flat, cut in zip(flats, cuts, strict=True)]
            if x is not None:
                parts = [stage.take(part, NONE) for part in outs]
            reduce = self._transport.reduce_scatter
            jobs = zip(parts, flats, cuts, strict=True)
            yield [partial(reduce, *job, op) for job in jobs]
            for part, flat in zip(outs, flats if x is None else parts, strict=True):
                stage.give(part, flat, [self._own_rows(part)] if x is None else None)

        return self._run("reduce_scatter", work, [*outs, *wholes], async_op, after)

    def all_gather(
        self,
        out: Tensors,
        x: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Writes the `x` of all ranks, in rank order, to `out`; each `x` is its rank's share.

        Without `x`, each rank sends its own share of `out` to all ranks. `dtype` and `after` are
        those of `all_reduce`.
        """
        parts, wholes = self._parts("all_gather", out, x)

        def work(stage: Stage) -> Steps:
            in_place, stage = x is None, self._narrowed(stage, dtype, wholes)
            flats = [stage.take(w, self._own_rows(w) if in_place else NONE) for w in wholes]
            cuts = [self._cut(whole) for whole in wholes]
            owns = [flat.split(cut)[self.rank] for flat, cut in zip(flats, cuts, strict=True)]
            if not in_place:
                owns = [stage.take(part) for part in parts]
            jobs = zip(flats, owns, cuts, strict=True)
            yield [partial(self._transport.all_gather, *job) for job in jobs]
            for whole, flat in zip(wholes, flats, strict=True):
                start, stop = self._own_rows(whole)
                stage.give(whole, flat, [(0, start), (stop, _rows(whole))] if in_place else None)

        return self._run("all_gather", work, [*wholes, *parts], async_op, after)

    def broadcast(
        self, x: Tensor, root: int, *, async_op: bool = False, after: Handle = DONE
    ) -> Handle:
        """Copies the root's `x` to the `x` of all ranks. `after` is that of `all_reduce`."""
        check_tensor("broadcast", x, written=True)
        root = self._checks.peer(root, operation="broadcast")

        def work(stage: Stage) -> Steps:
            flat = stage.take(x)
            yield [partial(self._transport.broadcast, flat, root)]
            stage.give(x, flat)

        return self._run("broadcast", work, [x], async_op, after)

    def reduce(self, x: Tensor, root: int, *, op: str = "sum", async_op: bool = False) -> Handle:
        """Replaces the root's `x` by its reduction over the ranks; that of others is unchanged."""
        root = self._checks.peer(root, operation="reduce")
        check_tensor("reduce", x, written=self.rank == root)
        check_reduction(x.dtype, op)

        def work(stage: Stage) -> Steps:
            flat = stage.take(x)
            yield [partial(self._transport.reduce, flat, root, op)]
            if self.rank == root:
                stage.give(x, flat)

        return self._run("reduce", work, [x], async_op)

    def gather(
        self,
        out: Tensor | None,
        x: Tensor,
        root: int,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Writes the `x` of all ranks, in rank order, to the root's `out`, which is None on others.

        counts  numbers of rows of each rank; by default all ranks have as many
        """
        root, rows = self._rooted("gather", root, out, x, counts)

        def work(stage: Stage) -> Steps:
            flat = stage.take(x)
            into = stage.take(out, NONE) if out is not None else None
            yield [partial(self._transport.gather, into, flat, root, _elements(rows, x))]
            if out is not None and into is not None:
                stage.give(out, into)

        return self._run("gather", work, [x] if out is None else [out, x], async_op)

    def scatter(
        self,
        out: Tensor,
        x: Tensor | None,
        root: int,
        *,
        counts: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Handle:
        """Writes slice r of the root's `x`, which is None on others, to the `out` of rank r.

        counts  numbers of rows for each rank; by default all ranks get as many
        """
        root, rows = self._rooted("scatter", root, x, out, counts)

        def work(stage: Stage) -> Steps:
            flat = stage.take(x) if x is not None else None
            into = stage.take(out, NONE)
            yield [partial(self._transport.scatter, into, flat, root, _elements(rows, out))]
            stage.give(out, into)

        return self._run("scatter", work, [out] if x is None else [out, x], async_op)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        *,
        sent: Sequence[int] | None = None,
        received: Sequence[int] | None = None,
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Sends slice p of `x` to rank p, and writes the slice from rank p to slice p of `out`.

        sent, received  numbers of rows for and from each rank; by default `x` is cut into shares,
                        and must have the same length on all ranks
        after           that of `all_reduce`
        """
        for tensor in (out, x):
            check_tensor("all_to_all", tensor, written=tensor is out)
        rows = self._checks.counts(shares(_rows(x), self.size) if sent is None else sent)
        back = self._checks.counts([rows[self.rank]] * self.size if received is None else received)
        for tensor, cut in ((x, rows), (out, back)):
            if sum(cut) != _rows(tensor) or tensor.dtype != x.dtype:
                name = "out" if tensor is out else "x"
                raise UserError(
                    f"all_to_all: {name} is {spell(tensor)}, and {cut.tolist()} rows of {x.dtype} "
                    f"are to {'come from' if tensor is out else 'go to'} {self.size} ranks"
                )

        def work(stage: Stage) -> Steps:
            into, flat = stage.take(out, NONE), stage.take(x)
            counts = _elements(rows, x), _elements(back, out)
            yield [partial(self._transport.all_to_all, into, flat, *counts)]
            stage.give(out, into)

        return self._run("all_to_all", work, [out, x], async_op, after)

    def sum_scalars(self, values: Sequence[float]) -> list[float]:
        """The sums of a few numbers over the ranks, in float64, with equal bits on all ranks."""
        try:
            mine = torch.tensor([float(value) for value in values], dtype=torch.float64)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(f"sum_scalars: takes a list of numbers, not {values!r}") from None
        heard = torch.empty(self.size, len(mine), dtype=torch.float64)

        def work(_: Stage) -> Steps:
            counts = [len(mine)] * self.size
            yield [partial(beneath(self._transport).all_gather, heard.view(-1), mine, counts)]

        self._run("scalars", work)
        return [sum(column) for column in zip(*heard.tolist(), strict=True)]

    def gather_scalars(self, out: Tensor, x: Tensor, *, async_op: bool = False) -> Handle:
        """Writes the few numbers `x` [n] of all ranks to `out` [N, n], in rank order. It is an
        all_gather whose bytes are counted as scalars.
        """
        for tensor in (out, x):
            check_tensor("gather_scalars", tensor, written=tensor is out)

        def work(stage: Stage) -> Steps:
            flat, own = stage.take(out, NONE), stage.take(x)
            counts = [len(own)] * self.size
            yield [partial(beneath(self._transport).all_gather, flat, own, counts)]
            stage.give(out, flat)

        return self._run("scalars", work, [out, x], async_op)

    def _narrowed(self, stage: Stage, dtype: torch.dtype | None, wholes: Sequence[Tensor]) -> Stage:
        """The stage, or one that sends `dtype`."""
        if dtype is None or all(whole.dtype == dtype for whole in wholes):
            return stage
        return Narrowed(stage, dtype, self._run.scratch[wholes[0].device])

    def _rooted(
        self,
        operation: str,
        root: int,
        whole: Tensor | None,
        part: Tensor,
        counts: Sequence[int] | None,
    ) -> tuple[int, Sequence[int]]:
        """The root and the rows of each rank, of an operation whose root alone has the `whole`."""
        gathers = operation == "gather"
        root = self._checks.peer(root, operation=operation)
        if (whole is None) == (self.rank == root):
            name = "out" if gathers else "x"
            raise UserError(
                f"{operation}: rank {root} is the root, and alone gives {name}, but rank "
                f"{self.rank} gives {'none' if whole is None else 'one'}"
            )
        check_tensor(operation, part, written=not gathers)
        rows = self._checks.counts([_rows(part)] * self.size if counts is None else counts)
        if whole is not None:
            check_tensor(operation, whole, written=gathers)
            if _rows(whole) != sum(rows) or not _alike(whole, part):
                raise UserError(
                    f"{operation}: {rows.tolist()} rows of {spell(part)} do not fill the root's "
                    f"{spell(whole)}"
                )
        if _rows(part) != rows[self.rank]:
            raise UserError(
                f"{operation}: counts are {rows.tolist()} rows, but rank {self.rank} gives "
                f"{spell(part)}"
            )
        return root, rows

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
        own = shares(_rows(whole), self.size)[self.rank] * whole.shape[1:].numel()
        if part.numel() != own or part.dtype != whole.dtype:
            raise UserError(
                f"{operation}: rank {self.rank} of {self.size} has {own} elements of "
                f"{spell(whole)}, but its part is {spell(part)}"
            )
        return [part], [whole]

    def _cut(self, whole: Tensor) -> list[int]:
        """Numbers of elements of the flat form of `whole` in each rank's rows."""
        return _elements(shares(_rows(whole), self.size), whole)

    def _halves(self, flats: Sequence[Tensor], sent: int) -> dict[str, int]:
        """The bytes that all-reduces sent: their two halves, or those of chosen programs."""
        if beneath(self._transport) is self._transport:
            first = sum([self._others(flat) for flat in flats])
            return {"reduce_scatter": first, "all_gather": sent - first}
        direct = [flat for flat in flats if not runs_program(self._transport, "all_reduce", flat)]
        first = sum(self._others(flat) for flat in direct)
        second = sum(flat.nbytes - self._others(flat) for flat in direct) * (self.size - 1)
        halves = {"reduce_scatter": first, "all_gather": second} if direct else {}
        rest = {"all_reduce": sent - first - second} if len(direct) < len(flats) else {}
        return {**halves, **rest}

    def _others(self, flat: Tensor) -> int:
        """Bytes of all shares but this rank's."""
        start, stop = share(flat.numel(), self.size, self.rank)
        return (flat.numel() - stop + start) * flat.element_size()

    def _own_rows(self, whole: Tensor) -> tuple[int, int]:
        return share(_rows(whole), self.size, self.rank)


def _listed(x: Tensors) -> list[Tensor]:
    return [x] if isinstance(x, Tensor) else list(x)


def _rows(x: Tensor) -> int:
    return x.shape[0] if x.ndim else 1


def _elements(rows: Sequence[int], x: Tensor) -> list[int]:
    """Numbers of elements in so many rows each of the flat form of `x`, which may be bytes."""
    width = x.shape[1:].numel() * (1 if x.dtype in REDUCIBLE else x.element_size())
    return [count * width for count in rows]


def _alike(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors have rows of one kind."""
    return x.dtype == y.dtype and x.shape[1:] == y.shape[1:]
