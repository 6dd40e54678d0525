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
                  zero3: one in every pass that uses the unit (`plan/gather_order.py`), or as
                  many broadcasts as there are shares (gather=broadcast), of as many bytes;
                  between the ranks that `plan/gathers.py` lists
    servers       a worker sends each of them its range of a gradient (reduce), a server sends every
                  worker its range of the weights, or of the sum (broadcast)
    activations   `plan/exchanges.py`
    experts       how many tokens each of them had: an all-reduce over all ranks after the step
    scalars       token count, stop flag, loss, and the squared gradient norm if no rank has the
                  full gradient, to all ranks
    homes         what is kept on the host or the disk moves there and back (`plan/homes.py`), under
                  an axis of its own: it is sent to no other rank

Where `plan.comm` chooses an algorithm, a rank sends what its steps of the program send.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import numpy as np

from howdah.collectives.sparse import pays_below
from howdah.plan.comm import Algorithms
from howdah.plan.exchanges import Sizes, exchanges
from howdah.plan.flat_buffers import share, shares
from howdah.plan.gather_order import gather_counts
from howdah.plan.gathers import Gather, gathers, pulls
from howdah.plan.homes import AXIS, Way, moves
from howdah.plan.layout import has_whole_norm
from howdah.plan.plan import Plan
from howdah.plan.quantised import hops
from howdah.plan.recording import TCP, Traffic, Wires
from howdah.plan.servers import serves, summed_range
from howdah.plan.sharding import local_buffers, tokens
from howdah.plan.sums import ROW_NUMBER_BYTES, Operation, Sum, sums_of
from howdah.shapes.weights import FROZEN
from howdah.sim.chosen import Collective, gathers_of, of_exchange, sent_by
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import moved_activations

SCALAR_BYTES = 8
COUNTS = 2  # of the scalars: token count and stop flag, which the hosts of GPUs exchange, too
# The operations of the wire that an operation of the list of sums is made of.
HALVES: dict[Operation, tuple[str, ...]] = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_gather": ("all_gather",),
    "push": (),  # reduces to servers
    "all_to_all": (),  # in hops
}


@dataclass
class Sender:
    """Adds up the bytes that `rank` sends, by row of the traffic table."""

    rank: int
    wires: Wires
    sent: Counter[Traffic]
    algorithms: Algorithms = field(default_factory=Algorithms)

    def runs(self, axis: str, call: Collective, *, times: int = 1) -> bool:
        """Counts a collective that a chosen program carries out; False where none is chosen."""
        if not self.algorithms:
            return False
        wires = self.wires
        nodes = [wires.nodes[r] if wires.nodes else r // wires.node for r in call.ranks]
        if (program := call.program(self.algorithms, nodes)) is None:
            return False
        sent = sent_by(call, program, self.rank) * times
        here = np.array(nodes) == nodes[call.ranks.index(self.rank)]
        for link, part in ((wires.inside, sent[here]), (wires.between, sent[~here])):
            if total := int(part.sum()):
                self.sent[Traffic(axis, call.op, link)] += total
        return True

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


def step_traffic(
    plan: Plan, rank: int, wires: Wires = TCP, *, rows: bool = True
) -> dict[Traffic, int]:
    """Bytes that `rank` sends in one step of the full batch, by axis, operation and link.

    rows  with the rows of an embedding that are sent (comm.sparse), as if every token were another,
          and with activations that move, as if all rows had several documents; otherwise
          `rows_traffic` and `activation_traffic` add those that were and did
    """
    sender = Sender(rank, wires, Counter(), plan.comm.algorithm)
    _gradients(plan, rank, sender)
    if rows and plan.comm.sparse:
        sender.sent.update(rows_traffic(plan, rank, wires, *expected_rows(plan, rank)))
    _weights(plan, rank, sender)
    for row in exchanges(plan, rank) if not serves(plan.layout, rank) else ():
        call = of_exchange(row)
        if call is None or not sender.runs(row.axis, call, times=row.programs):
            sender.send(row.axis, row.operation, row.peers, row.sizes)
    label = "dp" if plan.layout.world == plan.layout.replicas else "world"
    everyone, told = range(plan.layout.world), scalars(plan) - COUNTS
    if not plan.method.sync:  # workers that do not wait for each other sum nothing
        sender.send(label, "scalars", everyone, COUNTS * SCALAR_BYTES, by_hosts=True)
        sender.send(label, "scalars", everyone, told * SCALAR_BYTES)
    counts = expert_counts(plan)
    call = Collective("all_reduce", everyone, counts, SCALAR_BYTES)
    if counts and not sender.runs(label, call):
        halves(sender, label, "all_reduce", everyone, shares(counts, len(everyone)) * SCALAR_BYTES)
    for move in moves(plan, rank):
        if count := move.bytes * move.times:
            sender.sent[Traffic(AXIS, move.operation, move.link)] += count
    if rows:
        sender.sent.update(activation_traffic(plan, rank, {True: plan.micros}))
    return dict(sender.sent)


def activation_traffic(plan: Plan, rank: int, packed: Mapping[bool, int]) -> Counter[Traffic]:
    """Bytes of activations that move to their home and back, for so many micro-batches whose rows
    have several documents, and so many whose rows have one.
    """
    kernels, home = kernels_of(plan), plan.layout.activations
    away = sum(
        moved_activations(plan, rank, replace(kernels, packed=several)) * count
        for several, count in packed.items()
    )
    ways = get_args(Way) if away else ()
    return Counter({Traffic(AXIS, f"{way} activations", home): away for way in ways})


def expected_rows(plan: Plan, rank: int) -> tuple[int, int]:
    """Rows that a rank sends in a step if every token of it is another, and whether the sum is
    dense because so many do not pay.
    """
    most = int(tokens(plan, rank)) * plan.micro_batch * plan.micros
    for row in sums_of(plan, rank):
        if row.row and most * row.row < pays_below_of(plan, row) * row.messages[0]:
            return most, 0
    return 0, 1


def pays_below_of(plan: Plan, row: Sum) -> float:
    """The part of the rows of an embedding below which they travel by their numbers."""
    size = row.row * plan.sent_gradient_bytes
    return pays_below(len(row.ranks), value_bytes=size, index_bytes=ROW_NUMBER_BYTES)


def rows_traffic(plan: Plan, rank: int, wires: Wires, sent: int, dense: int) -> Counter[Traffic]:
    """Bytes of an embedding's gradient that travels by rows (comm.sparse).

    sent   rows that the rank has sent to each of the others
    dense  sums that took the whole gradient
    """
    sender = Sender(rank, wires, Counter(), plan.comm.algorithm)
    for row in sums_of(plan, rank) if plan.comm.sparse else ():
        if not row.row:
            continue
        (elements,), width = row.messages, plan.sent_gradient_bytes
        size = row.row * width
        sender.send(row.axis, "broadcast", row.ranks, sent * (size + ROW_NUMBER_BYTES))
        _whole(sender, row, Collective(row.op, row.ranks, elements, width), times=dense)
    return sender.sent


def padding(plan: Plan, rank: int) -> int:
    """How many of these bytes make shares equal (`plan/flat_buffers.py`): 0 on CPUs."""
    if plan.share_align == 1:
        return 0
    padded, uneven = (
        sum(n for row, n in step_traffic(one, rank).items() if row.axis != AXIS)
        for one in (plan, replace(plan, share_align=1))
    )
    return padded - uneven


def scalars(plan: Plan) -> int:
    """How many numbers every step sums over all ranks: token count, stop flag and loss, and the
    squared norm of the gradient if no rank has the full gradient.
    """
    return 3 if has_whole_norm(plan.layout) else 4


def expert_counts(plan: Plan) -> int:
    """How many numbers every step sums over all ranks for routers: in each block with experts, the
    tokens of each of them, and how many were dropped.
    """
    if plan.shape.experts is None:
        return 0
    blocks = sum(plan.shape.sparse(layer) for layer in range(plan.shape.layers))
    return blocks * (plan.shape.experts.count + 1)


def _gradients(plan: Plan, rank: int, sender: Sender) -> None:
    if serves(plan.layout, rank) and plan.layout.servers_update:
        return
    for row in sums_of(plan, rank):
        times, width = plan.micros if row.every_micro else 1, plan.sent_gradient_bytes
        if row.op == "push":
            _push(plan, row, sender)
            continue
        if row.row:  # first all hear how many rows each has
            sender.send(row.axis, "scalars", row.ranks, SCALAR_BYTES)
            continue
        if row.hops:
            _hops(row, sender, times=times)
            continue
        for elements in row.messages:
            _whole(sender, row, Collective(row.op, row.ranks, elements, width), times=times)


def _hops(row: Sum, sender: Sender, *, times: int) -> None:
    """Counts the messages of a sum in 4 bits."""
    sizes = [len(ranks) for ranks in row.hops]
    for elements in row.messages:
        for ranks, hop in zip(row.hops, hops(elements, sizes), strict=True):
            sender.send(row.axis, row.op, ranks, hop.message * times)


def _push(plan: Plan, row: Sum, sender: Sender) -> None:
    """Counts what a worker sends to each server, and what a server that only adds sends back."""
    layout, width = plan.layout, plan.sent_gradient_bytes
    for elements in row.messages:
        if not serves(layout, sender.rank):
            sizes = shares(elements, layout.server) * width
            sender.send(row.axis, "reduce", range(layout.workers, layout.world), sizes)
        elif not layout.servers_update:
            start, stop = summed_range(elements, layout, sender.rank)
            sender.send(row.axis, "broadcast", range(layout.workers), (stop - start) * width)


def _whole(sender: Sender, row: Sum, call: Collective, *, times: int) -> None:
    """Counts a message of a sum, which is made so many times."""
    if len(row.ranks) > 1 and not sender.runs(row.axis, call, times=times):
        sizes = shares(call.elements, len(row.ranks)) * call.width * times
        halves(sender, row.axis, row.op, row.ranks, sizes)


def halves(
    sender: Sender, axis: str, operation: Operation, ranks: Sequence[int], sizes: np.ndarray
) -> None:
    """Counts an operation whose shares have so many bytes."""
    for half in HALVES[operation]:
        own = int(sizes[ranks.index(sender.rank)])
        sender.send(axis, half, ranks, own if half == "all_gather" else sizes)


def _weights(plan: Plan, rank: int, sender: Sender) -> None:
    """Broadcasts by servers, and by ranks of a worker to others; or all-gathers of updated weights
    (zero1, zero2), or of each unit when it is used (zero3).
    """
    layout = plan.layout
    for one in pulls(plan, rank):
        if one.root == rank:
            size = (one.stop - one.start) * plan.compute_bytes
            sender.send(one.axis, "broadcast", one.ranks, size)
    if layout.zero == 0:
        return
    counts = gather_counts(plan, rank) if layout.zero == 3 else None
    for buffer in local_buffers(plan, rank):
        often = int(buffer.trains)  # what is frozen has not changed
        if counts is not None:
            often = counts[buffer.unit.removeprefix(FROZEN)]
        for row in gathers(plan, rank, buffer, often):
            _gather(plan, row, sender)


def _gather(plan: Plan, row: Gather, sender: Sender) -> None:
    """Counts a kind of gather of a unit's weights."""
    mine = row.ranks.index(sender.rank)
    start, stop = share(row.elements, len(row.ranks), mine)
    for call in gathers_of(plan, row):
        sends = call.op == "all_gather" or call.root == mine
        if not sender.runs("dp", call, times=row.times) and sends:
            sender.send("dp", call.op, row.ranks, (stop - start) * row.width * row.times)
