"""The gathers of weights of a step: of each unit, between which ranks, how long, how often; and
the pulls from servers.

    zero1, zero2      all sharers    once, after the update
    zero3             all sharers    whenever the unit comes (`gather_order.py`)
    zero3 hpzG        all sharers    when the unit comes first in a pass; each of G neighbours then
                                     keeps one of G shares of it
                      G neighbours   whenever it comes again
    servers           all workers    once: each server gives its range (`servers.py`)
    servers and tp    holders        once: what ranks of one worker under `method.sync` hold alike,
                                     the first of them gives to the others (`worker_ranks.py`)

With `hpzG` (https://arxiv.org/abs/2306.10209, section 3.2) ranks of one node have the unit among
them from its first use to the end of the pass, and only the first gather leaves the node. The
weights do not change in between, so the result is that of zero3, bit by bit.

`parallel/zero3.py` and `served.py` run them, `sim/traffic.py` counts their bytes,
`sim/message_times.py` their time. What is sent is the weights, or their form in 8 bits
(`quantised.py`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from howdah.plan.flat_buffers import Buffer, share
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.quantised import message_bytes
from howdah.plan.servers import Ranks, serves, summed_range
from howdah.plan.sharding import local_buffers, shard_axes
from howdah.plan.worker_ranks import alike, served_ranges


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


class Pull(NamedTuple):
    """Weights that one rank gives to others, once in a step: a broadcast.

    ranks  that take part, in the order of their group
    root   who has them
    unit   whose elements [start, stop) they are, in the buffer of the rank that asks
    """

    axis: str
    ranks: Ranks
    root: int
    unit: str
    start: int
    stop: int


def pulls(plan: Plan, rank: int) -> Iterator[Pull]:
    """The pulls in which `rank` takes part; none without servers that update."""
    layout = plan.layout
    if not layout.servers_update:
        return
    is_server = serves(layout, rank)
    servers = [rank] if is_server else range(layout.workers, layout.world)
    for one in served_ranges(plan):
        workers = axis(layout, "dp").group(one.rank)
        for server in servers if is_server or rank in workers else ():
            first, last = summed_range(one.stop - one.start, layout, server)
            if first < last:
                at = one.start + first, one.start + last
                yield Pull("dp", (*workers, server), server, one.buffer.unit, *at)
    if plan.method.sync and not is_server:
        for buffer in local_buffers(plan, rank):
            for ranks, start, stop in alike(buffer, plan, rank):
                yield Pull("tp", ranks, ranks[0], buffer.unit, start, stop)


def copied(plan: Plan, rank: int, buffer: Buffer) -> tuple[int, int]:
    """The elements [start, stop) of a unit's message of which `rank` keeps the second copy."""
    if not plan.layout.hpz or shard_axes(plan.layout, buffer.unit)[0].size == 1:
        return 0, 0
    along, elements = axis(plan.layout, "hpz"), buffer.length
    if plan.quantised:
        elements = message_bytes(elements)
    return share(elements, along.size, along.index_of(rank))
