"""Chunks: the keys of parameter servers, contiguous ranges of flat units.

    unit layers.0     |<- server 0 ->|<- server 1 ->|        its range of every unit
    chunks            |  0  |  1  |  2  | 0 |  1  |  2  |    each at most comm.push_chunk bytes

Every server has as many bytes of every unit as the others, or as `comm.server_shares` says, to
within an element of each range that a rank of a worker pushes (`plan/worker_ranks.py`). Keys count
in the order in which the next forward pass needs the units, so a lower key is more urgent, at both
ends (Jayarajan et al. 2019, https://arxiv.org/abs/1905.03960). A large unit is in several chunks: a
more urgent one need not wait for more than one chunk of another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from howdah.plan.flat_buffers import portion, share
from howdah.plan.worker_ranks import ServedRange


class Chunk(NamedTuple):
    """The elements [start, stop) of a unit, of which those below `decay_stop` decay.

    rank  of a worker that pushes and pulls it: the unit is that of its buffer
    """

    unit: str
    start: int
    stop: int
    decay_stop: int
    rank: int = 0

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def chunks_of(
    ranges: Sequence[ServedRange], sizes: Sequence[int], *, element_bytes: int, most: int
) -> list[list[Chunk]]:
    """For each server its chunks, by key.

    ranges  of the units, in forward order
    sizes   how much each server keeps, beside the others
    most    bytes of a chunk, as pushed: below 256 KB messages cost more than what they carry
    """
    return [
        [chunk for each in ranges for chunk in _cut(each, sizes, one, most // element_bytes)]
        for one in range(len(sizes))
    ]


def _cut(one: ServedRange, sizes: Sequence[int], server: int, most: int) -> list[Chunk]:
    first, last = (one.start + edge for edge in portion(one.stop - one.start, sizes, server))
    parts = -(-(last - first) // max(most, 1))
    cuts = (share(last - first, parts, part) for part in range(parts))
    unit, turn = one.buffer.unit, one.buffer.decay_stop
    return [Chunk(unit, first + a, first + b, turn, one.rank) for a, b in cuts]
