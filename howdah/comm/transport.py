"""Transports: what carries collectives between the ranks of one group.

All ranks of a group call the same operations in the same order. Tensors are flat, contiguous and
on the CPU; `group.py` makes them so. There are three ways, with one interface and equal bits:

    engine.py           shared memory inside a host, by a small C library
    torch_transport.py  messages of a torch process group, between hosts too

Every operation returns the bytes that this rank sent, counted as if each rank talked to every
other directly. With `counts` elements for the ranks, of w bytes:

    reduce_scatter   (sum(counts) - own)·w         broadcast    (N - 1)·n·w on the root
    all_gather       (N - 1)·own·w                 reduce       n·w but on the root
    all_reduce       both, over shares             scatter      the others' counts on the root
    all_to_all       sum(sent) but to itself       gather       own·w but on the root
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from howdah.plan.flat_buffers import share
from howdah.plan.recording import Wires

Counts = Sequence[int]  # elements, one number for each rank


class SubgroupFactory(Protocol):
    """Joins some of the ranks of a transport, by number, in one of their own."""

    wires: Wires  # what carries the messages of any of these ranks

    def __call__(self, ranks: Sequence[int]) -> "Transport":
        """All of `ranks` call, in one order."""
        ...


class PeerLost(RuntimeError):
    """A rank of the group has ended, is silent, or gave up; the sentence names it."""


class Batch(Protocol):
    """Operations that were started together."""

    sent: int


@dataclass
class Nothing:
    """A batch whose operations have told themselves what they sent."""

    sent: int = 0


class Transport(Protocol):
    """The ranks of one group and the wire between them.

    In every operation `out` may be the own slice of `x`, or `x` the own slice of `out`. `op` is
    one of sum, mean, min, max and product.
    """

    rank: int
    size: int
    link: str  # shared, tcp; none for a group of one
    site: str  # `file:line` on whose behalf another thread calls; empty: the caller's own line
    among: SubgroupFactory  # joins some of these ranks, by number, in a transport of their own

    def all_reduce(self, x: Tensor, op: str = "sum") -> int:
        """`x` becomes the reduction over the ranks."""
        ...

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts, op: str = "sum") -> int:
        """`out`, counts[rank] elements, becomes this rank's part of the reduction of `x`."""
        ...

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> int:
        """`out` becomes the parts of all ranks, `x` being this rank's, in rank order."""
        ...

    def broadcast(self, x: Tensor, root: int) -> int:
        """`x` becomes the root's."""
        ...

    def reduce(self, x: Tensor, root: int, op: str = "sum") -> int:
        """The root's `x` becomes the reduction; the others' stays as it was."""
        ...

    def gather(self, out: Tensor | None, x: Tensor, root: int, counts: Counts) -> int:
        """The root's `out` becomes the parts of all ranks."""
        ...

    def scatter(self, out: Tensor, x: Tensor | None, root: int, counts: Counts) -> int:
        """`out` becomes this rank's part of the root's `x`."""
        ...

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> int:
        """Part p of `x` goes to rank p; part p of `out` comes from it."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def send(self, x: Tensor, to: int) -> int:
        """One tensor to one peer, which receives it."""
        ...

    def receive(self, x: Tensor, source: int) -> None:
        """One tensor from one peer."""
        ...

    def group(self) -> AbstractContextManager[Batch]:
        """The operations called inside may run together; they are done when the block ends.

        Each returns what it sent already; what was sent later, the batch tells.
        """
        ...

    def abort(self) -> None:
        """End all waits of all ranks with PeerLost or the like, those of other threads of this one
        too: this rank cannot go on. What is left is to close.
        """
        ...

    def close(self) -> None:
        """Lets go of memory and connections."""
        ...


def shares(length: int, size: int) -> list[int]:
    """How many of `length` elements each of `size` ranks owns."""
    return [stop - start for start, stop in (share(length, size, r) for r in range(size))]


def copy_own(into: Tensor, part: Tensor) -> None:
    """Copies a rank's own part, where it is not in its place already."""
    if into.data_ptr() != part.data_ptr():
        into.copy_(part)


class _Nobody:
    """Joins one rank: itself."""

    wires = Wires("none", "none")

    def __call__(self, ranks: Sequence[int]) -> Transport:
        return SingleRank()


class SingleRank:
    """A group of one: every operation is a copy, or nothing."""

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
        """There is nobody to wait for."""

    def send(self, x: Tensor, to: int) -> int:
        """There is nobody to send to."""
        raise AssertionError("a group of one has no peers")

    def receive(self, x: Tensor, source: int) -> None:
        """There is nobody to receive from."""
        raise AssertionError("a group of one has no peers")

    def group(self) -> AbstractContextManager[Batch]:
        return nullcontext(Nothing())

    def abort(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """There is nothing to let go of."""
