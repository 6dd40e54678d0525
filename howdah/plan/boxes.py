"""Pieces of tensors and their intersections.

A box is a rectangle inside a tensor, given by its corner and its size. A piece is a contiguous run
of a box's elements, because the flat buffers of data parallelism cut tensors at any element:

    tensor [4, 6]      box at (0, 3) of size (4, 3)      piece [2, 7) of the box
    . . . . . .        . . . a b c                       . . . . . c
    . . . . . .        . . . d e f                       . . . d e f
    . . . . . .        . . . g h i                       . . . g . .
    . . . . . .        . . . j k l

Elements of a box are counted row by row from 0. Checkpoints, resharding and `verify` all need the
runs of elements that two pieces have in common; `overlap` computes them. `reads` does so for every
holder of pieces, and plans how the pieces of one layout are filled from those of another, with
each element read once:

    wanted      |<---------- piece 0 ---------->|
    rank 0      |<-- held -->|
    rank 1          |<------ held ------>|
    rank 2                        |<--- held -->|
    reads       | 0          | 1         | 2    |
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Generic, TypeVar

Holder = TypeVar("Holder", bound=Hashable)  # a rank or a file that holds pieces


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: `corner` and `size`, one number per dim."""

    corner: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.size)


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop), row by row, of `box` inside the tensor `name` of `shape`."""

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int

    @property
    def elements(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Overlap:
    """A run of `length` elements, at offset `there` of one piece and `here` of another."""

    there: int
    here: int
    length: int


@dataclass(frozen=True)
class Read(Generic[Holder]):
    """A run of elements to read from a holder's piece into a wanted piece.

    piece   index of the wanted piece
    holder  the rank or file to read from
    source  index of the piece among the holder's pieces
    run     the elements: `run.there` is the offset in the holder's piece, `run.here` in the wanted
    """

    piece: int
    holder: Holder
    source: int
    run: Overlap


class Missing(LookupError):
    """No holder has some element; the message names the first such element."""


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), shape)


def whole_piece(name: str, shape: tuple[int, ...]) -> Piece:
    """The piece that is the whole tensor."""
    return Piece(name, shape, whole(shape), 0, prod(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes of one tensor; None if it is empty."""
    corner = tuple(max(x, y) for x, y in zip(a.corner, b.corner, strict=True))
    ends = (
        min(ca + sa, cb + sb)
        for ca, sa, cb, sb in zip(a.corner, a.size, b.corner, b.size, strict=True)
    )
    size = tuple(end - start for start, end in zip(corner, ends, strict=True))
    return Box(corner, size) if all(n > 0 for n in size) else None


def overlap(there: Piece, here: Piece) -> Iterator[Overlap]:
    """The runs of elements that two pieces of one tensor share, in row-by-row order.

    Offsets count from each piece's `start`. Rows that are adjacent in both pieces are joined into
    one run, so that equal boxes give a single run.
    """
    shared = intersect(there.box, here.box)
    if shared is None:
        return
    pending: Overlap | None = None
    for row, length in _rows(shared, there, here):
        run = _clip(there, here, row, length)
        if run is None:
            continue
        if pending and _follows(pending, run):
            pending = Overlap(pending.there, pending.here, pending.length + run.length)
            continue
        if pending:
            yield pending
        pending = run
    if pending:
        yield pending


def _follows(first: Overlap, second: Overlap) -> bool:
    return (first.there + first.length, first.here + first.length) == (second.there, second.here)


def _rows(shared: Box, a: Piece, b: Piece) -> Iterator[tuple[tuple[int, ...], int]]:
    """The position in the tensor at which each row of `shared` starts, with the row's length.

    Trailing dims in which both boxes and `shared` have equal size are joined into one row. Offsets
    in both pieces grow from row to row, so bisection finds the rows that are inside both pieces:
    the time for a small piece of a large box grows with the piece's rows, not with the box's.
    """
    inner = len(shared.size)
    while inner > 0 and shared.size[inner - 1] == a.box.size[inner - 1] == b.box.size[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length, rows = prod(shared.size[inner:]), range(prod(shared.size[:inner]))

    def begun(index: int) -> bool:
        row = _position(shared, inner, index)
        return all(_offset(p.box, row) + length > p.start for p in (a, b))

    def ended(index: int) -> bool:
        row = _position(shared, inner, index)
        return any(_offset(p.box, row) >= p.stop for p in (a, b))

    for index in rows[bisect_left(rows, True, key=begun) : bisect_left(rows, True, key=ended)]:
        yield _position(shared, inner, index), length


def _position(box: Box, dims: int, index: int) -> tuple[int, ...]:
    """The position in the tensor where row `index` of the box starts.

    A row is one index of each of the first `dims` dims.
    """
    position = list(box.corner)
    for dim in range(dims - 1, -1, -1):
        index, step = divmod(index, box.size[dim])
        position[dim] += step
    return tuple(position)


def _offset(box: Box, position: tuple[int, ...]) -> int:
    offset = 0
    for corner, size, at in zip(box.corner, box.size, position, strict=True):
        offset = offset * size + at - corner
    return offset


def _clip(there: Piece, here: Piece, position: tuple[int, ...], length: int) -> Overlap | None:
    """The part of a row that both pieces hold, as offsets into both; None if there is none."""
    a = _offset(there.box, position) - there.start
    b = _offset(here.box, position) - here.start
    skip = max(0, -a, -b)
    stop = min(length, there.elements - a, here.elements - b)
    return Overlap(a + skip, b + skip, stop - skip) if stop > skip else None


# -- which piece is read from which holder -------------------------------------


def reads(
    wanted: Sequence[Piece],
    held: Mapping[Holder, Sequence[Piece]],
    *,
    local: Holder | None = None,
) -> list[Read[Holder]]:
    """The reads that fill every element of every wanted piece exactly once.

    An element that several holders have is read from `local` if possible; otherwise from the holder
    from which the pieces before read the fewest elements; among equals, from the first in `held`.
    The reads of one piece are contiguous, and those from one source are in the order of its
    elements. Raises Missing, before anything is read, if no holder has some element of a tensor of
    that name and shape.
    """
    sources: dict[tuple[str, tuple[int, ...]], list[tuple[Holder, int, Piece]]] = {}
    for holder, theirs in held.items():
        for index, source in enumerate(theirs):
            sources.setdefault((source.name, source.shape), []).append((holder, index, source))
    asked = dict.fromkeys(held, 0)
    plan: list[Read[Holder]] = []
    for number, piece in enumerate(wanted):
        gaps = [(0, piece.elements)] if piece.elements else []
        known = sources.get((piece.name, piece.shape), [])
        for holder, index, source in sorted(known, key=lambda s: (s[0] != local, asked[s[0]])):
            if not gaps:
                break
            runs, gaps = _fill(gaps, overlap(source, piece))
            plan += [Read(number, holder, index, run) for run in runs]
            asked[holder] += sum(run.length for run in runs)
        if gaps:
            at = _position(piece.box, len(piece.shape), piece.start + gaps[0][0])
            raise Missing(f"nobody holds element {list(at)} of {piece.name} {list(piece.shape)}")
    return plan


def _fill(
    gaps: list[tuple[int, int]], runs: Iterable[Overlap]
) -> tuple[list[Overlap], list[tuple[int, int]]]:
    """The runs that fill gaps [start, stop) of a piece, cut to the gaps; and the gaps that remain.

    Gaps and runs are both in order, and one loop walks both: one run may fill several gaps, and
    several runs may fill one gap.
    """
    filled: list[Overlap] = []
    left: list[tuple[int, int]] = []
    ahead = iter(runs)
    run = next(ahead, None)
    for gap, stop in gaps:
        start = gap
        while run and run.here < stop:
            end = run.here + run.length
            first, last = max(start, run.here), min(stop, end)
            if first < last:
                left.append((start, first))
                filled.append(Overlap(run.there + first - run.here, first, last - first))
                start = last
            if end > stop:
                break  # the rest of the run may fill the next gap
            run = next(ahead, None)
        left.append((start, stop))
    return filled, [(start, stop) for start, stop in left if start < stop]
