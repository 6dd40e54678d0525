"""Chunks: the keys of parameter servers, contiguous ranges of flat units.

    unit layers.0     |<- server 0 ->|<- server 1 ->|        its range of every unit
    chunks            |  0  |  1  |  2  | 0 |  1  |  2  |    each at most CHUNK bytes

Every server has as many bytes of every unit as the others, to within an element. Keys count in the
order in which the next forward pass needs the units, so a lower key is more urgent, at both ends
(Jayarajan et al. 2019, https://arxiv.org/abs/1905.03960). A large unit is in several chunks: a more
urgent one need not wait for more than one chunk of another.
"""

from collections.abc import Sequence
from typing import NamedTuple

from howdah.plan.flat_buffers import Buffer, share

CHUNK = 1 << 20  # bytes, as pushed; between 256 KB, where overhead begins, and 4 MB


class Chunk(NamedTuple):
    """The elements [start, stop) of a unit, of which those below `decay_stop` decay."""

    unit: str
    start: int
    stop: int
    decay_stop: int

    @property
    def length(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def chunks_of(
    buffers: Sequence[Buffer], servers: int, *, element_bytes: int, most: int = CHUNK
) -> list[list[Chunk]]:
    """For each server its chunks, by key.

    buffers  of the units, in forward order
    most     bytes of a chunk
    """
    return [
        [chunk for buffer in buffers for chunk in _cut(buffer, servers, one, most // element_bytes)]
        for one in range(servers)
    ]


def _cut(buffer: Buffer, servers: int, server: int, most: int) -> list[Chunk]:
    first, last = share(buffer.length, servers, server)
    parts = -(-(last - first) // max(most, 1))
    cuts = (share(last - first, parts, part) for part in range(parts))
    return [Chunk(buffer.unit, first + a, first + b, buffer.decay_stop) for a, b in cuts]
