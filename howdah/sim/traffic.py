"""Bytes that one rank sends in one training step, computed before anything runs.

These numbers equal the bytes that `comm` counts in a real run, exactly, also for sizes that do not
divide evenly: that is how the predictions are checked. A `Traffic` is the row name of both tables.

Over a group of N ranks, a message of Ψ elements of w bytes is cut into shares, and every rank
sends to every other rank directly:

    reduce-scatter   (Ψ - |own|)·w       a rank sends every share but its own
    all-gather       (N - 1)·|own|·w     a rank sends its own share to all others
    all-reduce       both, one after the other: 2Ψw(N - 1)/N where N divides Ψ

Messages by axis, with A micro-batches a step, T tokens of a micro-batch on a rank, and width h:

    replicas     zero0: reduce-scatter and all-gather of gradients, once
                 zero1: reduce-scatter of gradients, all-gather of updated weights
                 zero2: the reduce-scatter A times, unless full gradients are accumulated
                 zero3: A times a reduce-scatter, and an all-gather of every unit in every
                        pass that uses its weights (`plan/gather_order.py`)
                 shardG: all of these within G ranks; then all-reduce of the shares across groups
    tp           all-reduce of the gradients of which each tp rank computes only a term (of
                 weights that tp does not cut);
                 per sub-layer and micro-batch an all-reduce of T·h each way; with sp an
                 all-gather and a reduce-scatter each way, and the input gathered once more
    cp           ring: each rank forwards the others' keys and values, then with their gradients
    pp           T·h per boundary and direction; a tied weight's gradient between its stages
    ep           tokens to their experts and back, each way, counted for even routing
    scalars      token count, stop flag, loss, and the squared gradient norm if no rank has the
                 full gradient, to all ranks

`recompute=full` repeats the forward's messages of every block, `selective` those of attention.
Rows that depend on the data (ep) are exact only for even routing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from howdah.plan.flat_buffers import share
from howdah.plan.gather_order import gather_counts
from howdah.plan.layout import has_whole_norm
from howdah.plan.mesh_axes import Stride, axis
from howdah.plan.plan import Plan
from howdah.plan.recording import TCP, Traffic, Wires
from howdah.plan.sharding import (
    heads,
    kv_heads,
    local_buffers,
    shard_axes,
    tokens,
)
from howdah.plan.sums import sums_of
from howdah.shapes.part import Part

SCALAR_BYTES = 8


@dataclass
class Sender:
    """Adds up the bytes that `rank` sends, by row of the traffic table."""

    rank: int
    wires: Wires
    sent: Counter[Traffic]

    def send(self, axis: str, operation: str, peers: Sequence[int], sizes: "Sizes") -> None:
        """Counts a message to each of `peers`; one to the rank itself is not sent.

        sizes  bytes of each message: one number for all peers, or one for each
        """
        wires = self.wires
        if isinstance(peers, range) and not wires.nodes:
            inside, between = _along(wires, self.rank, peers, sizes)
        else:
            inside, between = _one_by_one(wires, self.rank, peers, sizes)
        for link, total in ((wires.inside, inside), (wires.between, between)):
            if total:
                self.sent[Traffic(axis, operation, link)] += total

    def reduce_scatter(self, axis: str, group: Stride, sizes: "Sizes") -> None:
        """Counts a reduce-scatter; `sizes` is the bytes of each rank's share."""
        self.send(axis, "reduce_scatter", group.group(self.rank), sizes)

    def all_gather(self, axis: str, group: Stride, sizes: "Sizes") -> None:
        """Counts an all-gather; `sizes` is the bytes of each rank's share."""
        own = sizes if isinstance(sizes, int) else int(sizes[group.index_of(self.rank)])
        self.send(axis, "all_gather", group.group(self.rank), own)

    def all_reduce(self, axis: str, group: Stride, elements: int, width: int) -> None:
        """Counts an all-reduce of `elements` elements of `width` bytes."""
        sizes = shares(elements, group.size) * width
        self.reduce_scatter(axis, group, sizes)
        self.all_gather(axis, group, sizes)


Sizes = int | np.ndarray


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


def shares(length: int, parts: int) -> np.ndarray:
    """Lengths of the shares of `length` elements that are cut into `parts` shares."""
    each, rest = divmod(length, parts)  # the product of two large numbers has more than 64 bits
    return each + np.diff(np.arange(parts + 1) * rest // parts)


def step_traffic(plan: Plan, rank: int, wires: Wires = TCP) -> dict[Traffic, int]:
    """Bytes that `rank` sends in one step of the full batch, by axis, operation and link."""
    sender = Sender(rank, wires, Counter())
    for form in (_gradients, _weights, _tensor, _context, _pipeline, _experts, _scalars):
        form(plan, rank, sender)
    return dict(sender.sent)


# -- weights and gradients -------------------------------------------------------


def _gradients(plan: Plan, rank: int, sender: Sender) -> None:
    for row in sums_of(plan, rank):
        times = plan.master_bytes * (plan.micros if row.each else 1)
        for elements in row.messages:
            sizes = shares(elements, len(row.ranks)) * times
            if row.op != "all_gather":
                sender.send(row.axis, "reduce_scatter", row.ranks, sizes)
            if row.op != "reduce_scatter":
                own = int(sizes[row.ranks.index(rank)])
                sender.send(row.axis, "all_gather", row.ranks, own)


def _weights(plan: Plan, rank: int, sender: Sender) -> None:
    """All-gathers of updated weights (zero1, zero2), or of each unit when it is used (zero3)."""
    if plan.layout.zero == 0:
        return
    gathers = gather_counts(plan, rank) if plan.layout.zero == 3 else None
    for buffer in local_buffers(plan, rank):
        inside, _ = shard_axes(plan.layout, buffer.unit)
        sizes = shares(buffer.length, inside.size) * plan.compute_bytes
        times = 1 if gathers is None else gathers[buffer.unit]
        sender.all_gather("dp", inside, sizes * times)


# -- activations -----------------------------------------------------------------


def _passes(plan: Plan, part: Part) -> int:
    """How often the forward of a block runs for a micro-batch: twice with full recomputation."""
    return 2 if plan.recompute[part] == "full" else 1


def _blocks(plan: Plan, rank: int) -> list[Part]:
    return [part for part in _parts(plan, rank) if part.is_block]


def _parts(plan: Plan, rank: int) -> list[Part]:
    stage = axis(plan.layout, "pp").index_of(rank)
    return [part for part, home in plan.rank_of_part.items() if home == stage]


def _sublayers(plan: Plan, part: Part) -> int:
    """Sub-layers of a block: attention, feed-forward, and cross attention in a decoder."""
    return 3 if part.stack == "layers" and plan.shape.family == "encoder-decoder" else 2


def _tensor(plan: Plan, rank: int, sender: Sender) -> None:
    if plan.layout.tp == 1:
        return
    group, parts = axis(plan.layout, "tp"), _parts(plan, rank)
    width, micros, samples = plan.shape.width, plan.micros, plan.micro_batch
    positions = tokens(plan, rank)
    inner = sum(_sublayers(plan, part) for part in parts if part.is_block)
    forward = sum(_passes(plan, p) * _sublayers(plan, p) for p in parts if p.is_block)
    cross = sum(_sublayers(plan, part) == 3 for part in parts if part.is_block)
    ends = sum(part in ("embedding", "target") for part in parts)
    head = int("head" in parts)
    for length in np.unique(shares(positions, plan.layout.slices), return_counts=True)[0]:
        pieces = int((shares(positions, plan.layout.slices) == length).sum()) * micros
        size = int(length) * samples * width
        if plan.layout.sp:
            rows = shares(int(length), group.size) * samples * width * plan.compute_bytes
            again = int(plan.layout.inputs == "sliced")
            gathers = forward + inner * (1 + again) + ends + (1 + again) * head + cross
            scatters = forward + inner + ends + head + cross
            sender.all_gather("tp", group, rows * gathers * pieces)
            sender.reduce_scatter("tp", group, rows * scatters * pieces)
        else:
            times = forward + inner + cross + ends + head
            _repeat(sender, group, size, plan.compute_bytes, times * pieces)
        _repeat(sender, group, int(length) * samples, plan.master_bytes, 3 * head * pieces)


def _repeat(sender: Sender, group: Stride, elements: int, width: int, times: int) -> None:
    sender.all_reduce("tp", group, elements, width * times)


def _context(plan: Plan, rank: int, sender: Sender) -> None:
    if plan.layout.cp == 1:
        return
    cores = {part: _sublayers(plan, part) - 1 for part in _blocks(plan, rank)}
    times = sum(cores.values()) * plan.micros
    again = sum(n for part, n in cores.items() if plan.recompute[part] != "none") * plan.micros
    move = _ring if plan.layout.context == "ring" else _all_to_all
    move(plan, rank, sender, (times + again, times))


def _per_head(plan: Plan) -> tuple[int, int]:
    """Elements of one head's key and of its value, for each token."""
    latent = plan.shape.latent
    return (
        (latent.qk_nope_size + latent.qk_rope_size, latent.v_size)
        if latent
        else (plan.shape.d, plan.shape.d)
    )


def _ring(plan: Plan, rank: int, sender: Sender, times: tuple[int, int]) -> None:
    """Ring attention: a rank sends all chunks but the next rank's own; gradients travel too."""
    group, tp = axis(plan.layout, "cp"), axis(plan.layout, "tp")
    ranks = list(group.group(rank))
    after = ranks[(group.index_of(rank) + 1) % group.size]
    seen = sum(tokens(plan, other) for other in ranks if other != after) * plan.micro_batch
    choose = heads if plan.shape.latent else kv_heads
    first, last = choose(plan.shape, tp.size, tp.index_of(rank))
    size = seen * (last - first) * sum(_per_head(plan))
    forward, backward = times
    moved = plan.compute_bytes * forward + (plan.compute_bytes + plan.master_bytes) * backward
    sender.send("cp", "send", [after], size * moved)


def _all_to_all(plan: Plan, rank: int, sender: Sender, times: tuple[int, int]) -> None:
    """Trades sequence for heads: queries, keys, values out, results back; gradients in reverse."""
    group, tp = axis(plan.layout, "cp"), axis(plan.layout, "tp")
    shape, ways = plan.shape, tp.size * group.size
    key, value = _per_head(plan)

    def numbers(place: int) -> tuple[int, int]:
        """Elements of attention's inputs and output, for each token and one cp rank's heads."""
        part = tp.index_of(rank) * group.size + place
        first, last = heads(shape, ways, part)
        kv = last - first if shape.latent else np.diff(kv_heads(shape, ways, part))[0]
        return (last - first) * key + int(kv) * (key + value), (last - first) * value

    places = range(group.size)
    theirs, own = [numbers(place) for place in places], numbers(group.index_of(rank))
    positions = [tokens(plan, other) * plan.micro_batch for other in group.group(rank)]
    mine = tokens(plan, rank) * plan.micro_batch
    out = np.array([mine * theirs[p][0] + positions[p] * own[1] for p in places])
    back = np.array([mine * theirs[p][1] + positions[p] * own[0] for p in places])
    sizes = (out * times[0] + back * times[1]) * plan.compute_bytes
    sender.send("cp", "all_to_all", group.group(rank), sizes)


def _pipeline(plan: Plan, rank: int, sender: Sender) -> None:
    """The output of each stage of the rank, and the gradient of its input, to their neighbours."""
    pp, where = axis(plan.layout, "pp"), plan.stages.where
    positions = tokens(plan, rank)
    if plan.layout.sp:
        tp = axis(plan.layout, "tp")
        start, stop = share(positions, tp.size, tp.index_of(rank))
        positions = stop - start
    size = positions * plan.micro_batch * plan.shape.width * plan.compute_bytes * plan.micros
    for stage, home in enumerate(where):
        if home != pp.index_of(rank):
            continue
        for other, boundary in ((stage + 1, stage), (stage - 1, stage - 1)):
            if 0 <= other < len(where):
                peer = rank + (where[other] - home) * pp.stride
                sender.send("pp", "send", [peer], size * plan.boundary(boundary))


def _experts(plan: Plan, rank: int, sender: Sender) -> None:
    group, experts = axis(plan.layout, "ep"), plan.shape.experts
    if experts is None or group.size == 1:
        return
    layers = [part for part in _blocks(plan, rank) if plan.sparse(part)]
    held = shares(experts.count, group.size)
    rows = plan.micro_batch * tokens(plan, rank) * experts.top_k
    out = rows * held // experts.count * plan.shape.width * plan.compute_bytes
    back = rows * int(held[group.index_of(rank)]) // experts.count
    back *= plan.shape.width * plan.compute_bytes
    forward = sum(_passes(plan, part) for part in layers) * plan.micros
    times = forward + len(layers) * plan.micros
    sender.send("ep", "all_to_all", group.group(rank), (out + back) * times)
    sender.send("ep", "counts", group.group(rank), held * 8 * forward)


# -- scalars ---------------------------------------------------------------------


def scalars(plan: Plan) -> int:
    """How many numbers every step sums over all ranks: token count, stop flag and loss, and the
    squared norm of the gradient if no rank has the full gradient.
    """
    return 3 if has_whole_norm(plan.layout) else 4


def _scalars(plan: Plan, rank: int, sender: Sender) -> None:
    layout = plan.layout
    label = "dp" if layout.world == layout.replicas else "world"
    sender.send(label, "scalars", range(layout.world), scalars(plan) * SCALAR_BYTES)
