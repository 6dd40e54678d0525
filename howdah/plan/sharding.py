"""Which rank holds what: which axis cuts which named dim, and whose gradients are summed.

`shapes/weights.py` lists every tensor with its named dims; this module computes a rank's box of it.

    dim          cut by   into runs of
    vocab        tp       rows
    query        tp       query heads; those of one key-value head are adjacent
    key          tp       key-value heads; where tp is larger, tp/k ranks hold the same head
    ffn          tp       columns
    expert       ep       experts
    expert_ffn   tp       columns of every expert
    all others   none     a head for labels is whole on every tp rank

The units of a part of the model are on the pipeline rank that runs the part; a tied unit is on
several.

Which gradients are summed follows from equal boxes, not from axes. Ranks that hold the same box of
a weight are of two kinds. Either they used it with different tokens or for different heads: then
the gradient of each is one term, and the true gradient is the sum. Or they did exactly the same
work: then each has the true gradient.

    weight                    same box on             summed over
    a slice                   dp×cp                   dp×cp
    a shared key-value head   dp×cp, tp/k ranks       both
    norm, row bias            dp×cp, tp               dp×cp; tp too under sp, which cuts tokens
    norm of each head         dp×cp, tp               both: tp ranks have different heads
    adapter's whole matrix    dp×cp, tp               both: tp ranks have different columns
    latent projections        dp×cp, tp               both: tp ranks have different heads
    router                    dp×cp, tp               both: tp ranks have different expert columns
    head for labels           dp×cp, tp               dp×cp: tp ranks have gathered all tokens
    an expert                 dp×cp÷ep                dp×cp÷ep: its tokens come from all ep ranks
    a tied weight             dp×cp, its stages       both
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product

from howdah.plan.boxes import Box
from howdah.plan.flat_buffers import ALIGN, BY_NUMBER, Buffer, Orders, Segment, buffers, share
from howdah.plan.heads import Range, cut_heads, heads, held_heads, kv_heads
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Axis, Stride, axis
from howdah.plan.plan import Plan
from howdah.plan.quantised import BLOCK
from howdah.plan.servers import kept_range, serves
from howdah.shapes.dims import CHUNK, Per, RankSizes, expert_rows
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import FROZEN, Weight

CUT_BY_TP = {"vocab", "query", "key", "ffn", "expert_ffn"}  # dims; see the table above
# Dims of weights that tp ranks hold whole, and use for different heads or columns of experts.
THROUGH_SLICES = {"head", "rank", "choice", "adapter"}
HELD_BY: tuple[Axis, ...] = ("pp", "tp", "ep")  # the axes along which ranks hold other boxes
ON_ALL_TOKENS = {"label"}  # dims of weights that tp ranks use for the tokens of all of them


@dataclass(frozen=True)
class Placement:
    """What one rank holds of a weight.

    box       the rank's box of the tensor
    holders   the ranks that hold the same box, in order
    summed    the holders, this rank included, whose gradients add up to the true gradient; the
              other holders compute copies of the same sum
    """

    box: Box
    holders: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The one holder that counts the box in norms and files."""
        return self.holders[0]


def placement(weight: Weight, plan: Plan, rank: int) -> Placement | None:
    """What `rank` holds of `weight`; None if only other stages hold it."""
    stages = plan.ranks_of_unit[weight.unit]
    if axis(plan.layout, "pp").index_of(rank) not in stages:
        return None
    box = _box(weight, plan.shape, plan.layout, rank)
    same = _same_box(weight, plan.shape, plan.layout, rank)
    partial = summed_over_tp(weight, plan, rank)
    holders = tuple(_ranks(weight, plan.layout, rank, stages, same))
    return Placement(box, holders, tuple(_ranks(weight, plan.layout, rank, stages, partial)))


def summed_over_tp(weight: Weight, plan: Plan, rank: int) -> tuple[int, ...]:
    """The tp ranks whose gradients of `weight` add up to the true gradient, `rank`'s tp rank
    included; it is alone if its own gradient is the true one.
    """
    same = _same_box(weight, plan.shape, plan.layout, rank)
    partial = _partial(weight, plan.layout, len(same))
    return same if partial else (_tp(plan.layout, rank),)


def held(plan: Plan, rank: int) -> dict[str, Box]:
    """The boxes of all weights that `rank` holds, by name."""
    known: dict[object, Box] = {}  # blocks have weights of the same dims
    found = {}
    for weight in plan.weights_at[axis(plan.layout, "pp").index_of(rank)]:
        key = weight.dims, weight.shape
        if key not in known:
            known[key] = _box(weight, plan.shape, plan.layout, rank)
        found[weight.name] = known[key]
    return found


def local_buffers(plan: Plan, rank: int, orders: Orders = BY_NUMBER) -> tuple[Buffer, ...]:
    """The flat buffers of the weights that `rank` holds."""
    place = tuple(axis(plan.layout, name).index_of(rank) for name in HELD_BY)
    if place not in plan.laid:  # replicas have the same
        plan.laid[place] = _laid(plan, rank)
    found = plan.laid[place]
    return tuple(_placed(buffer, orders) for buffer in found) if orders else found


def _laid(plan: Plan, rank: int) -> tuple[Buffer, ...]:
    def multiple(unit: str) -> int:
        inside, _ = shard_axes(plan.layout, unit)
        by_shares = plan.layout.zero > 0 or len(plan.ranks_of_unit[unit]) > 1
        return cut * inside.size if by_shares and cut > 1 else 1

    align = BLOCK if plan.in_blocks else ALIGN
    cut = max(plan.share_align, BLOCK if plan.in_blocks else 1)
    mine = plan.weights_at[axis(plan.layout, "pp").index_of(rank)]
    return buffers(mine, held(plan, rank), multiple=multiple, align=align)


def _placed(buffer: Buffer, orders: Orders) -> Buffer:
    """A buffer that knows which experts it holds, if these are not by number."""
    order = orders.get(buffer.unit.removeprefix(FROZEN).removesuffix(".experts"))
    if order is None or replicas_of(buffer.unit) != "expert_replicas":
        return buffer

    def known(segment: Segment) -> Segment:
        first = segment.box.corner[0]
        return replace(segment, places=order[first : first + segment.box.size[0]])

    return replace(buffer, segments=tuple(map(known, buffer.segments)))


def replicas_of(unit: str) -> Axis:
    """The axis along which a unit's weights are copies of one another."""
    return "expert_replicas" if unit.endswith(".experts") else "replicas"


def shard_axes(layout: Layout, unit: str) -> tuple[Stride, Stride]:
    """The groups that share out one copy of a unit's states, and those of the same share in other
    copies.
    """
    if replicas_of(unit) == "expert_replicas":
        return axis(layout, "expert_shard"), axis(layout, "expert_across")
    return axis(layout, "shard"), axis(layout, "across")


def own_range(buffer: Buffer, layout: Layout, rank: int) -> Range:
    """The range of a buffer that `rank` updates: all of it, or its share under ZeRO; with servers
    that update, theirs. Of frozen weights, the range that it keeps.
    """
    if not buffer.trains and layout.zero < 3:
        return 0, buffer.length
    if layout.server:
        return kept_range(buffer.length, layout, rank)
    if layout.zero == 0:
        return 0, buffer.length
    inside, _ = shard_axes(layout, buffer.unit)
    return share(buffer.length, inside.size, inside.index_of(rank))


def counted_range(buffer: Buffer, layout: Layout, rank: int) -> Range:
    """The range of a buffer that `rank` counts among its replicas."""
    start, stop = 0, buffer.length
    for along in shard_axes(layout, buffer.unit):
        first, last = share(stop - start, along.size, along.index_of(rank))
        start, stop = start + first, start + last
    return start, stop


def counted_ranges(buffer: Buffer, plan: Plan, rank: int) -> Iterator[Range]:
    """The ranges of a buffer that `rank` counts in norms and writes to files.

    Each element of the model is counted by one rank: each replica counts its share, and of tp ranks
    or stages that hold the same box, the first counts it.
    """
    if plan.layout.servers_update or serves(plan.layout, rank):
        yield own_range(buffer, plan.layout, rank)
        return
    start, stop = counted_range(buffer, plan.layout, rank)
    if all(is_first(name, plan, rank) for name in buffer.names):
        yield start, stop
        return
    for segment in buffer.segments:
        first, last = max(start, segment.start), min(stop, segment.stop)
        if first < last and is_first(segment.name, plan, rank):
            yield first, last


def is_first(name: str, plan: Plan, rank: int) -> bool:
    """Whether no earlier stage or tp rank holds the same box of the weight `name`."""
    weight = plan.weight(name)
    tp, pp = axis(plan.layout, "tp"), axis(plan.layout, "pp")
    same = _same_box(weight, plan.shape, plan.layout, rank)
    return tp.index_of(rank) == same[0] and pp.index_of(rank) == plan.ranks_of_unit[weight.unit][0]


# -- cuts ------------------------------------------------------------------------


def traded_heads(plan: Plan, rank: int, index: int) -> tuple[Range, Range]:
    """The query and key-value heads that rank `index` of those with which `rank` trades computes,
    among those that the group's tp rank has, counted from its first; in a ring all of them.
    """
    queries, keys = held_heads(plan.shape, plan.layout.tp, _tp(plan.layout, rank))
    return cut_heads(queries, keys, plan.layout.trading, index)


def chunks(layout: Layout, sequence: int, rank: int) -> tuple[Range, ...]:
    """The positions of a sample of `sequence` that `rank` works on. Each cp rank takes an early and
    a late chunk, so that all attend to equally many keys; with cp2, chunks 0 and 3 | 1 and 2.
    """
    ways, index = layout.cp, axis(layout, "cp").index_of(rank)
    if ways == 1:
        return ((0, sequence),)
    return tuple(share(sequence, 2 * ways, i) for i in (index, 2 * ways - 1 - index))


def traded_chunks(layout: Layout, sequence: int, rank: int) -> tuple[Range, ...]:
    """The positions that `rank` has after it has traded heads for those of its neighbours, which
    are next to its own: an early and a late range; without cp one.
    """
    group = axis(layout, "traders").group(rank)
    first, last = (chunks(layout, sequence, other) for other in (group[0], group[-1]))
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, last, strict=True))


def tokens(plan: Plan, rank: int) -> int:
    """Number of positions of one sample that `rank` works on."""
    return sum(stop - start for start, stop in chunks(plan.layout, plan.sequence, rank))


def local_of(plan: Plan, rank: int) -> RankSizes:
    """The tokens (and pairs, …) of a micro-batch, or of its longest token slice, on `rank`, and the
    rank's fraction of each named dim.
    """
    layout, shape, samples = plan.layout, plan.shape, plan.micro_batch
    positions = -(-tokens(plan, rank) // layout.slices)
    first, last = share(positions, layout.tp, _tp(layout, rank)) if layout.sp else (0, positions)
    own, cut, pairs = (samples * n for n in (positions, last - first, positions * plan.sequence))
    rows = expert_rows(shape, positions, fixed_capacity(plan))
    most = shape.experts.count if shape.experts else 1
    source = 1 if shape.family == "encoder-decoder" else 0  # as long as the target, and cut like it
    ranges = traded_chunks(layout, plan.sequence, rank)
    traded = samples * sum(stop - start for start, stop in ranges)
    counts: dict[Per, int] = {
        "token": own,
        "sp_token": cut,
        "pair": pairs,
        "source": source * own,
        "sp_source": source * cut,
        "source_pair": source * pairs,
        "cross_pair": source * pairs,
        "expert_row": samples * rows,
        "taken_row": samples * rows * _held_experts(plan, rank) // most if shape.experts else 0,
        "traded": traded,
        "traded_pair": traded * plan.sequence,
        "chunk": (own - 1) % CHUNK + 1,
        "once": 1,
    }
    return RankSizes(
        counts, {**dict(_shares(shape, layout.tp, _tp(layout, rank))), **_traded(plan, rank)}
    )


def _traded(plan: Plan, rank: int) -> dict[str, Fraction]:
    """The fractions of heads for which `rank` computes attention, where heads are traded."""
    if plan.layout.trading == 1:
        return {}
    pairs = traded_heads(plan, rank, axis(plan.layout, "traders").index_of(rank))
    queries, keys = (stop - start for start, stop in pairs)
    query = Fraction(queries, plan.shape.heads)
    key = query if plan.shape.latent else Fraction(keys, plan.shape.k)
    return {"traded heads": query, "traded query": query, "traded key": key}


def fixed_capacity(plan: Plan) -> float:
    """The capacity by which every expert has as many rows of each sequence on a rank; 0 where the
    rows depend on the data: without a capacity, and where ranks share sequences, for one of them
    may have all the tokens that an expert takes.
    """
    return plan.method.routing.capacity if plan.layout.cp == 1 else 0.0


def _held_experts(plan: Plan, rank: int) -> int:
    """Experts of which `rank` computes rows of all ep ranks, times these ranks."""
    along, experts = axis(plan.layout, "ep"), plan.shape.experts
    start, stop = share(experts.count if experts else 0, along.size, along.index_of(rank))
    return (stop - start) * along.size


def _shares(shape: ModelShape, ways: int, index: int) -> Iterator[tuple[str, Fraction]]:
    """For every dim that tp cuts, its name and the fraction of it on tp rank `index` of `ways`."""
    for names, whole, (start, stop) in (
        (("heads", "query"), shape.heads, heads(shape, ways, index)),
        (("kv_heads", "key"), shape.k, kv_heads(shape, ways, index)),
        (("ffn",), shape.ffn_size, share(shape.ffn_size, ways, index)),
        (("vocab",), shape.vocab, share(shape.vocab, ways, index)),
    ):
        for name in names:
            yield name, Fraction(stop - start, whole)
    if shape.experts:
        inner = {"expert_ffn": shape.experts.ffn_size, "shared_ffn": shape.experts.shared}
        for name, whole in inner.items():
            start, stop = share(whole, ways, index)
            yield name, Fraction(stop - start, max(whole, 1))


def _cut(dim: str, size: int, shape: ModelShape, layout: Layout, rank: int) -> Range:
    """The range of a dim of `size` elements that `rank` holds."""
    tp = layout.tp, _tp(layout, rank)
    if dim == "query":
        return _scale(heads(shape, *tp), size // shape.heads)
    if dim == "key":
        return _scale(kv_heads(shape, *tp), size // shape.k)
    if dim in ("vocab", "ffn", "expert_ffn"):
        return share(size, *tp)
    if dim == "expert":
        return share(size, layout.ep, axis(layout, "ep").index_of(rank))
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
    return axis(layout, "tp").index_of(rank)


def _same_box(weight: Weight, shape: ModelShape, layout: Layout, rank: int) -> tuple[int, ...]:
    """The tp ranks that hold the same box as `rank`."""
    if (CUT_BY_TP - {"key"}) & set(weight.dims):
        return (_tp(layout, rank),)
    if "key" in weight.dims:
        sharers = max(layout.tp // shape.k, 1)
        first = _tp(layout, rank) // sharers * sharers
        return tuple(range(first, first + sharers))
    return tuple(range(layout.tp))


def _partial(weight: Weight, layout: Layout, same: int) -> bool:
    """Whether the gradients of the `same` tp ranks that hold one box are terms of a sum, not
    copies.
    """
    through_heads = "key" in weight.dims or THROUGH_SLICES & set(weight.dims)
    cut_by_sp = layout.sp and not ON_ALL_TOKENS & set(weight.dims)
    return same > 1 and (bool(through_heads) or cut_by_sp)


def _ranks(
    weight: Weight, layout: Layout, rank: int, stages: tuple[int, ...], tp_ranks: tuple[int, ...]
) -> Iterator[int]:
    """The ranks at these stages and tp ranks, in every replica of `rank`'s weights."""
    pp, copies, tp = (axis(layout, name) for name in ("pp", replicas_of(weight.unit), "tp"))
    for stage, copy, tp_rank in product(stages, copies.group(rank), tp_ranks):
        yield copy + (stage - pp.index_of(rank)) * pp.stride + tp_rank - tp.index_of(rank)
