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
from howdah.plan.sharding import heads, kv_heads, tokens
from howdah.shapes.part import Part

Sizes = int | np.ndarray


class Exchange(NamedTuple):
    """All messages of one kind that a rank sends in a step.

    axis       the axis under which they are counted
    operation  the operation that sends them
    peers      the ranks that receive them; what the rank sends to itself does not count
    sizes      bytes to each peer: one number for all of them, or one for each
    """

    axis: str
    operation: str
    peers: Sequence[int]
    sizes: Sizes


def exchanges(plan: Plan, rank: int) -> Iterator[Exchange]:
    """The exchanges of `rank` in a step of the full batch."""
    for form in (_tensor, _context, _pipeline, _experts):
        yield from form(plan, rank)


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


def _tensor(plan: Plan, rank: int) -> Iterator[Exchange]:
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
            own = int(rows[group.index_of(rank)])
            yield Exchange("tp", "all_gather", group.group(rank), own * gathers * pieces)
            yield Exchange("tp", "reduce_scatter", group.group(rank), rows * scatters * pieces)
        else:
            times = forward + inner + cross + ends + head
            yield from _all_reduces(group, rank, size, plan.compute_bytes * times * pieces)
        yield from _all_reduces(
            group, rank, int(length) * samples, plan.master_bytes * 3 * head * pieces
        )


def _all_reduces(group: Stride, rank: int, elements: int, width: int) -> Iterator[Exchange]:
    """All-reduces over tp of `elements` elements; `width` is their bytes, times their number."""
    sizes = shares(elements, group.size) * width
    yield Exchange("tp", "reduce_scatter", group.group(rank), sizes)
    yield Exchange("tp", "all_gather", group.group(rank), int(sizes[group.index_of(rank)]))


def _context(plan: Plan, rank: int) -> Iterator[Exchange]:
    if plan.layout.cp == 1:
        return
    cores = {part: _sublayers(plan, part) - 1 for part in _blocks(plan, rank)}
    times = sum(cores.values()) * plan.micros
    again = sum(n for part, n in cores.items() if plan.recompute[part] != "none") * plan.micros
    move = _ring if plan.layout.context == "ring" else _all_to_all
    yield from move(plan, rank, (times + again, times))


def _per_head(plan: Plan) -> tuple[int, int]:
    """Elements of one head's key and of its value, for each token."""
    latent = plan.shape.latent
    return (
        (latent.qk_nope_size + latent.qk_rope_size, latent.v_size)
        if latent
        else (plan.shape.d, plan.shape.d)
    )


def _ring(plan: Plan, rank: int, times: tuple[int, int]) -> Iterator[Exchange]:
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
    yield Exchange("cp", "send", [after], size * moved)


def _all_to_all(plan: Plan, rank: int, times: tuple[int, int]) -> Iterator[Exchange]:
    """Trades sequence for heads: queries, keys, values out, results back; gradients in reverse."""
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
    sizes = (out * times[0] + back * times[1]) * plan.compute_bytes
    yield Exchange("cp", "all_to_all", group.group(rank), sizes)


def _pipeline(plan: Plan, rank: int) -> Iterator[Exchange]:
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
                yield Exchange("pp", "send", [peer], size * plan.boundary(boundary))


def _experts(plan: Plan, rank: int) -> Iterator[Exchange]:
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
    yield Exchange("ep", "all_to_all", group.group(rank), (out + back) * times)
    yield Exchange("ep", "counts", group.group(rank), held * 8 * forward)
