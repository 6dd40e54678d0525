"""Argument checks of the transports, before any data is written or sent. All raise UserError.

Without these checks, a wrong call could make this process read invalid memory, or make other ranks
wait for data that is never sent. The checks run on every call, so they are fast: valid arguments
pass at once, and only for wrong ones the details are examined.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from operator import index
from typing import TypeAlias

import torch
from torch import Tensor

from howdah.base.errors import UserError, shown
from howdah.comm.engine_abi import CODES, DTYPES
from howdah.comm.reduction import check_reduction

MOST = 1 << 56  # elements or bytes: more than any memory holds, and sums of some do not overflow
LONGEST = 1e9  # seconds, 30 years: the longest timeout
LOW = 1 << 32  # lower addresses are rare: seldom of the heap, and 0 for memory that was freed

Part: TypeAlias = "array[int]"  # number of elements for each rank
Cut = tuple[Part, int, int, int, int]  # see `Checks.cut`


def movable(x: Tensor) -> tuple[int, int, int]:
    """For a tensor that can be sent: the engine's number for its dtype, the bytes of an element,
    and the address of the first element. Raises UserError for any other tensor.
    """
    try:
        if not x.is_contiguous():
            raise UserError("collectives take contiguous tensors: call .contiguous() first")
        if not x.is_cpu:
            raise UserError(f"collectives take tensors of the CPU, not of {x.device}")
        code, width = DTYPES[x.dtype]
        at = x.data_ptr()
        if at < LOW and is_let_go(x):
            raise UserError("the memory of a tensor was let go: it has no elements to send")
        if width >= 8 and x.dtype.is_complex and (x.is_conj() or x.is_neg()):
            raise UserError("a conjugated view cannot be moved: call .resolve_conj() first")
        return code, width, at
    except (AttributeError, RuntimeError, TypeError):
        kind = f"a {x.layout} one" if isinstance(x, Tensor) else type(x).__name__
        raise UserError(f"collectives take dense tensors, not {kind}") from None
    except KeyError:
        raise UserError(f"collectives cannot move {x.dtype}") from None


def is_let_go(x: Tensor) -> bool:
    """Whether the memory of x has been freed, as that of sharded weights is between their uses."""
    return x.data_ptr() < LOW and x.numel() > 0 and not x.untyped_storage().data_ptr()


def reduction(x: Tensor, op: str) -> int:
    """The engine's number for the reduction `op`. Raises UserError if x cannot be reduced by it."""
    try:
        check_reduction(x.dtype, op)
    except (TypeError, AttributeError):
        raise UserError(f"a reduction is named by a word, not by {shown(op)}") from None
    return CODES[op]


def flat(x: Tensor) -> Tensor:
    """A view of x with one dim. Raises UserError if x cannot be sent."""
    movable(x)
    return x if x.ndim == 1 else x.view(-1)


def apart(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share no memory; one without any shares none."""
    a, b = x.data_ptr(), y.data_ptr()
    return not (a and b) or a + x.nbytes <= b or b + y.nbytes <= a


def whole_number(name: str, value: int, *, most: int = MOST) -> int:
    """`value` as an int. Raises UserError, which contains `name`, unless it is from 0 to `most`."""
    try:
        number = index(value)
    except (TypeError, RuntimeError, ValueError):
        number = -1
    if not 0 <= number <= most:
        raise UserError(f"{name} is {shown(value)}: it must be a whole number from 0 to {most}")
    return number


def room(count: int, dtype: torch.dtype) -> int:
    """Bytes of a new tensor of `count` elements. Raises UserError for what is no count or dtype."""
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"a tensor's dtype is {dtype!r}: it must be one of torch's")
    return whole_number("the number of elements", count) * dtype.itemsize


def duration(name: str, value: float, *, least: float = 0.001) -> float:
    """A timeout in seconds, cut to LONGEST. Raises UserError unless it is at least `least`."""
    sound = isinstance(value, int | float) and least <= value < inf
    if not sound:
        raise UserError(
            f"{name} is {shown(value)}: it must be a number of seconds, at least {least:g}"
        )
    return min(float(value), LONGEST)


@dataclass(frozen=True)
class Checks:
    """Checks of the arguments of collectives that `rank` calls in a group of `size` ranks."""

    rank: int
    size: int

    def peer(self, rank: int, *, other: bool = False, operation: str = "") -> int:
        """`rank` as an int. Raises UserError unless it is a rank of the group.

        other      it must not be this rank
        operation  begins the error message
        """
        try:
            number = rank if type(rank) is int else index(rank)
            if 0 <= number < self.size and not (other and number == self.rank):
                return number
        except (TypeError, RuntimeError, ValueError):
            pass
        said = f"rank {self.rank} of {self.size} names rank {shown(rank)} as its peer"
        raise UserError(f"{operation}: {said}" if operation else said)

    def counts(self, counts: Iterable[int]) -> Part:
        """The number of elements for each rank, as an array of 64-bit integers for C."""
        try:
            cut = array("q", counts)
        except (TypeError, OverflowError, ValueError, RuntimeError):
            raise UserError(f"counts are {shown(counts)}: one whole number for each rank") from None
        if len(cut) != self.size or min(cut) < 0:
            raise UserError(
                f"counts are {cut.tolist()}: {self.size} are needed, one for each rank, and none "
                "below zero"
            )
        return cut

    def fit(self, name: str, x: Tensor, cut: Part) -> None:
        """Checks that the sizes in `cut` sum to the number of elements of `x`, called `name`."""
        if sum(cut) != x.numel():
            raise UserError(
                f"{name} has {x.numel()} elements, and counts are {cut.tolist()}: they must have "
                "that sum"
            )

    def cut(self, whole: Tensor | None, part: Tensor, counts: Iterable[int]) -> Cut:
        """Checks that `part` fits as this rank's slice of `whole`, which is cut into `counts`.

        whole  None on ranks that have no such tensor
        part   the slice of `whole` itself, or a tensor that shares no memory with `whole`

        Returns `counts` as an array; the engine's number for the dtype; bytes of an element; the
        address of `whole`, or 0; the address of `part`.
        """
        cut = self.counts(counts)
        code, width, at = movable(part)
        if part.numel() != cut[self.rank] or sum(cut) > MOST:
            raise UserError(
                f"counts are {cut.tolist()}, and rank {self.rank} gives a tensor of "
                f"{part.numel()} elements for its own"
            )
        if whole is None:
            return cut, code, width, 0, at
        other, _, start = movable(whole)
        self.fit("the whole tensor", whole, cut)
        own = start + sum(cut[: self.rank]) * width
        if code != other or not (at == own or apart(part, whole)):
            raise UserError(
                f"the tensor of rank {self.rank}'s part must have the dtype of the whole, and "
                "be its own part of it or lie apart"
            )
        return cut, code, width, start, at

    def exchange(
        self, out: Tensor, x: Tensor, sent: Iterable[int], received: Iterable[int]
    ) -> tuple[Part, Part]:
        """The numbers of elements that an all-to-all sends to and receives from each rank. Both
        must contain the same number for this rank itself.
        """
        gives, takes = self.counts(sent), self.counts(received)
        self.fit("x", x, gives)
        self.fit("out", out, takes)
        if out.dtype != x.dtype or not apart(out, x):
            raise UserError("all_to_all: out must have x's dtype, and lie apart from x")
        if gives[self.rank] != takes[self.rank]:
            raise UserError(
                f"all_to_all: rank {self.rank} sends {gives[self.rank]} elements to itself, and "
                f"receives {takes[self.rank]}"
            )
        return gives, takes

    def on_root(self, root: int, name: str, x: Tensor | None) -> Tensor | None:
        """`x` on the root, where it is required; None on other ranks, whose `x` is not checked."""
        if self.rank == root and x is None:
            raise UserError(f"rank {root} is the root and gives no {name}")
        return x if self.rank == root else None
