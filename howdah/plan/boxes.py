"""Pieces of tensors and their intersections.

A box is a corner and a size inside a tensor. A piece is a run of elements inside a box,
because the flat buffers of data parallelism cut through tensors at any element:

    tensor [4, 6]      box at (0, 3) of size (4, 3)      piece [2, 7) of the box
    . . . . . .        . . . a b c                       . . . . . c
    . . . . . .        . . . d e f                       . . . d e f
    . . . . . .        . . . g h i                       . . . g . .
    . . . . . .        . . . j k l

Elements of a box are counted row by row from 0. Checkpoints, resharding and `verify` all ask
the same question, *which runs of this piece stand in that piece*, and `overlap` answers it.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


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
class Run:
    """`length` elements that stand at offset `there` of one piece and `here` of another."""

    there: int
    here: int
    length: int


def whole(shape: tuple[int, ...]) -> Box:
    """The box that is the whole tensor."""
    return Box((0,) * len(shape), shape)


def whole_piece(name: str, shape: tuple[int, ...]) -> Piece:
    """The piece that is the whole tensor."""
    return Piece(name, shape, whole(shape), 0, prod(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The box that both share, or None."""
    corner = tuple(max(x, y) for x, y in zip(a.corner, b.corner, strict=True))
    ends = (
        min(ca + sa, cb + sb)
        for ca, sa, cb, sb in zip(a.corner, a.size, b.corner, b.size, strict=True)
    )
    size = tuple(end - start for start, end in zip(corner, ends, strict=True))
    return Box(corner, size) if all(n > 0 for n in size) else None


def overlap(there: Piece, here: Piece) -> Iterator[Run]:
    """The runs of elements that two pieces of one tensor share, in row-by-row order.

    Offsets count from each piece's `start`. Joins rows into one run where both pieces hold
    them side by side, so that equal boxes give a single run.
    """
    shared = intersect(there.box, here.box)
    if shared is None:
        return
    pending: Run | None = None
    for row, length in _rows(shared, there, here):
        run = _clip(there, here, row, length)
        if run is None:
            continue
        if pending and _follows(pending, run):
            pending = Run(pending.there, pending.here, pending.length + run.length)
            continue
        if pending:
            yield pending
        pending = run
    if pending:
        yield pending


def _follows(first: Run, second: Run) -> bool:
    return (first.there + first.length, first.here + first.length) == (second.there, second.here)


def _rows(shared: Box, a: Piece, b: Piece) -> Iterator[tuple[tuple[int, ...], int]]:
    """Positions in the tensor where rows of `shared` start, with the rows' length.

    Trailing dims in which the boxes and `shared` have equal extent are one row. Offsets in
    both pieces grow from row to row, so the rows that lie before or behind one of them are
    found by bisection: a small piece of a large box costs its own rows, not the box's.
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
    """Where row `index` of the box starts, counting over its first `dims` dims."""
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


def _clip(there: Piece, here: Piece, position: tuple[int, ...], length: int) -> Run | None:
    """The row as offsets into both pieces, cut to what both hold."""
    a = _offset(there.box, position) - there.start
    b = _offset(here.box, position) - here.start
    skip = max(0, -a, -b)
    stop = min(length, there.elements - a, here.elements - b)
    return Run(a + skip, b + skip, stop - skip) if stop > skip else None
