"""Flat buffers: the weights of a unit side by side, so that one message moves them all.

    unit layers.0   |q.weight      |k.weight   |v.weight   |..pad|norm.weight|..pad|
                    <----------------- decay -------------------><--- no decay ---->
                                                                 ^ decay_stop

Weights, gradients, master weights and moments of a unit all use one segment table, so an offset
means the same element in each. Segments start at multiples of ALIGN elements, which keeps matrix
products fast. The padding between segments is zero, and is sent with them.

On GPUs a buffer that is shared out is padded at its end, so that all shares have one length and
begin at multiples of SHARE_ALIGN elements: NCCL has one operation only for equal counts.

The weights with weight decay are first, so that the optimizer's two parameter groups are two
ranges; with learning rates by pattern, each rate is a range inside of these. Frozen weights of a
unit are a buffer of their own, `frozen.layers.0`, which has weights alone. A rank's share of a
buffer is a range too (`share`), cut at any element. Where tensor or expert parallelism cuts a
weight, its segment holds the rank's box of the weight.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from howdah.plan.boxes import Box, Piece, whole
from howdah.shapes.weights import FROZEN, Weight

Order = tuple[int, ...]  # of experts: the number of that at each place
Orders = Mapping[str, Order]  # by block; one that has none has its experts by number

BY_NUMBER: Orders = {}

ALIGN = 16  # elements: a cache line of float32
SHARE_ALIGN = 64  # elements: 128 bytes of bf16, the longest access of a GPU


@dataclass(frozen=True)
class Segment:
    """The elements [start, stop) of a buffer, which hold `box` of the tensor `name` row by row.

    shape   shape of the whole tensor
    places  the numbers of the experts in the box, where they are not those of its rows
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    start: int
    stop: int
    places: Order = ()


class Run(NamedTuple):
    """The elements [start, stop) of a buffer, which the optimizer treats alike.

    rate  what the learning rate is multiplied by
    """

    start: int
    stop: int
    decay: bool
    rate: float


@dataclass(frozen=True)
class Buffer:
    """The segment table of one unit. Weight decay applies to [0, decay_stop), not to the rest.

    rates  the runs of a buffer whose weights have learning rates of their own; else empty
    """

    unit: str
    segments: tuple[Segment, ...]
    decay_stop: int
    length: int
    rates: tuple[Run, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether its weights are trained; of a unit, all are or none is."""
        return not self.unit.startswith(FROZEN)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The whole buffer as runs: with weight decay first."""
        turn = self.decay_stop
        return self.rates or (Run(0, turn, True, 1.0), Run(turn, self.length, False, 1.0))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the unit's weights, in the order of the buffer."""
        return tuple(segment.name for segment in self.segments)


def buffers(
    weights: Iterable[Weight],
    boxes: Mapping[str, Box] | None = None,
    *,
    multiple: Callable[[str], int] = lambda unit: 1,
    align: int = ALIGN,
) -> tuple[Buffer, ...]:
    """One buffer for each unit, in the order in which the forward pass first uses the units.

    boxes     by weight name, the box that a rank holds; a weight without a box is not held.
              None: the rank holds all weights whole.
    multiple  by unit, what the length of its buffer is a multiple of
    align     what a segment starts at a multiple of
    """
    units: dict[str, list[tuple[Weight, Box]]] = {}
    for weight in weights:
        if boxes is None:
            units.setdefault(weight.unit, []).append((weight, whole(weight.shape)))
        elif weight.name in boxes:
            units.setdefault(weight.unit, []).append((weight, boxes[weight.name]))
    return tuple(_lay(unit, members, multiple(unit), align) for unit, members in units.items())


def _lay(unit: str, members: list[tuple[Weight, Box]], multiple: int, align: int) -> Buffer:
    segments, end, decay_stop = [], 0, 0
    runs: dict[tuple[bool, float], int] = {}  # and where they end
    # a stable sort
    for weight, box in sorted(members, key=lambda held: (not held[0].decay, -held[0].rate)):
        segments.append(Segment(weight.name, weight.shape, box, end, end + box.elements))
        end += -(-box.elements // align) * align
        decay_stop = end if weight.decay else decay_stop
        runs[weight.decay, weight.rate] = end
    end = -(-end // multiple) * multiple
    rates: tuple[Run, ...] = ()
    if {rate for _, rate in runs} - {0.0, 1.0}:
        stops = [*list(runs.values())[:-1], end]
        starts = [0, *stops[:-1]]
        rates = tuple(Run(a, b, *key) for a, b, key in zip(starts, stops, runs, strict=True))
    return Buffer(unit, tuple(segments), decay_stop, end, rates)


def share(length: int, parts: int, index: int) -> tuple[int, int]:
    """Share `index` of `parts`, as a range [start, stop) of `length` elements.

    The sizes of the shares differ by at most one element.
    """
    return length * index // parts, length * (index + 1) // parts


def portion(length: int, sizes: Sequence[int], index: int) -> tuple[int, int]:
    """Portion `index` of `length` elements that are cut in the ratio of `sizes`, as a range.

    >>> [portion(12, (3, 1, 2), index) for index in range(3)]
    [(0, 6), (6, 8), (8, 12)]
    """
    before, whole = sum(sizes[:index]), sum(sizes)
    return length * before // whole, length * (before + sizes[index]) // whole


def shares(length: int, parts: int) -> np.ndarray:
    """Lengths of the shares of `length` elements that are cut into `parts` shares."""
    each, rest = divmod(length, parts)  # the product of two large numbers has more than 64 bits
    return each + np.diff(np.arange(parts + 1) * rest // parts)


def gaps(buffer: Buffer) -> list[tuple[int, int]]:
    """The padding of a buffer: the ranges [start, stop) that belong to no segment."""
    ends = [0, *(segment.stop for segment in buffer.segments)]
    starts = [*(segment.start for segment in buffer.segments), buffer.length]
    return [pair for pair in zip(ends, starts, strict=True) if pair[0] < pair[1]]


def pieces(buffer: Buffer, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
    """The pieces of tensors inside [start, stop) of a buffer, each with its range in the buffer.

    Padding is left out.
    """
    for segment in buffer.segments:
        for box, begin in boxes(segment):
            first, last = max(start, begin), min(stop, begin + box.elements)
            if first < last:
                yield (
                    Piece(segment.name, segment.shape, box, first - begin, last - begin),
                    first,
                    last,
                )


def boxes(segment: Segment) -> Iterator[tuple[Box, int]]:
    """The boxes of a tensor that a segment holds, each with where it begins in the buffer: one, or
    where experts are not by number one for each run of neighbours.
    """
    box = segment.box
    if not segment.places:
        yield box, segment.start
        return
    each, at = box.elements // box.size[0], 0
    for _, some in groupby(enumerate(segment.places), key=lambda pair: pair[1] - pair[0]):
        (_, first), *more = some
        here = Box((first, *box.corner[1:]), (len(more) + 1, *box.size[1:]))
        yield here, segment.start + at * each
        at += len(more) + 1
