"""Which activations a rank exchanges with others in a step, with the gradients that come back.

With A micro-batches a step, T tokens of a micro-batch on a rank, and width h:

    tp     per sub-layer and micro-batch an all-reduce of T·h each way; with sp an all-gather and a
           reduce-scatter each way, and the input gathered once more; forward, one of h numbers for
           each matrix cut by columns of which the lengths of rows are trained (DoRA)
    cp     ring: each rank sends on the keys and values of all but the next rank, and in the
           backward pass also the gradients of all but its own;
           all-to-all: sequence traded for heads, and back; both: the one around the other;
           of experts, how often each was chosen in the rank's chunks
    pp     T·h per boundary and direction
    ep     tokens to their experts and back, each way: exact with a capacity, and else counted for
           even routing, with the numbers of rows that the ranks tell each other

`recompute=full` repeats the forward's messages of every block, `selective` those of attention.
Exchanges that depend on the data (ep) are exact only for even routing.

The list is a declaration: the operations that send (`parallel/tensor_border.py`, the stages' links)
do not read it. So bytes that are counted prove it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from howdah.plan.flat_buffers import share, shares
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts
from howdah.plan.sharding import fixed_capacity, tokens, traded_chunks, traded_heads
from howdah.shapes.dims import expert_rows
from howdah.shapes.part import Part

Sizes = int | np.ndarray
COUNT_BYTES = 4  # of how often an expert was chosen


class Whole(NamedTuple):
    """The tensor of a collective.

    elements  of the whole
    width     bytes of an element
    row       elements that stay together when it is cut into shares
    half      whether the operation is one of the two halves of an all-reduce
    """

    elements: int
    width: int
    row: int = 1
    half: bool = True


class Exchange(NamedTuple):
    """All messages of one kind that the forward or the backward passes of a stage send in a step.

    stage      the stage
    back       whether they are those of backward passes, with what these recompute
    axis       the axis under which they are counted
    operation  the operation that sends them
    peers      the ranks that receive them; what the rank sends to itself does not count
    sizes      bytes to each peer: one number for all of them, or one for each
    times      how often the operation runs
    whole      of a collective for which an algorithm can be chosen: the tensor of one operation
    beside     whether half of it runs beside the shared expert
    """

    stage: int
    back: bool
    axis: str
    operation: str
    peers: Sequence[int]
    sizes: Sizes
    times: int
    whole: Whole | None = None
    beside: bool = False

    @property
    def programs(self) -> int:
        """How often it runs as a program; an all-reduce is one, and its second half none."""
        second = self.whole is not None and self.whole.half and self.operation == "all_gather"
        return 0 if second else self.times


def exchanges(plan: Plan, rank: int) -> Iterator[Exchange]:
    """The exchanges of `rank` in a step of the full batch."""
    for stage in stage_parts(plan, axis(plan.layout, "pp").index_of(rank)):
        for form in (_tensor, _context, _pipeline, _experts, _counts):
            yield from form(plan, rank, stage)


def _blocks(plan: Plan, stage: int) -> list[Part]:
    return [part for part in plan.stages.parts[stage] if part.is_block]


def _sublayers(plan: Plan, part: Part) -> int:
    """Sub-layers of a block: attention, feed-forward, and cross attention in a decoder."""
    return 3 if _crosses(plan, part) else 2


def _crosses(plan: Plan, part: Part) -> bool:
    return part.stack == "layers" and plan.shape.family == "encoder-decoder"


def _asking(plan: Plan, part: Part) -> int:
    """How often a block gathers an input of several matrices once more, because a gradient needs
    it. Experts and latent attention keep what they have gathered.
    """
    first: list[tuple[str, ...]] = []
    if plan.shape.latent is None:
        first.append(("attention.q", "attention.k", "attention.v"))
    if _crosses(plan, part):
        first += [("cross.q",), ("cross.k", "cross.v")]
    if not plan.sparse(part):
        gate = ("feedforward.gate",) if plan.shape.gated else ()
        first.append((*gate, "feedforward.up"))
    return sum(any(plan.marks.asks(part, one) for one in some) for some in first)


def measured(plan: Plan, part: Part) -> int:
    """Matrices of a block cut by columns, of whose rows each rank measures a part."""
    there = plan.marks.adapters(part) if plan.marks.measures else ()
    return sum(name.rpartition(".")[2] in ("o", "down") for name in there)


def _tensor(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    if plan.layout.tp == 1:
        return
    parts, blocks = plan.stages.parts[stage], _blocks(plan, stage)
    width, samples = plan.shape.width, plan.micro_batch
    inner = sum(_sublayers(plan, part) for part in blocks)
    lively = [part for part in blocks if part not in plan.marks.still]
    again = sum(_sublayers(plan, part) for part in lively if plan.recompute[part] == "full")
    behind = sum(_sublayers(plan, part) for part in lively)
    cross = sum(_crosses(plan, part) for part in blocks)  # these gather the source, too
    crossing = [part for part in lively if _crosses(plan, part)]
    crosses, crosses_again = (
        len(crossing),
        sum(plan.recompute[part] == "full" for part in crossing),
    )
    ends = sum(part in ("embedding", "target") for part in parts)
    ended = ends * plan.marks.trains("embedding.weight")
    head, sliced = int("head" in parts), int(plan.layout.inputs == "sliced")
    split = head * (not plan.shape.labels)  # a head for labels is whole on each rank
    lengths = shares(tokens(plan, rank), plan.layout.slices)
    for length, slices in zip(*np.unique(lengths, return_counts=True), strict=True):
        pieces = int(slices) * plan.micros
        if plan.layout.sp:
            whole = Whole(int(length) * samples * width, plan.compute_bytes, samples * width, False)
            twice = sliced * (sum(_asking(plan, part) for part in lively) + head)
            gathers = inner + cross + head, again + crosses_again + behind + ended + twice
            scatters = inner + ends, again + behind + split + crosses
        else:
            whole = Whole(int(length) * samples * width, plan.compute_bytes)
            gathers = scatters = inner + ends, again + behind + crosses + split
        for back in (False, True):
            often = gathers[back] * pieces, scatters[back] * pieces
            yield from _halves(plan, rank, (stage, back), often, whole)
        loss = Whole(int(length) * samples, plan.master_bytes)
        yield from _halves(plan, rank, (stage, False), (3 * split * pieces,) * 2, loss)
        rows = Whole(width, plan.master_bytes)
        for back, some in ((False, blocks), (True, lively)):
            there = [part for part in some if not back or plan.recompute[part] == "full"]
            times = sum(measured(plan, part) for part in there) * pieces
            yield from _halves(plan, rank, (stage, back), (times, times), rows)


def _halves(
    plan: Plan, rank: int, passes: tuple[int, bool], times: tuple[int, int], whole: Whole
) -> Iterator[Exchange]:
    """All-gathers and reduce-scatters of a tensor over tp, each so many times.

    passes  the stage, and whether its backward passes exchange
    """
    group, (gathers, scatters) = axis(plan.layout, "tp"), times
    sizes = shares(whole.elements // whole.row, group.size) * whole.row * whole.width
    own, ranks = int(sizes[group.index_of(rank)]), group.group(rank)
    if gathers:
        yield Exchange(*passes, "tp", "all_gather", ranks, own * gathers, gathers, whole)
    if scatters:
        yield Exchange(*passes, "tp", "reduce_scatter", ranks, sizes * scatters, scatters, whole)


def _context(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    if plan.layout.cp == 1:
        return
    cores = {part: _sublayers(plan, part) - 1 for part in _blocks(plan, stage)}
    times = sum(cores.values()) * plan.micros
    lively = {part: n for part, n in cores.items() if part not in plan.marks.still}
    behind = sum(lively.values()) * plan.micros
    again = sum(n for part, n in lively.items() if plan.recompute[part] != "none") * plan.micros
    if times and plan.layout.trading > 1:
        yield from _all_to_all(plan, rank, stage, (times, behind, again))
    if times and axis(plan.layout, "ring").size > 1:
        yield from _ring(plan, rank, stage, (times, behind, again))


def _per_head(plan: Plan) -> tuple[int, int]:
    """Elements of one head's key and of its value, for each token."""
    latent = plan.shape.latent
    return (
        (latent.qk_nope_size + latent.qk_rope_size, latent.v_size)
        if latent
        else (plan.shape.d_taken, plan.shape.d_taken)
    )


def _ring(plan: Plan, rank: int, stage: int, times: tuple[int, int, int]) -> Iterator[Exchange]:
    """Ring attention: a rank sends the keys and values of all but the next rank; in the backward
    pass once more, and the gradients of all but its own.

    times  forward passes, backward passes, and forward passes that these repeat
    """
    group, traders = axis(plan.layout, "ring"), axis(plan.layout, "traders")
    ranks = list(group.group(rank))
    after = ranks[(group.index_of(rank) + 1) % group.size]
    seen, summed = (
        sum(_traded_tokens(plan, other) for other in ranks if other != left_out)
        for left_out in (after, rank)
    )
    _, (first, last) = traded_heads(plan, rank, traders.index_of(rank))
    width = plan.micro_batch * (last - first) * sum(_per_head(plan))
    passes, behind, again = times
    once, back = seen * plan.compute_bytes, summed * plan.master_bytes
    sent = once * passes, once * (behind + again) + back * behind
    for backward, rounds in ((False, passes), (True, 2 * behind + again)):
        often = rounds * (group.size - 1)
        yield Exchange(stage, backward, "cp", "send", [after], width * sent[backward], often)


def _traded_tokens(plan: Plan, rank: int) -> int:
    """Positions of a sample that `rank` has while it computes attention."""
    return sum(stop - start for start, stop in traded_chunks(plan.layout, plan.sequence, rank))


def _all_to_all(
    plan: Plan, rank: int, stage: int, times: tuple[int, int, int]
) -> Iterator[Exchange]:
    """Trades sequence for heads: queries, keys, values out, results back; gradients in reverse.

    times  forward passes, backward passes, and forward passes that these repeat
    """
    group = axis(plan.layout, "traders")
    key, value = _per_head(plan)

    def numbers(index: int) -> tuple[int, int]:
        """Elements of attention's inputs and output, for each token and one rank's heads."""
        queries, keys = (stop - start for start, stop in traded_heads(plan, rank, index))
        return queries * key + keys * (key + value), queries * value

    indices = range(group.size)
    theirs, own = [numbers(index) for index in indices], numbers(group.index_of(rank))
    positions = [tokens(plan, other) * plan.micro_batch for other in group.group(rank)]
    mine = tokens(plan, rank) * plan.micro_batch
    out = np.array([mine * theirs[p][0] + positions[p] * own[1] for p in indices])
    back = np.array([mine * theirs[p][1] + positions[p] * own[0] for p in indices])
    passes, behind, again = times
    sent = out * passes * plan.compute_bytes, (out * again + back * behind) * plan.compute_bytes
    for backward, often in ((False, 2 * passes), (True, 2 * (behind + again))):
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
        if 0 <= other < len(where) and not (back and plan.still(other)):
            peer = rank + (where[other] - where[stage]) * pp.stride
            tensors = len(plan.boundary(boundary))
            times = tensors * plan.micros * plan.layout.slices
            yield Exchange(stage, back, "pp", "send", [peer], size * tensors, times)


def _experts(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    group, experts = axis(plan.layout, "ep"), plan.shape.experts
    layers = [part for part in _blocks(plan, stage) if plan.sparse(part)]
    if experts is None or group.size == 1 or not layers:
        return
    held, ranks = shares(experts.count, group.size), group.group(rank)
    own, capacity = int(held[group.index_of(rank)]), fixed_capacity(plan)
    rows = plan.micro_batch * np.array(
        [expert_rows(plan.shape, tokens(plan, other), capacity) for other in ranks]
    )
    mine, width = rows[group.index_of(rank)], plan.shape.width * plan.compute_bytes
    sizes = (mine * held // experts.count + rows * own // experts.count) * width
    passes = len(layers) * plan.micros
    lively = [part for part in layers if part not in plan.marks.still]
    again = sum(plan.recompute[part] == "full" for part in lively) * plan.micros
    behind = len(lively) * plan.micros
    for backward, times, routed in ((False, passes, passes), (True, again + behind, again)):
        if not times:
            continue
        sent = Exchange(stage, backward, "ep", "all_to_all", ranks, sizes * times, 2 * times)
        yield sent._replace(beside=experts.shared > 0)
        if routed and not capacity:  # the numbers of rows
            yield Exchange(stage, backward, "ep", "all_to_all", ranks, held * 8 * routed, routed)


def _counts(plan: Plan, rank: int, stage: int) -> Iterator[Exchange]:
    """How often each expert was chosen in each chunk of the sequences that ranks share."""
    group, experts = axis(plan.layout, "cp"), plan.shape.experts
    layers = [part for part in _blocks(plan, stage) if plan.sparse(part)]
    if experts is None or group.size == 1 or not (layers and plan.method.routing.asks_sequences):
        return
    own = 2 * plan.micro_batch * experts.count
    whole = Whole(own * group.size, COUNT_BYTES, own, False)
    again = sum(plan.recompute[part] == "full" for part in layers if part not in plan.marks.still)
    for backward, layer in ((False, len(layers)), (True, again)):
        times = layer * plan.micros
        if times:
            ranks, size = group.group(rank), own * COUNT_BYTES * times
            yield Exchange(stage, backward, "cp", "all_gather", ranks, size, times, whole)
