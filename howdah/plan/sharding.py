"""Who holds what: which axis cuts which named dim, and whose gradients are added.

`weights.py` lists every tensor with its dims by name; this file says what one rank has of it.

    dim          cut by   into runs of
    vocab        tp       rows
    query        tp       query heads, those of one key-value head side by side
    key          tp       key-value heads; shared by tp/k ranks where tp is larger
    ffn          tp       columns
    expert       ep       experts
    expert_ffn   tp       columns of every expert
    all others   none

and the units of a part of the model live on the pipeline rank that runs it, tied ones on several.

What is summed follows from equal boxes, not from axes. Ranks that hold the same box of a weight
either saw other tokens, or came to it through other heads: then each has a part of the gradient
and the true gradient is their sum. Or they did the very same work, and hold the same gradient:

    weight                    same box on             summed over
    a slice                   dp×cp                   dp×cp
    a shared key-value head   dp×cp, tp/k ranks       both
    norm, row bias            dp×cp, tp               dp×cp; tp too under sp, which cuts tokens
    norm of each head         dp×cp, tp               both: other heads
    latent projections        dp×cp, tp               both: gradients arrive from other heads
    router                    dp×cp, tp               both: from other columns of the experts
    an expert                 dp×cp÷ep                dp×cp÷ep: its tokens came from all of ep
    a tied weight             dp×cp, its stages       both
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import Literal

from howdah.plan.boxes import Box
from howdah.plan.flat_buffers import Buffer, buffers, share
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Axis, axis
from howdah.plan.plan import Plan
from howdah.shapes.dims import CHUNK, Local, Per
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import Weight

Range = tuple[int, int]  # [start, stop)

# Dims of weights that several ranks reach through other heads, latents or columns of experts.
THROUGH_SLICES = {"head", "rank", "choice"}


@dataclass(frozen=True)
class Placement:
    """What one rank holds of a weight.

    box       the part of the tensor
    holders   the ranks that hold this same box, in order
    summed    those of them, this one included, whose gradients add up to the true gradient; the
              other holders have copies of these sums
    """

    box: Box
    holders: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The one holder that counts the box, in norms and files."""
        return self.holders[0]


def placement(weight: Weight, plan: Plan, rank: int) -> Placement | None:
    """What `rank` holds of `weight`; None where another stage holds it."""
    stages = plan.ranks_of_unit[weight.unit]
    if axis(plan.layout, "pp").place(rank) not in stages:
        return None
    box = _box(weight, plan.shape, plan.layout, rank)
    same = _same_box(weight, plan.shape, plan.layout, rank)
    partial = summed_over_tp(weight, plan, rank)
    holders = tuple(_ranks(weight, plan.layout, rank, stages, same))
    return Placement(box, holders, tuple(_ranks(weight, plan.layout, rank, stages, partial)))


def summed_over_tp(weight: Weight, plan: Plan, rank: int) -> tuple[int, ...]:
    """The parts of tp whose gradients of `weight` add up to the true one; itself, if only it."""
    same = _same_box(weight, plan.shape, plan.layout, rank)
    partial = _partial(weight, plan.layout, len(same))
    return same if partial else (_tp(plan.layout, rank),)


def held(plan: Plan, rank: int) -> dict[str, Box]:
    """The boxes of all weights that `rank` holds, by name."""
    mine = plan.weights_at[axis(plan.layout, "pp").place(rank)]
    return {weight.name: _box(weight, plan.shape, plan.layout, rank) for weight in mine}


def local_buffers(plan: Plan, rank: int) -> tuple[Buffer, ...]:
    """The flat buffers of `rank`."""
    return buffers(plan.weights_at[axis(plan.layout, "pp").place(rank)], held(plan, rank))


def replicas_of(unit: str) -> Axis:
    """The axis along which a unit's weights are copies of one another."""
    return "expert_replicas" if unit.endswith(".experts") else "replicas"


def own_range(buffer: Buffer, layout: Layout, rank: int) -> Range:
    """What `rank` updates of a buffer: everything, or under ZeRO its share."""
    if layout.zero == 0:
        return 0, buffer.length
    return _cut_along(0, buffer.length, buffer, (layout, rank), "shard")


def counted_ranges(buffer: Buffer, plan: Plan, rank: int) -> Iterator[Range]:
    """What `rank` counts of a buffer, in norms and files: each element of the model is counted
    by one rank. Copies share out what they hold; what parts of tp or stages hold alike, the first
    of them counts.
    """
    place = plan.layout, rank
    start, stop = _cut_along(0, buffer.length, buffer, place, "shard")
    start, stop = _cut_along(start, stop, buffer, place, "across")
    if all(_first(name, plan, rank) for name in buffer.names):
        yield start, stop
        return
    for segment in buffer.segments:
        first, last = max(start, segment.start), min(stop, segment.stop)
        if first < last and _first(segment.name, plan, rank):
            yield first, last


def _cut_along(
    start: int,
    stop: int,
    buffer: Buffer,
    place: tuple[Layout, int],
    name: Literal["shard", "across"],
) -> Range:
    layout, rank = place
    experts: dict[str, Axis] = {"shard": "expert_shard", "across": "expert_across"}
    chosen: Axis = experts[name] if replicas_of(buffer.unit) == "expert_replicas" else name
    along = axis(layout, chosen)
    first, last = share(stop - start, along.size, along.place(rank))
    return start + first, start + last


def _first(name: str, plan: Plan, rank: int) -> bool:
    """Whether no earlier stage or part of tp holds the same box."""
    weight = plan.weight(name)
    tp, pp = axis(plan.layout, "tp"), axis(plan.layout, "pp")
    same = _same_box(weight, plan.shape, plan.layout, rank)
    return tp.place(rank) == same[0] and pp.place(rank) == plan.ranks_of_unit[weight.unit][0]


# -- cuts ------------------------------------------------------------------------


def heads(shape: ModelShape, parts: int, part: int) -> Range:
    """The query heads of one part of tp: whole groups, or a part of one key-value head's group."""
    if shape.latent:
        return share(shape.heads, parts, part)
    group = shape.heads // shape.k
    if parts <= shape.k:
        first, last = share(shape.k, parts, part)
        return first * group, last * group
    sharers = parts // shape.k
    first, last = share(group, sharers, part % sharers)
    base = part // sharers * group
    return base + first, base + last


def kv_heads(shape: ModelShape, parts: int, part: int) -> Range:
    """The key-value heads of one part of tp; where there are more parts than heads, one head."""
    if parts <= shape.k:
        return share(shape.k, parts, part)
    head = part // (parts // shape.k)
    return head, head + 1


def tokens(plan: Plan, rank: int) -> int:
    """Positions of one sample that `rank` works on. Each of cp takes an early and a late chunk,
    so that all have as many keys to look at: chunks 0 and 3 | 1 and 2.
    """
    parts, part = plan.layout.cp, axis(plan.layout, "cp").place(rank)
    if parts == 1:
        return plan.sequence
    chunks = (share(plan.sequence, 2 * parts, i) for i in (part, 2 * parts - 1 - part))
    return sum(stop - start for start, stop in chunks)


def local_of(plan: Plan, rank: int) -> Local:
    """What `rank` sees of a micro-batch, or of its longest token slice, and of each named dim."""
    layout, shape, samples = plan.layout, plan.shape, plan.micro_batch
    positions = -(-tokens(plan, rank) // layout.slices)
    first, last = share(positions, layout.tp, _tp(layout, rank)) if layout.sp else (0, positions)
    own, cut, pairs = (samples * n for n in (positions, last - first, positions * plan.sequence))
    source = 1 if shape.family == "encoder-decoder" else 0  # as long as the target, and cut alike
    counts: dict[Per, int] = {
        "token": own,
        "sp_token": cut,
        "pair": pairs,
        "source": source * own,
        "sp_source": source * cut,
        "source_pair": source * pairs,
        "cross_pair": source * pairs,
        "chunk": (own - 1) % CHUNK + 1,
        "once": 1,
    }
    return Local(counts, dict(_shares(shape, layout.tp, _tp(layout, rank))))


def _shares(shape: ModelShape, parts: int, part: int) -> Iterator[tuple[str, Fraction]]:
    """The share of every dim that tp cuts."""
    for names, whole, (start, stop) in (
        (("heads", "query"), shape.heads, heads(shape, parts, part)),
        (("kv_heads", "key"), shape.k, kv_heads(shape, parts, part)),
        (("ffn",), shape.ffn, share(shape.ffn, parts, part)),
        (("vocab",), shape.vocab, share(shape.vocab, parts, part)),
    ):
        for name in names:
            yield name, Fraction(stop - start, whole)
    if shape.experts:
        start, stop = share(shape.experts.ffn, parts, part)
        yield "expert_ffn", Fraction(stop - start, shape.experts.ffn)


def _cut(dim: str, size: int, shape: ModelShape, layout: Layout, rank: int) -> Range:
    """The range of one dim that `rank` holds."""
    tp = layout.tp, _tp(layout, rank)
    if dim == "query":
        return _scale(heads(shape, *tp), size // shape.heads)
    if dim == "key":
        return _scale(kv_heads(shape, *tp), size // shape.k)
    if dim in ("vocab", "ffn", "expert_ffn"):
        return share(size, *tp)
    if dim == "expert":
        return share(size, layout.ep, axis(layout, "ep").place(rank))
    return 0, size


def _scale(run: Range, block: int) -> Range:
    return run[0] * block, run[1] * block


def _box(weight: Weight, shape: ModelShape, layout: Layout, rank: int) -> Box:
    cuts = [
        _cut(dim, size, shape, layout, rank)
        for dim, size in zip(weight.dims, weight.shape, strict=True)
    ]
    return Box(tuple(start for start, _ in cuts), tuple(stop - start for start, stop in cuts))


# -- equal boxes -----------------------------------------------------------------


def _tp(layout: Layout, rank: int) -> int:
    return axis(layout, "tp").place(rank)


def _same_box(weight: Weight, shape: ModelShape, layout: Layout, rank: int) -> tuple[int, ...]:
    """The parts of tp that hold the same box as `rank`."""
    if {"vocab", "query", "ffn", "expert_ffn"} & set(weight.dims):
        return (_tp(layout, rank),)
    if "key" in weight.dims:
        sharers = max(layout.tp // shape.k, 1)
        first = _tp(layout, rank) // sharers * sharers
        return tuple(range(first, first + sharers))
    return tuple(range(layout.tp))


def _partial(weight: Weight, layout: Layout, same: int) -> bool:
    """Whether the parts of tp with the same box have parts of the gradient, or copies of it."""
    through_heads = "key" in weight.dims or THROUGH_SLICES & set(weight.dims)
    return same > 1 and (bool(through_heads) or layout.sp)


def _ranks(
    weight: Weight, layout: Layout, rank: int, stages: tuple[int, ...], parts: tuple[int, ...]
) -> Iterator[int]:
    """The ranks of these stages and parts of tp, over all copies of `rank`'s own."""
    pp, copies, tp = (axis(layout, name) for name in ("pp", replicas_of(weight.unit), "tp"))
    for stage, copy, part in product(stages, copies.group(rank), parts):
        yield copy + (stage - pp.place(rank)) * pp.stride + part - tp.place(rank)
