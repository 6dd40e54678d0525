"""The process group of the torch backend: what torch.distributed calls, on howdah's transports.

    dist.all_reduce(x)  →  HowdahGroup.allreduce([x], options)  →  transport.all_reduce(flat)

A call without async_op runs on the caller's thread; others are queued (`work.py`). Messages
between two ranks have lanes of their own (`pairs.py`). Tensors are brought to the form of the
transport and back (`staging.py`), so any strides are right, and every dtype can be moved.

Tensors of GPUs go to a process group of NCCL, made when the first of them comes. That part is
written and was never run: it needs as many GPUs as ranks.

torch 2.13 calls some methods by new names, older versions by those that are aliases at the end of
the class; and C++ (DDP, functional collectives) calls some of both.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.meeting import Kind, Missing, spelled
from howdah.comm.rendezvous import join_through
from howdah.comm.signature import Disagreement
from howdah.comm.staging import check_tensor
from howdah.comm.torch_backend import moves, sums
from howdah.comm.torch_backend.cards import Cards
from howdah.comm.torch_backend.names import NAME, Named
from howdah.comm.torch_backend.pair_wires import PairWires
from howdah.comm.torch_backend.pairs import Pairs
from howdah.comm.torch_backend.routes import between_machines
from howdah.comm.torch_backend.untraced import untraced
from howdah.comm.torch_backend.work import Lane, Results, Several, Work
from howdah.comm.transport import PeerLost, Transport
from howdah.plan.comm import Hosts

SYNCHRONOUS = ("send", "recv")  # functions of TORCH that wait for what they call
TORCH = dist.distributed_c10d.__file__


def connected(
    options: Any, hosts: Hosts | None = None, transport: Kind | None = None
) -> "HowdahGroup":
    """The group of the ranks that `options`, of torch, names: they meet here. Raises UserError.

    hosts      how machines are connected; None: as those of the default group
    transport  None: the best that all ranks can use
    """
    if hosts is None:
        first = dist.distributed_c10d.GroupMember.WORLD
        hosts = first.hosts if isinstance(first, HowdahGroup) else Hosts()
    rank, size, store = options.group_rank, options.group_size, options.store
    seconds = options.timeout.total_seconds()
    given: dict[str, Any] = {"seconds": seconds, "hosts": hosts, "head": _keeper_of(store)}

    def pair(between: dist.Store, place: int) -> Transport:
        """A transport between two of these ranks, from a thread of its own."""
        return join_through(between, place, 2, transport, **given)

    try:
        wire = between_machines(join_through(store, rank, size, transport, **given))
    except Missing as error:
        if not (ranks := [*options.global_ranks_in_group]):
            raise
        raise UserError(
            f"new_group: {spelled([ranks[one] for one in error.ranks])} did not create the group "
            f"of ranks {ranks} within {error.seconds:g} s: all ranks create all groups, in one "
            "order, also those that they are not in"
        ) from None
    wires = PairWires(wire, store, pair, seconds=seconds)
    return HowdahGroup(wire, options, hosts, Pairs(rank, size, wires))


def _keeper_of(store: Any) -> str:
    """The machine that keeps a store; empty if it does not say."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


@untraced
class HowdahGroup(Named):
    """The ranks of a group of torch.distributed.

    wire   the transport of collectives
    hosts  how machines are connected, for groups that are made later
    """

    def __init__(self, wire: Transport, options: Any, hosts: Hosts, pairs: Pairs) -> None:
        super().__init__(options, wire.rank, wire.size)
        self.wire, self.hosts = wire, hosts
        self._lane = Lane(f"{NAME}-{options.group_id}", self._starts)
        self._pairs = pairs
        self._cards = Cards(options)
        self._ranks = [*options.global_ranks_in_group]  # none: of the default group
        self._together: list[Work] | None = None
        self._closed = False

    # -- reductions

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Every rank's tensors become their reductions."""
        opts = opts or dist.AllreduceOptions()
        xs = _listed(tensors)
        if cards := self._cards.of(xs):
            return cards("allreduce", xs, opts)
        how = sums.reduction_of(opts)
        for x in xs:
            check_tensor("all_reduce", x, written=True)
        return self._go(
            partial(_for_each, xs, partial(sums.all_reduce, self.wire, how=how)), xs, opts
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        """Every rank's tensors become their reductions, as one call."""
        return self.allreduce(tensors, opts or dist.AllreduceCoalescedOptions())

    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """The root's tensor becomes the reduction."""
        xs = _listed(tensors)
        if cards := self._cards.of(xs):
            return cards("reduce", xs, opts)
        how, root = sums.reduction_of(opts), opts.rootRank
        (x,) = xs
        check_tensor("reduce", x, written=root == self._place)
        return self._go(lambda: sums.reduce(self.wire, x, root, how), xs, opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        """`out` becomes this rank's share of the reduction of x."""
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Each of `outs` becomes this rank's share of the reduction of its x."""
        opts = opts or dist.ReduceScatterOptions()
        if cards := self._cards.of([*outs, *xs]):
            return cards("reduce_scatter_single_coalesced", outs, xs, opts)
        how = sums.reduction_of(opts)
        for out, x in zip(outs, xs, strict=True):
            moves.check_whole(self._count, "reduce_scatter", out, x)

        def job() -> None:
            for out, x in zip(outs, xs, strict=True):
                sums.reduce_scatter(self.wire, out, x, [out.numel()] * self._count, how)

        return self._go(job, outs, opts)

    def reduce_scatter(self, outs: Any, inputs: Any, opts: Any = None) -> Work:
        """`out` becomes the reduction of this rank's tensor in the lists of all ranks."""
        out, xs = _only(outs), _only(inputs)
        if cards := self._cards.of([out, *xs]):
            return cards("reduce_scatter", [out], [xs], opts)
        how = sums.reduction_of(opts or dist.ReduceScatterOptions())
        moves.check_each(self._count, "reduce_scatter", xs)
        check_tensor("reduce_scatter", out, written=True)
        counts = [x.numel() for x in xs]

        def job() -> None:
            whole = torch.cat([x.detach().reshape(-1) for x in xs])
            sums.reduce_scatter(self.wire, out, whole, counts, how)

        return self._go(job, [out], opts)

    # -- moves

    def broadcast(self, tensors: Any, opts: Any = None) -> Work:
        """The tensors become those of the root."""
        opts = opts if hasattr(opts, "rootRank") else _rooted(opts)
        xs = _listed(tensors)
        if cards := self._cards.of(xs):
            return cards("broadcast", xs, opts)
        for x in xs:
            check_tensor("broadcast", x, written=True)
        root = opts.rootRank
        return self._go(
            partial(_for_each, xs, partial(moves.broadcast, self.wire, root=root)), xs, opts
        )

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Work:
        """`out` becomes the x of all ranks, one behind the other."""
        return self.all_gather_single_coalesced([out], [x], opts)

    def all_gather_single_coalesced(
        self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Each of `outs` becomes its x of all ranks, one behind the other."""
        if cards := self._cards.of([*outs, *xs]):
            return cards("all_gather_single_coalesced", outs, xs, opts)
        for out, x in zip(outs, xs, strict=True):
            moves.check_whole(self._count, "all_gather", x, out)

        def job() -> None:
            for out, x in zip(outs, xs, strict=True):
                moves.all_gather(self.wire, out, x)

        return self._go(job, outs, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """The tensors of the list become those of all ranks."""
        return self.allgather_coalesced([_only(outputs)], _listed(inputs), opts, across=False)

    def allgather_coalesced(
        self, outputs: Any, inputs: Sequence[Tensor], opts: Any = None, *, across: bool = True
    ) -> Work:
        """The tensors of each list become those of all ranks; with `across`, outputs[r] holds the
        tensors of rank r.
        """
        lists = [[*one] for one in (zip(*outputs, strict=True) if across else outputs)]
        if cards := self._cards.of([*inputs, *lists[0]]):
            return cards("allgather_coalesced" if across else "allgather", outputs, inputs, opts)
        for outs, x in zip(lists, inputs, strict=True):
            moves.check_each(self._count, "all_gather", outs, like=x)

        def job() -> None:
            for outs, x in zip(lists, inputs, strict=True):
                moves.all_gather_list(self.wire, outs, x)

        results = outputs if across else lists
        return self._go(job, [*results], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """The tensors of the root's list become those of all ranks."""
        x, root = _only(inputs), opts.rootRank
        outs = [*_only(outputs)] if root == self._place else []
        if cards := self._cards.of([x, *outs]):
            return cards("gather", outputs, [x], opts)
        if outs:
            moves.check_each(self._count, "gather", outs, like=x)
        check_tensor("gather", x, written=False)
        return self._go(lambda: moves.gather(self.wire, outs, x, root), [outs], opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """`out` becomes the root's tensor for this rank."""
        out, root = _only(outputs), opts.rootRank
        xs = [*_only(inputs)] if root == self._place else []
        if cards := self._cards.of([out, *xs]):
            return cards("scatter", [out], inputs, opts)
        if xs:
            moves.check_each(self._count, "scatter", xs, like=out)
        check_tensor("scatter", out, written=True)
        return self._go(lambda: moves.scatter(self.wire, out, xs, root), [out], opts)

    def alltoall(self, outs: Sequence[Tensor], xs: Sequence[Tensor], opts: Any = None) -> Work:
        """outs[p] becomes what rank p has in xs for this rank."""
        if cards := self._cards.of([*outs, *xs]):
            return cards("alltoall", outs, xs, opts)
        moves.check_each(self._count, "all_to_all", outs)
        moves.check_each(self._count, "all_to_all", xs)
        return self._go(lambda: moves.all_to_all_list(self.wire, outs, xs), outs, opts)

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] = (),
        splits: Sequence[int] = (),
        opts: Any = None,
    ) -> Work:
        """Rows of x go to all ranks, and those of out come from them; without splits, as many."""
        if cards := self._cards.of([out, x]):
            return cards("all_to_all_single", out, x, [*out_splits], [*splits], opts)
        check_tensor("all_to_all", out, written=True)
        check_tensor("all_to_all", x, written=False)
        sent = moves.elements("all_to_all", x, splits, self._count)
        received = moves.elements("all_to_all", out, out_splits, self._count)
        return self._go(lambda: moves.all_to_all(self.wire, out, x, sent, received), [out], opts)

    def barrier(self, opts: Any = None) -> Work:
        """Returns when all ranks have called it."""
        if self._cards.made and getattr(opts, "device", None) == torch.device("cuda"):
            return self._cards.call("barrier", opts)
        return self._go(self.wire.barrier, [], opts)

    # -- messages

    def send(self, tensors: Any, to: int, tag: int = 0) -> Work:
        """Sends one tensor."""
        (x,) = _listed(tensors)
        if cards := self._cards.of([x]):
            return cards("send", [x], to, tag)
        check_tensor("send", x, written=False)
        return self._noted(self._pairs.send(x, to, tag, now=_waits()), [x])

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Work:
        """Receives one tensor, of the size that was sent."""
        (x,) = _listed(tensors)
        if cards := self._cards.of([x]):
            return cards("recv", [x], source, tag)
        check_tensor("receive", x, written=True)
        return self._noted(self._pairs.receive(x, source, tag, now=_waits()), [x])

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives one tensor of any rank."""
        (x,) = _listed(tensors)
        if self._cards.of([x]):
            raise UserError("NCCL receives from a rank that is named: give src")
        check_tensor("receive", x, written=True)
        return self._noted(self._pairs.receive_any(x, tag), [x])

    def _noted(self, work: Work | None, results: Results) -> Work:
        work = work or Work(results)
        if self._together is not None:
            self._together.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        self._together = []

    def _end_coalescing(self, device: torch.device) -> Work:
        works, self._together = self._together or [], None
        return Several(works)

    # -- how they run

    def _go(self, job: Callable[[], Any], results: Results, opts: Any) -> Work:
        if self._closed:
            raise UserError("this process group was destroyed")
        if self._ranks:
            job = partial(self._of_subgroup, job)
        if getattr(opts, "asyncOp", True):
            return self._noted(self._lane.later(job, results), results)
        self._lane.now(job)
        return Work(results)

    def _starts(self, site: str) -> None:
        self.wire.site = site

    def _of_subgroup(self, job: Callable[[], Any]) -> None:
        """Says in an error of a subgroup which ranks of the program its numbers mean."""
        try:
            job()
        except (PeerLost, Disagreement) as error:
            who = f"{error}; these are numbers in the group of ranks {self._ranks}"
            raise type(error)(who) from None

    # -- its end

    def _wait_for_pending_works(self) -> None:
        self._lane.now(_nothing)

    def abort(self) -> None:
        """Ends the waits of all ranks with an error."""
        self._pairs.abort()
        self.wire.abort()
        self._cards.abort()

    def shutdown(self) -> None:
        """Ends the group behind what was started. Other ranks may do so later."""
        if not self._closed:
            self._closed = True
            self._lane.close()
            self._pairs.close()
            self._cards.close()
            self.wire.close()

    # -- names of other versions of torch

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _for_each(xs: Sequence[Tensor], do: Callable[[Tensor], None]) -> None:
    for x in xs:
        do(x)


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else [*tensors]


def _only(one: Any) -> Any:
    """The only element of a list in which torch puts one tensor, or one list of tensors."""
    return one if isinstance(one, Tensor) else one[0]


def _rooted(root: int | None) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root or 0
    return options


def _waits() -> bool:
    """Whether the method that asks was called by a function of torch that waits for it."""
    frame = sys._getframe(2)
    return frame.f_code.co_name in SYNCHRONOUS and frame.f_code.co_filename == TORCH


def _nothing() -> None:
    """Queued behind what is to end."""
