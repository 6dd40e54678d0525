"""What one rank sends in one training step, in bytes, before anything runs.

The promise that keeps the house honest: these numbers equal the bytes that `comm` counts in a
real run, exactly, also for sizes that do not divide. `Traffic` names a row of both tables.

Data parallelism over N ranks, a buffer of Ψ elements of w bytes (padding included: it travels):

    reduce-scatter   (Ψ - |own|)·w       every rank's share but its own goes out
    all-gather       (N-1)·|own|·w       the own sum goes to everyone else
    scalars          3 float64 to each of N-1 peers: token count, stop flag; then the loss
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from howdah.plan.flat import Buffer, share
from howdah.plan.layout import Layout

SCALARS = 3  # float64 numbers that every step sums over the ranks
SCALAR_BYTES = 8


class Traffic(NamedTuple):
    """One row's name: what the dp axis sends in a reduce-scatter over tcp, say."""

    axis: str
    operation: str
    link: str


def step_traffic(
    layout: Layout, buffers: Iterable[Buffer], *, rank: int, element_bytes: int, link: str = "tcp"
) -> dict[Traffic, int]:
    """Bytes that `rank` sends in one step, by axis, operation and class of link.

    element_bytes  of a gradient on the wire: 4, or 8 in float64
    """
    ranks = layout.world
    if ranks == 1:
        return {}
    sent: Counter[Traffic] = Counter()
    for buffer in buffers:
        start, stop = share(buffer.length, ranks, rank)
        own = (stop - start) * element_bytes
        sent[Traffic("dp", "reduce_scatter", link)] += buffer.length * element_bytes - own
        sent[Traffic("dp", "all_gather", link)] += (ranks - 1) * own
    sent[Traffic("dp", "scalars", link)] = (ranks - 1) * SCALARS * SCALAR_BYTES
    return dict(sent)
