"""What a transport refuses, with one sentence for each, before anything is written or sent.

A wrong call must harm nobody: not this process, which would read what is not there, and not the
other ranks, which would wait for what never comes. Everything here is looked at on every call, so
it is quick: what is right is seen at once, and only what is wrong is looked at closely.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from operator import index
from typing import TypeAlias

from torch import Tensor

from howdah.base.errors import UserError, shown
from howdah.comm.engine_abi import CODES, DTYPES
from howdah.comm.reduction import check_reduction

MOST = 1 << 56  # elements, bytes: more than any memory holds, and sums of some do not overflow
LONGEST = 1e9  # seconds that can be asked for: 30 years
LOW = 1 << 32  # addresses below are rare: seldom the heap's, or those of memory that was let go

Part: TypeAlias = "array[int]"  # elements for each rank
Cut = tuple[Part, int, int, int, int]  # and what `movable` says: of the part, where the whole is


def movable(x: Tensor) -> tuple[int, int, int]:
    """The engine's number for x's dtype, the bytes of an element, and where the first one is."""
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
    """Whether there is no memory under x, as for sharded weights between their uses."""
    return x.data_ptr() < LOW and x.numel() > 0 and not x.untyped_storage().data_ptr()


def reduction(x: Tensor, op: str) -> int:
    """The engine's number for the reduction `op`, when x can be reduced so."""
    try:
        check_reduction(x.dtype, op)
    except (TypeError, AttributeError):
        raise UserError(f"a reduction is named by a word, not by {shown(op)}") from None
    return CODES[op]


def flat(x: Tensor) -> Tensor:
    """A tensor that can be moved, in one dim."""
    movable(x)
    return x if x.ndim == 1 else x.view(-1)


def apart(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share no memory."""
    a, b = x.data_ptr(), y.data_ptr()
    return a + x.nbytes <= b or b + y.nbytes <= a


def whole_number(name: str, value: int, *, most: int = MOST) -> int:
    """A count, from 0 to `most`."""
    try:
        number = index(value)
    except (TypeError, RuntimeError, ValueError):
        number = -1
    if not 0 <= number <= most:
        raise UserError(f"{name} is {shown(value)}: it must be a whole number from 0 to {most}")
    return number


def duration(name: str, value: float, *, least: float = 0.001) -> float:
    """Seconds of patience."""
    sound = isinstance(value, int | float) and least <= value < inf
    if not sound:
        raise UserError(
            f"{name} is {shown(value)}: it must be a number of seconds, at least {least:g}"
        )
    return min(float(value), LONGEST)


@dataclass(frozen=True)
class Checks:
    """What `rank` of `size` may ask for."""

    rank: int
    size: int

    def peer(self, rank: int, *, other: bool = False, operation: str = "") -> int:
        """A rank of the group, or one of the others."""
        try:
            number = rank if type(rank) is int else index(rank)
            if 0 <= number < self.size and not (other and number == self.rank):
                return number
        except (TypeError, RuntimeError, ValueError):
            pass
        said = f"rank {self.rank} of {self.size} names rank {shown(rank)} as its peer"
        raise UserError(f"{operation}: {said}" if operation else said)

    def counts(self, counts: Iterable[int]) -> Part:
        """Elements for each rank, as whole numbers that C can read."""
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
        """`x` is made up of parts of these sizes."""
        if sum(cut) != x.numel():
            raise UserError(
                f"{name} has {x.numel()} elements, and counts are {cut.tolist()}: they must have "
                "that sum"
            )

    def cut(self, whole: Tensor | None, part: Tensor, counts: Iterable[int]) -> Cut:
        """`part` is this rank's of `whole`, where that is here: in its place, or elsewhere."""
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
        """What goes to each and comes from each; what this rank keeps is both."""
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
        """What the root gives; the others' is not looked at."""
        if self.rank == root and x is None:
            raise UserError(f"rank {root} is the root and gives no {name}")
        return x if self.rank == root else None
