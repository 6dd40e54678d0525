"""One collective on this rank, with its inputs and the expected result.

Inputs are small whole numbers from a counter hash. So every dtype holds their sums exactly (integer
overflow wraps around equally on all ranks), and a result of another rank, of another offset or of
the previous call has mostly wrong elements.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from howdah.comm.engine import Engine
from howdah.comm.transport import Transport, shares

PERIOD = 999_983  # elements after which numbers repeat: a prime, so that no share has this length
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPOILED = 0x55  # every byte of the output before a call that is checked


@dataclass(frozen=True)
class Trial:
    """One operation on this rank.

    call      runs the operation
    given     the input of this rank; source: the numbers to fill it with
    written   all memory that the operation may write to
    found     the result in that memory; expected: its correct value
    """

    call: Callable[[], object]
    given: Tensor
    source: Tensor
    written: Tensor
    found: Tensor
    expected: Tensor


@dataclass(frozen=True)
class Memory:
    """The tensors that an operation may use on this rank.

    x      n elements
    out    n elements and one more for each rank
    apart  reduce-scatter and all-gather read one tensor and write the other, not in place in x
    """

    x: Tensor
    out: Tensor
    apart: bool = False


def allocate(size: int, engine: Engine | None = None) -> tuple[Tensor, Tensor]:
    """Two tensors of `size` bytes: in the arena of `engine`, or this process's own."""
    if engine is None:
        return torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return engine.allocate(size, torch.uint8), engine.allocate(size, torch.uint8)


def views(
    pair: tuple[Tensor, Tensor], size: int, dtype: torch.dtype, *, apart: bool = False
) -> Memory:
    """`size` bytes of the first tensor, and all whole elements of the second."""
    first, second = pair
    whole = len(second) // dtype.itemsize * dtype.itemsize
    return Memory(first[:size].view(dtype), second[:whole].view(dtype), apart)


def make_trial(transport: Transport, op: str, memory: Memory) -> Trial:
    """The trial of operation `op`, a key of MAKERS, on all n elements of x; the root is rank 0."""
    return MAKERS[op](transport, memory)


def numbers(ranks: Sequence[int], start: int, stop: int, *, dtype: torch.dtype) -> Tensor:
    """Elements `start` to `stop` of the sum of the vectors of `ranks`. Each rank's vector holds
    whole numbers from 0 to 3.
    """
    length = stop - start
    position = torch.arange(start, start + min(length, PERIOD)).remainder_(PERIOD).int()
    total = torch.zeros_like(position)
    for rank in ranks:
        mixed = (position + 0x3504F3 * rank) * 0x2C1B3C6D
        mixed = (mixed ^ (mixed >> 15)) * 0x297A2D39
        total += (mixed >> 17) & 3
    period, found = total.to(dtype), torch.empty(length, dtype=dtype)
    for at in range(0, length, PERIOD):
        found[at : at + PERIOD] = period[: length - at]
    return found


def check(transport: Transport, trial: Trial) -> int:
    """Makes the call once; returns the number of wrong elements in the result of this rank."""
    trial.written.view(torch.uint8).fill_(SPOILED)
    trial.given.copy_(trial.source)
    transport.barrier()
    trial.call()
    bits = BITS[trial.found.element_size()]
    return int(torch.count_nonzero(trial.found.view(bits) != trial.expected.view(bits)))


# -- one function for each operation ------------------------------------------------------


class _Place:
    """The share of this rank in a vector of n elements, and the numbers of all ranks' vectors.

    cut          lengths of the shares, by rank
    start, stop  the range of this rank's share; own: its length; within: its slice of x
    """

    def __init__(self, transport: Transport, memory: Memory) -> None:
        self.rank, self.every = transport.rank, range(transport.size)
        self.n, self.dtype = len(memory.x), memory.x.dtype
        self.cut = shares(self.n, transport.size)
        self.start = sum(self.cut[: self.rank])
        self.stop, self.own = self.start + self.cut[self.rank], self.cut[self.rank]
        self.within = memory.x[self.start : self.stop]

    def mine(self) -> Tensor:
        return numbers([self.rank], 0, self.n, dtype=self.dtype)

    def my_share(self) -> Tensor:
        return numbers([self.rank], self.start, self.stop, dtype=self.dtype)

    def root(self) -> Tensor:
        return numbers([0], 0, self.n, dtype=self.dtype)

    def summed(self) -> Tensor:
        return numbers(self.every, 0, self.n, dtype=self.dtype)

    def joined(self) -> Tensor:
        """The result of an all-gather: each rank's share of that rank's own vector."""
        starts = [sum(self.cut[:rank]) for rank in self.every]
        spans = zip(self.every, starts, self.cut, strict=True)
        dtype = self.dtype
        return torch.cat([numbers([r], at, at + own, dtype=dtype) for r, at, own in spans])


def _all_reduce(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    return Trial(partial(transport.all_reduce, x), x, at.mine(), x, x, at.summed())


def _reduce_scatter(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    to = memory.out[: at.own] if memory.apart else at.within
    call = partial(transport.reduce_scatter, to, x, at.cut)
    expected = numbers(at.every, at.start, at.stop, dtype=at.dtype)
    return Trial(call, x, at.mine(), to, to, expected)


def _all_gather(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    whole, given = (memory.out[: at.n], x[: at.own]) if memory.apart else (x, at.within)
    call = partial(transport.all_gather, whole, given, at.cut)
    return Trial(call, given, at.my_share(), whole, whole, at.joined())


def _broadcast(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    given = x[:0] if at.rank else x
    numbers = at.root()
    return Trial(partial(transport.broadcast, x, 0), given, numbers[: len(given)], x, x, numbers)


def _reduce(transport: Transport, memory: Memory) -> Trial:
    """A reduce: ranks other than the root keep their input."""
    at, x = _Place(transport, memory), memory.x
    source = at.mine()
    expected = source if at.rank else at.summed()
    return Trial(partial(transport.reduce, x, 0), x, source, x, x, expected)


def _gather(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    call = partial(transport.gather, None if at.rank else x, at.within, 0, at.cut)
    source = at.my_share()
    found, expected = (at.within, source) if at.rank else (x, at.joined())
    return Trial(call, at.within, source, x, found, expected)


def _scatter(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    call = partial(transport.scatter, at.within, None if at.rank else x, 0, at.cut)
    given, whole = x[:0] if at.rank else x, at.root()
    expected = whole[at.start : at.stop]
    return Trial(call, given, whole[: len(given)], x, at.within, expected)


def _all_to_all(transport: Transport, memory: Memory) -> Trial:
    at, x = _Place(transport, memory), memory.x
    out = memory.out[: at.own * transport.size]
    call = partial(transport.all_to_all, out, x, at.cut, [at.own] * transport.size)
    parts = [numbers([peer], at.start, at.stop, dtype=at.dtype) for peer in at.every]
    return Trial(call, x, at.mine(), out, out, torch.cat(parts))


MAKERS: Mapping[str, Callable[[Transport, Memory], Trial]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
