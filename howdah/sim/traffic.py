"""Bytes that one rank sends in one training step, computed before anything runs.

These numbers equal the bytes that `comm` counts in a real run, exactly, also for sizes that do not
divide evenly: that is how the predictions are checked. A `Traffic` is the row name of both tables.

Over a group of N ranks, a message of Ψ elements of w bytes is cut into shares, and every rank
sends to every other rank directly:

    reduce-scatter   (Ψ - |own|)·w       a rank sends every share but its own
    all-gather       (N - 1)·|own|·w     a rank sends its own share to all others
    all-reduce       both, one after the other: 2Ψw(N - 1)/N where N divides Ψ

What is sent is listed elsewhere; here the bytes are added up:

    gradients     `plan/sums.py`; after each of the A micro-batches of a step, or once
    weights       zero1, zero2: an all-gather of every unit after the update
                  zero3: one in every pass that uses the unit (`plan/gather_order.py`)
    activations   `plan/exchanges.py`
    scalars       token count, stop flag, loss, and the squared gradient norm if no rank has the
                  full gradient, to all ranks
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from howdah.plan.exchanges import Sizes, exchanges
from howdah.plan.flat_buffers import share, shares
from howdah.plan.gather_order import gather_counts
from howdah.plan.layout import has_whole_norm
from howdah.plan.plan import Plan
from howdah.plan.recording import TCP, Traffic, Wires
from howdah.plan.sharding import local_buffers, shard_axes
from howdah.plan.sums import Operation, sums_of

SCALAR_BYTES = 8
COUNTS = 2  # of the scalars: token count and stop flag, which the hosts of GPUs exchange, too
# The operations of the wire that an operation of the list of sums is made of.
HALVES: dict[Operation, tuple[str, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
}


@dataclass
class Sender:
    """Adds up the bytes that `rank` sends, by row of the traffic table."""

    rank: int
    wires: Wires
    sent: Counter[Traffic]

    def send(
        self,
        axis: str,
        operation: str,
        peers: Sequence[int],
        sizes: Sizes,
        *,
        by_hosts: bool = False,
    ) -> None:
        """Counts a message to each of `peers`; one to the rank itself is not sent.

        sizes     bytes of each message: one number for all peers, or one for each
        by_hosts  whether it is not a GPU's, even where the ranks have GPUs
        """
        wires = self.wires
        if wires.cards and not by_hosts:
            wires = wires._replace(inside=wires.cards, between=wires.cards)
        if isinstance(peers, range) and not wires.nodes:
            inside, between = _along(wires, self.rank, peers, sizes)
        else:
            inside, between = _one_by_one(wires, self.rank, peers, sizes)
        for link, total in ((wires.inside, inside), (wires.between, between)):
            if total:
                self.sent[Traffic(axis, operation, link)] += total


def _one_by_one(wires: Wires, rank: int, peers: Sequence[int], sizes: Sizes) -> tuple[int, int]:
    """Bytes that `rank` sends to peers on its own node, and to peers on other nodes."""
    to = np.fromiter(peers, np.int64)
    counts = np.broadcast_to(np.asarray(sizes, np.int64), to.shape)
    others, near = to != rank, wires.near(rank, to)
    return int(counts[near & others].sum()), int(counts[~near & others].sum())


def _along(wires: Wires, rank: int, peers: range, sizes: Sizes) -> tuple[int, int]:
    """What `_one_by_one` returns, faster: for peers at a constant step, so that the peers on one
    node are consecutive. Large worlds need no look-up for each rank.
    """
    first = rank // wires.node * wires.node
    start, stop = (
        min(max(-(-(edge - peers.start) // peers.step), 0), len(peers))
        for edge in (first, first + wires.node)
    )
    own = [peers.index(rank)] if rank in peers else []
    if isinstance(sizes, int):
        near, every, mine = (stop - start) * sizes, len(peers) * sizes, len(own) * sizes
    else:
        near, every, mine = (int(sizes[at].sum()) for at in (slice(start, stop), slice(None), own))
    return near - mine, every - near


def step_traffic(plan: Plan, rank: int, wires: Wires = TCP) -> dict[Traffic, int]:
    """Bytes that `rank` sends in one step of the full batch, by axis, operation and link."""
    sender = Sender(rank, wires, Counter())
    _gradients(plan, rank, sender)
    _weights(plan, rank, sender)
    for row in exchanges(plan, rank):
        sender.send(row.axis, row.operation, row.peers, row.sizes)
    label = "dp" if plan.layout.world == plan.layout.replicas else "world"
    everyone, told = range(plan.layout.world), scalars(plan) - COUNTS
    sender.send(label, "scalars", everyone, COUNTS * SCALAR_BYTES, by_hosts=True)
    sender.send(label, "scalars", everyone, told * SCALAR_BYTES)
    return dict(sender.sent)


def padding(plan: Plan, rank: int) -> int:
    """How many of these bytes make shares equal (`plan/flat_buffers.py`): 0 on CPUs."""
    if plan.share_align == 1:
        return 0
    uneven = step_traffic(replace(plan, share_align=1), rank)
    return sum(step_traffic(plan, rank).values()) - sum(uneven.values())


def scalars(plan: Plan) -> int:
    """How many numbers every step sums over all ranks: token count, stop flag and loss, and the
    squared norm of the gradient if no rank has the full gradient.
    """
    return 3 if has_whole_norm(plan.layout) else 4


def _gradients(plan: Plan, rank: int, sender: Sender) -> None:
    for row in sums_of(plan, rank):
        times = plan.sent_gradient_bytes * (plan.micros if row.every_micro else 1)
        for elements in row.messages:
            sizes = shares(elements, len(row.ranks)) * times
            for half in HALVES[row.op]:
                own = int(sizes[row.ranks.index(rank)])
                sender.send(row.axis, half, row.ranks, own if half == "all_gather" else sizes)


def _weights(plan: Plan, rank: int, sender: Sender) -> None:
    """All-gathers of updated weights (zero1, zero2), or of each unit when it is used (zero3)."""
    if plan.layout.zero == 0:
        return
    gathers = gather_counts(plan, rank) if plan.layout.zero == 3 else None
    for buffer in local_buffers(plan, rank):
        inside, _ = shard_axes(plan.layout, buffer.unit)
        start, stop = share(buffer.length, inside.size, inside.index_of(rank))
        times = 1 if gathers is None else gathers[buffer.unit]
        size = (stop - start) * plan.compute_bytes * times
        sender.send("dp", "all_gather", inside.group(rank), size)
