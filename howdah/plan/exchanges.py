"""Which activations a rank exchanges with others in a step, with the gradients that come back.

With A micro-batches a step, T tokens of a micro-batch on a rank, and width h:

    tp     per sub-layer and micro-batch an all-reduce of T·h each way; with sp an all-gather and a
           reduce-scatter each way, and the input gathered once more
    cp     ring: each rank forwards the others' keys and values, then with their gradients;
           all-to-all: sequence traded for heads, and back
    pp     T·h per boundary and direction
    ep     tokens to their experts and back, each way, counted for even routing

`recompute=full` repeats the forward's messages of every block, `selective` those of attention.
Exchanges that depend on the data (ep) are exact only for even routing.

The list is a declaration: the operations that send (`parallel/tensor_border.py`, the stages' links)
do not read it. So bytes that are counted prove it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from howdah.plan.flat_buffers import share, shares
from howdah.plan.mesh_axes import Stride, axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts
from howdah.plan.sharding import heads, kv_heads, tokens
from howdah.shapes.part import Part

Sizes = int | np.ndarray


class Exchange(NamedTuple):
    """All messages of one kind that the forward or the backward passes of a stage send in a step.

    stage      the stage
    back       whether they are those of backward passes, with what these recompute
    axis       the axis under which they are counted
    operation  the operation that sends them
    peers      the ranks that receive them; what the rank sends to itself does not count
    sizes      bytes to each peer: one number for all of them, or one for each
    times      how often the operation runs
    """

    stage: int
    back: bool
    axis: str
    operation: str
    peers: Sequence[int]
    sizes: Sizes
    times: int


def exchanges(plan: Plan, rank: int) -> Iterator[Exchange]:
    """The exchanges of `rank` in a step of the full batch."""
    for stage in stage_parts(plan, axis(plan.layout, "pp").index_of(rank)):
        for form in (_tensor, _context, _pipeline, _experts):
            yield from form(plan, rank, stage)


def _blocks(plan: Plan, stage: int) -> list[Part]:
    return [part for part in plan.stages.parts[stage] if part.is_block]


def _sublayers(plan: Plan, part: Part) -> int:
    """Sub-layers of a block: attention, feed-forward, and cross attention in a decoder."""
    return 3 if part.stack == "layers" and plan.shape.family == "encoder-decoder" else 2


def _tensor(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    if plan.layout.tp == 1:
        return
    group, parts, blocks = axis(plan.layout, "tp"), plan.stages.parts[stage], _blocks(plan, stage)
    width, samples = plan.shape.width, plan.micro_batch
    inner = sum(_sublayers(plan, part) for part in blocks)
    again = sum(_sublayers(plan, part) for part in blocks if plan.recompute[part] == "full")
    cross = sum(_sublayers(plan, part) == 3 for part in blocks)
    ends = sum(part in ("embedding", "target") for part in parts)
    head, sliced = int("head" in parts), int(plan.layout.inputs == "sliced")
    lengths = shares(tokens(plan, rank), plan.layout.slices)
    for length, slices in zip(*np.unique(lengths, return_counts=True), strict=True):
        pieces = int(slices) * plan.micros
        if plan.layout.sp:
            rows = shares(int(length), group.size) * samples * width
            gathers = inner + cross + head, again + inner * (1 + sliced) + ends + sliced * head
            scatters = inner + ends, again + inner + head + cross
        else:
            rows = shares(int(length) * samples * width, group.size)
            gathers = scatters = inner + ends, again + inner + cross + head
        for back in (False, True):
            often = gathers[back] * pieces, scatters[back] * pieces
            yield from _halves(group, rank, rows * plan.compute_bytes, often, (stage, back))
        rows, often = shares(int(length) * samples, group.size), (3 * head * pieces,) * 2
        yield from _halves(group, rank, rows * plan.master_bytes, often, (stage, False))  # the loss


def _halves(
    group: Stride, rank: int, rows: np.ndarray, times: tuple[int, int], passes: tuple[int, bool]
) -> Iterator[Exchange]:
    """All-gathers and reduce-scatters over tp, the two halves of an all-reduce, each so many times.

    rows    bytes of each rank's share
    passes  the stage, and whether its backward passes exchange
    """
    own, ranks = int(rows[group.index_of(rank)]), group.group(rank)
    gathers, scatters = times
    if gathers:
        yield Exchange(*passes, "tp", "all_gather", ranks, own * gathers, gathers)
    if scatters:
        yield Exchange(*passes, "tp", "reduce_scatter", ranks, rows * scatters, scatters)


def _context(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    if plan.layout.cp == 1:
        return
    cores = {part: _sublayers(plan, part) - 1 for part in _blocks(plan, stage)}
    times = sum(cores.values()) * plan.micros
    again = sum(n for part, n in cores.items() if plan.recompute[part] != "none") * plan.micros
    move = _ring if plan.layout.context == "ring" else _all_to_all
    if times:
        yield from move(plan, rank, stage, (times, again))


def _per_head(plan: Plan) -> tuple[int, int]:
    """Elements of one head's key and of its value, for each token."""
    latent = plan.shape.latent
    return (
        (latent.qk_nope_size + latent.qk_rope_size, latent.v_size)
        if latent
        else (plan.shape.d, plan.shape.d)
    )


def _ring(plan: Plan, rank: int, stage: int, times: tuple[int, int]) -> Iterator[Exchange]:
    """Ring attention: a rank sends all chunks but the next rank's own; gradients travel too.

    times  forward passes, and those that backward passes repeat
    """
    group, tp = axis(plan.layout, "cp"), axis(plan.layout, "tp")
    ranks = list(group.group(rank))
    after = ranks[(group.index_of(rank) + 1) % group.size]
    seen = sum(tokens(plan, other) for other in ranks if other != after) * plan.micro_batch
    choose = heads if plan.shape.latent else kv_heads
    first, last = choose(plan.shape, tp.size, tp.index_of(rank))
    size = seen * (last - first) * sum(_per_head(plan))
    (passes, again), both = times, plan.compute_bytes + plan.master_bytes
    sent = size * plan.compute_bytes * passes, size * (plan.compute_bytes * again + both * passes)
    for back in (False, True):
        often = passes + again * back
        yield Exchange(stage, back, "cp", "send", [after], sent[back], often)


def _all_to_all(plan: Plan, rank: int, stage: int, times: tuple[int, int]) -> Iterator[Exchange]:
    """Trades sequence for heads: queries, keys, values out, results back; gradients in reverse.

    times  forward passes, and those that backward passes repeat
    """
    group, tp = axis(plan.layout, "cp"), axis(plan.layout, "tp")
    shape, ways = plan.shape, tp.size * group.size
    key, value = _per_head(plan)

    def numbers(index: int) -> tuple[int, int]:
        """Elements of attention's inputs and output, for each token and one cp rank's heads."""
        way = tp.index_of(rank) * group.size + index
        first, last = heads(shape, ways, way)
        kv = last - first if shape.latent else np.diff(kv_heads(shape, ways, way))[0]
        return (last - first) * key + int(kv) * (key + value), (last - first) * value

    indices = range(group.size)
    theirs, own = [numbers(index) for index in indices], numbers(group.index_of(rank))
    positions = [tokens(plan, other) * plan.micro_batch for other in group.group(rank)]
    mine = tokens(plan, rank) * plan.micro_batch
    out = np.array([mine * theirs[p][0] + positions[p] * own[1] for p in indices])
    back = np.array([mine * theirs[p][1] + positions[p] * own[0] for p in indices])
    passes, again = times
    sent = out * passes * plan.compute_bytes, (out * again + back * passes) * plan.compute_bytes
    for backward in (False, True):
        often = 2 * (passes + again * backward)
        ranks, sizes = group.group(rank), sent[backward]
        yield Exchange(stage, backward, "cp", "all_to_all", ranks, sizes, often)


def _pipeline(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    """The stage's output, and the gradient of its input, to the stages beside it."""
    pp, where = axis(plan.layout, "pp"), plan.stages.where
    positions = tokens(plan, rank)
    if plan.layout.sp:
        tp = axis(plan.layout, "tp")
        start, stop = share(positions, tp.size, tp.index_of(rank))
        positions = stop - start
    size = positions * plan.micro_batch * plan.shape.width * plan.compute_bytes * plan.micros
    for back, other, boundary in ((False, stage + 1, stage), (True, stage - 1, stage - 1)):
        if 0 <= other < len(where):
            peer = rank + (where[other] - where[stage]) * pp.stride
            tensors = plan.boundary(boundary)
            times = tensors * plan.micros * plan.layout.slices
            yield Exchange(stage, back, "pp", "send", [peer], size * tensors, times)


def _experts(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    group, experts = axis(plan.layout, "ep"), plan.shape.experts
    layers = [part for part in _blocks(plan, stage) if plan.sparse(part)]
    if experts is None or group.size == 1 or not layers:
        return
    held = shares(experts.count, group.size)
    rows = plan.micro_batch * tokens(plan, rank) * experts.top_k
    out = rows * held // experts.count * plan.shape.width * plan.compute_bytes
    back = rows * int(held[group.index_of(rank)]) // experts.count
    back *= plan.shape.width * plan.compute_bytes
    passes = len(layers) * plan.micros
    again = sum(plan.recompute[part] == "full" for part in layers) * plan.micros
    ranks = group.group(rank)
    for backward, times, routed in ((False, passes, passes), (True, again + passes, again)):
        sizes = (out + back) * times
        yield Exchange(stage, backward, "ep", "all_to_all", ranks, sizes, 2 * times)
        if routed:
            yield Exchange(stage, backward, "ep", "counts", ranks, held * 8 * routed, routed)
