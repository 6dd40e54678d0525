"""Flat buffers: the weights of a unit laid side by side, so that one message moves them all.

    unit layers.0   |q.weight      |k.weight   |v.weight   |..pad|norm.weight|..pad|
                    <----------------- decay -------------------><--- no decay ---->
                                                                 ^ decay_stop

Weights, gradients, master weights and moments of a unit all use one segment table, so an
offset means the same thing in each. Segments start on multiples of ALIGN elements, which keeps
matrix products fast; the padding between them is zero, and travels.

Decaying weights come first, so that the two groups of the optimizer are two ranges. A rank's
share of a buffer is a range too (`share`), cut at any element. Where tensor or expert parallelism
cuts a weight, the segment is the rank's box of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from howdah.plan.boxes import Box, Piece, whole
from howdah.shapes.weights import Weight

ALIGN = 16  # elements: a cache line of float32


@dataclass(frozen=True)
class Segment:
    """The elements [start, stop) of a buffer that are `box` of the tensor `name`, row by row.

    shape  of the whole tensor
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class Buffer:
    """The segment table of one unit. [0, decay_stop) decays, [decay_stop, length) does not."""

    unit: str
    segments: tuple[Segment, ...]
    decay_stop: int
    length: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of its weights, as they lie."""
        return tuple(segment.name for segment in self.segments)


def buffers(
    weights: Iterable[Weight], boxes: Mapping[str, Box] | None = None
) -> tuple[Buffer, ...]:
    """One buffer for each unit, in the order in which the forward pass first uses them.

    boxes  what a rank holds of each weight, by name; the weights that it does not name are not
           held. None holds all of them whole.
    """
    units: dict[str, list[tuple[Weight, Box]]] = {}
    for weight in weights:
        if boxes is None:
            units.setdefault(weight.unit, []).append((weight, whole(weight.shape)))
        elif weight.name in boxes:
            units.setdefault(weight.unit, []).append((weight, boxes[weight.name]))
    return tuple(_lay(unit, members) for unit, members in units.items())


def _lay(unit: str, members: list[tuple[Weight, Box]]) -> Buffer:
    segments, end, decay_stop = [], 0, 0
    for weight, box in sorted(members, key=lambda held: not held[0].decay):  # stable
        segments.append(Segment(weight.name, weight.shape, box, end, end + box.elements))
        end += -(-box.elements // ALIGN) * ALIGN
        decay_stop = end if weight.decay else decay_stop
    return Buffer(unit, tuple(segments), decay_stop, end)


def share(length: int, parts: int, index: int) -> tuple[int, int]:
    """The range [start, stop) that part `index` of `parts` owns; sizes differ by at most one."""
    return length * index // parts, length * (index + 1) // parts


def gaps(buffer: Buffer) -> list[tuple[int, int]]:
    """The ranges [start, stop) of a buffer that belong to no segment: its padding."""
    ends = [0, *(segment.stop for segment in buffer.segments)]
    starts = [*(segment.start for segment in buffer.segments), buffer.length]
    return [pair for pair in zip(ends, starts, strict=True) if pair[0] < pair[1]]


def pieces(buffer: Buffer, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
    """The named pieces inside [start, stop) of a buffer, each with its range in the buffer.

    Padding belongs to no piece.
    """
    for segment in buffer.segments:
        first, last = max(start, segment.start), min(stop, segment.stop)
        if first < last:
            inside = first - segment.start, last - segment.start
            piece = Piece(segment.name, segment.shape, segment.box, *inside)
            yield piece, first, last
