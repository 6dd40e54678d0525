"""Transports: they carry out the collectives between the ranks of one group.

All ranks of a group must call the same operations in the same order. Tensors are flat and
contiguous; `group.py` converts them. Three transports move tensors of the CPU, with equal bits:

    engine.py           shared memory inside a host, by a small C library
    tcp.py              frames over TCP, between hosts
    torch_transport.py  messages of a torch process group (gloo), inside a host and between hosts

Where each rank has a GPU of its own, a fourth moves the tensors of the GPUs, and one of these
everything else (`both.py`):

    native.py           the collectives of NCCL, in NCCL's order of additions

Every operation returns the bytes that this rank sent, counted as if each rank sent to every other
rank directly. With `counts` elements for the ranks (`own` for this rank), of w bytes each:

    reduce_scatter   (sum(counts) - own)·w         broadcast    (N - 1)·n·w on the root
    all_gather       (N - 1)·own·w                 reduce       n·w, except on the root
    all_reduce       both, over shares             scatter      (sum(counts) - own)·w on the root
    all_to_all       (sum(sent) - own)·w           gather       own·w, except on the root
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor
from torch.distributed import Store

from howdah.comm.checks import room
from howdah.plan.flat_buffers import share
from howdah.plan.recording import Wires

if TYPE_CHECKING:
    from howdah.comm.lane import Lane

Counts = Sequence[int]  # numbers of elements, one for each rank


class SubgroupFactory(Protocol):
    """Creates transports for subgroups of the ranks of a transport."""

    wires: Wires  # the links between any of these ranks

    @property
    def aside(self) -> Store | None:
        """The store of all ranks of the run, for threads of their own; None: there is one rank."""
        ...

    @property
    def address(self) -> str:
        """At which this rank listens for others; empty: howdah's own wire connects none."""
        ...

    def __call__(self, ranks: Sequence[int]) -> "Transport":
        """A transport for `ranks` (numbers in the parent transport). All of `ranks` must call it,
        in the same order.
        """
        ...


class PeerLost(RuntimeError):
    """A rank of the group has ended, is silent, or has aborted; the message names it.

    dead  the number of its process, if that has died on this machine
    """

    def __init__(self, told: str, dead: int = 0) -> None:
        super().__init__(told)
        self.dead = dead


def gave_up(rank: int, why: str = "") -> str:
    """What others say of a rank that has aborted."""
    return f"rank {rank} gave up{f': {why}' if why else '; what it says tells why'}"


class Transport(Protocol):
    """The interface of the collectives between the ranks of one group.

    In every operation `out` may be this rank's slice of `x`, or `x` this rank's slice of `out`.
    `op` is one of sum, mean, min, max and product. The operations with a root take None for the
    full tensor on the other ranks.
    """

    rank: int
    size: int
    link: str  # shared, tcp; none for a group of one
    site: str  # `file:line` to name in errors, set by a progress thread; empty: the caller's line
    among: SubgroupFactory  # creates transports for subgroups of these ranks
    checked: bool  # whether operations on a lane use the wire of the host, too

    def lane_of(self, x: Tensor) -> "Lane | None":
        """The lane for operations on `x`, a tensor of this rank's GPU; None: they take CPU tensors,
        on any thread.
        """
        ...

    def wire_of(self, x: Tensor) -> "Transport":
        """The transport that carries `x`; this one, unless it stands on several."""
        ...

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        """Replaces every rank's `x` by the reduction of all ranks' `x`."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        """Writes this rank's slice of the reduction of `x`, counts[rank] elements, to `out`."""
        ...

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        """Writes the `x` of all ranks, in rank order, to `out`; rank r has counts[r] elements."""
        ...

    def broadcast(self, x: Tensor, root: int) -> int:
        """Copies the root's `x` to every rank's `x`."""
        ...

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        """Replaces the root's `x` by the reduction; the `x` of other ranks is unchanged."""
        ...

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        """Writes the `x` of all ranks, in rank order, to the root's `out`."""
        ...

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        """Writes slice r of the root's `x`, counts[r] elements, to rank r's `out`."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        """Sends sent[p] elements of `x` to rank p, and writes received[p] from it to `out`."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def send(self, x: Tensor, to: int) -> int:
        """Sends one tensor to rank `to`, which must call `receive`."""
        ...

    def receive(self, x: Tensor, source: int) -> None:
        """Writes the next tensor that rank `source` sends to `x`."""
        ...

    def signal(self, to: int) -> None:
        """Lets one `wait` of rank `to` for this rank return. It may itself wait for that call."""
        ...

    def wait(self, source: int) -> None:
        """Waits for a `signal` of rank `source`; each `signal` lets one `wait` return."""
        ...

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """`count` zeros on the CPU, where this transport reads them without a copy."""
        ...

    def check(self) -> None:
        """Raises PeerLost if a rank was found to be lost; for a host that has waited for a GPU."""
        ...

    def compare(self) -> None:
        """Compares the calls of all ranks so far, if they were not compared one by one. All ranks
        call together. Raises Disagreement.
        """
        ...

    def group(self) -> AbstractContextManager[None]:
        """The operations called inside may run together; they are done when the block ends.

        Messages go first, all at once, so all ranks may send before they receive.
        """
        ...

    def abort(self, why: str = "") -> None:
        """Ends all waits of all ranks with an error such as PeerLost, also those of other threads
        of this rank. For a rank that cannot continue. Only `close` may be called after it.

        why  of this rank, which ranks of other machines are told where the wire can
        """
        ...

    def close(self) -> None:
        """Releases memory and connections."""
        ...


class OneLink:
    """A transport that moves CPU tensors only, over one class of link."""

    link: str
    checked = False

    def lane_of(self, x: Tensor) -> "Lane | None":
        """None: operations run on threads."""
        return None

    def wire_of(self, x: Tensor) -> "Transport":
        """Itself."""
        return cast(Transport, self)

    def allocate(self, count: int, dtype: torch.dtype) -> Tensor:
        """Memory of this process: its elements are sent as messages."""
        room(count, dtype)
        return torch.zeros(count, dtype=dtype)

    def check(self) -> None:
        """Does nothing: each wait raises its own error."""

    def compare(self) -> None:
        """Does nothing: records of each call were compared."""


def shares(length: int, size: int) -> list[int]:
    """The number of elements in each rank's share of `length` elements, for `size` ranks."""
    return [stop - start for start, stop in (share(length, size, r) for r in range(size))]


def copy_own(into: Tensor, part: Tensor) -> None:
    """Copies `part` to `into`, unless both are the same memory."""
    if into.data_ptr() != part.data_ptr():
        into.copy_(part)


class _Nobody:
    """The subgroups of a group of one: the rank itself."""

    wires, aside, address = Wires("none", "none"), None, ""

    def __call__(self, ranks: Sequence[int]) -> Transport:
        return SingleRank()


class SingleRank(OneLink):
    """The transport of a group of one rank: every operation is a copy, or does nothing."""

    rank, size, link, site = 0, 1, "none", ""
    among: SubgroupFactory = _Nobody()

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        return 0

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        return self.all_gather(out, x, counts)

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        copy_own(out, x)
        return 0

    def broadcast(self, x: Tensor, root: int) -> int:
        return 0

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        return 0

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        assert out is not None
        return self.all_gather(out, x, counts)

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        assert x is not None
        return self.all_gather(out, x, counts)

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        return self.all_gather(out, x, sent)

    def barrier(self) -> None:
        """There is no other rank to wait for."""

    def send(self, x: Tensor, to: int) -> int:
        """There is no other rank to send to."""
        raise AssertionError("a group of one has no peers")

    def receive(self, x: Tensor, source: int) -> None:
        """There is no other rank to receive from."""
        raise AssertionError("a group of one has no peers")

    def signal(self, to: int) -> None:
        """There is no other rank to signal to."""
        raise AssertionError("a group of one has no peers")

    def wait(self, source: int) -> None:
        """There is no other rank to wait for."""
        raise AssertionError("a group of one has no peers")

    def group(self) -> AbstractContextManager[None]:
        return nullcontext()

    def abort(self, why: str = "") -> None:
        """No rank waits."""

    def close(self) -> None:
        """There is nothing to release."""
