"""The gathers of weights of a step: of each unit, between which ranks, how long, how often.

    zero1, zero2      all sharers    once, after the update
    zero3             all sharers    whenever the unit comes (`gather_order.py`)
    zero3 hpzG        all sharers    when the unit comes first in a pass; each of G neighbours then
                                     keeps one of G shares of it
                      G neighbours   whenever it comes again

With `hpzG` (https://arxiv.org/abs/2306.10209, section 3.2) ranks of one node have the unit among
them from its first use to the end of the pass, and only the first gather leaves the node. The
weights do not change in between, so the result is that of zero3, bit by bit.

`parallel/zero3.py` runs them, `sim/traffic.py` counts their bytes, `sim/message_times.py` their
time. What is sent is the weights, or their form in 8 bits (`quantised.py`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from howdah.plan.flat_buffers import Buffer, share
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.quantised import message_bytes
from howdah.plan.sharding import shard_axes


class Gather(NamedTuple):
    """One kind of gather of a unit's weights.

    ranks     that take part, in order; each sends its share of the message
    elements  of the message
    width     bytes of each
    times     how often in a step
    """

    ranks: Sequence[int]
    elements: int
    width: int
    times: int


def gathers(plan: Plan, rank: int, buffer: Buffer, often: int) -> Iterator[Gather]:
    """The gathers of a unit that comes to `rank` so often in a step; none if one rank has all."""
    inside, _ = shard_axes(plan.layout, buffer.unit)
    if inside.size == 1 or not often:
        return
    message = (buffer.length, plan.compute_bytes)
    if plan.quantised:
        message = (message_bytes(buffer.length), 1)
    first = min(often, 1) if plan.layout.hpz else often
    yield Gather(inside.group(rank), *message, first)
    if often > first:
        yield Gather(axis(plan.layout, "hpz").group(rank), *message, often - first)


def copied(plan: Plan, rank: int, buffer: Buffer) -> tuple[int, int]:
    """The elements [start, stop) of a unit's message of which `rank` keeps the second copy."""
    if not plan.layout.hpz or shard_axes(plan.layout, buffer.unit)[0].size == 1:
        return 0, 0
    along, elements = axis(plan.layout, "hpz"), buffer.length
    if plan.quantised:
        elements = message_bytes(elements)
    return share(elements, along.size, along.index_of(rank))
