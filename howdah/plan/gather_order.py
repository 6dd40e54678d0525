"""The order in which a rank needs the weights of its units, where they come to be used: because
ZeRO-3 all-gathers them, or because they have their home on the host or the disk, or both.

    forward    tied  layers.0  layers.1  head  tied ┐         head: the norm behind the last block
    backward         layers.0  layers.1  head  tied ┘         ← read from the right

A unit that is needed twice in a row is gathered once, because its weights are still there. So the
unit at which the forward pass turns into the backward pass is gathered once for both, here `tied`;
and a recomputed block once for its second forward and its backward pass, unless its experts are
gathered between the two. The backward pass of an embedding adds rows to a gradient, and needs no
weights, but for those of a norm behind it.

A window of more than two units (`storage.window`) holds those that are needed next, whether they
were used before or not. So a unit comes again only if as many others as it holds were needed in
between. With 3, the last two blocks before a head are there for both passes.

A table of tokens at home on the host does not come for the embedding if it has more rows than a
micro-batch has tokens: the rows are read where they lie, one for each token (`rows_read`). If the
head does not use it, too, its gradient goes home the same way (`rows_added`).
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of, stage_parts
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import shard_axes
from howdah.plan.storage import staying
from howdah.shapes.part import Part
from howdah.shapes.weights import FROZEN, relative_unit


def gathered_by(layout: Layout) -> str:
    """The operation that gathers a unit: one all-gather, or a broadcast of each share."""
    return "broadcast" if layout.gather == "broadcast" else "all_gather"


def rows_read(plan: Plan) -> tuple[str, int]:
    """The unit whose table is read by its rows on the host, and how many a micro-batch reads; no
    unit and none where the whole unit comes. It does where it has more weights that are used with
    the table, where zero3 shares it out, and under tp, which cuts it.
    """
    layout, shape = plan.layout, plan.shape
    unit = "tied" if "tied" in plan.bundles else "embedding"
    tokens = plan.micro_batch * (plan.sequence // layout.cp)
    beside = [one for one in plan.weights if one.unit.removeprefix(FROZEN) == unit]
    there = layout.weights == "host" and layout.tp == 1 and not shape.encoder_layers
    if (
        there
        and (unit == "tied" or len(beside) == 1)
        and tokens < shape.vocab
        and (layout.zero != 3 or shard_axes(layout, unit)[0].size == 1)
    ):
        return unit, tokens
    return "", 0


def never_whole(plan: Plan) -> str:
    """The unit that is read by its rows alone; empty: there is none, as a tied one is needed whole
    by the head.
    """
    unit, _ = rows_read(plan)
    return "" if unit == "tied" else unit


def rows_added(plan: Plan) -> tuple[str, int]:
    """The unit to whose gradient at home the rows of a micro-batch are added, one for each token,
    and how many they are; no unit and none where the gradient is whole on the device before.
    """
    unit, tokens = rows_read(plan)
    alone = unit and unit == never_whole(plan) and plan.layout.gradients == "host"
    trained = any(one.unit == unit for one in plan.weights)
    return (unit, tokens) if alone and trained else ("", 0)


def comes(layout: Layout, unit: str) -> bool:
    """Whether the weights of a unit come to be used: from other ranks, or from their home."""
    return layout.weights != "device" or shard_axes(layout, unit)[0].size > 1


def gather_counts(plan: Plan, rank: int) -> Counter[str]:
    """How often each unit comes to `rank` in a step; once under release=step, which keeps units."""
    if plan.layout.release == "step":
        return Counter(set(_step(plan, rank)))
    if plan.layout.pp == 1 and not plan.shape.embedding_norm:
        # no micro-batch starts with the unit with which the last one ended, and each needs all
        # units: what the second brings, the others bring, too
        first = [*_runs(plan, _micro(plan))]
        once, twice = (Counter(_fetched(plan, some)) for some in (first, first * 2))
        more = plan.micros - 1
        return Counter({unit: n + more * (twice[unit] - n) for unit, n in once.items()})
    return Counter(_fetched(plan, _runs(plan, _step(plan, rank))))


def _runs(plan: Plan, units: Iterable[str]) -> Iterator[str]:
    """Units without those needed twice in a row, nor those that are always there."""
    return (unit for unit, _ in groupby(unit for unit in units if comes(plan.layout, unit)))


def _fetched(plan: Plan, units: Iterable[str]) -> Iterator[str]:
    """Units, in their order, without those that still are in the window."""
    there: dict[str, None] = {}  # the latest that were used, the last one last
    for unit in units:
        if unit not in there:
            yield unit
        there.pop(unit, None)
        there[unit] = None
        if len(there) > staying(plan.storage.window):
            del there[next(iter(there))]


def _micro(plan: Plan) -> Iterator[str]:
    """The units that one micro-batch needs, in order, without a pipeline."""
    every = [part for parts in plan.stages.parts for part in parts]
    yield from forward_units(plan, every)
    yield from backward_units(plan, every)


def _step(plan: Plan, rank: int) -> Iterator[str]:
    """The units that `rank` needs in a step, in the order of its schedule.

    The weight half (W) of a split backward pass needs no weights.
    """
    pp_index = axis(plan.layout, "pp").index_of(rank)
    stages = stage_parts(plan, pp_index)
    there = {stage: list(forward_units(plan, parts)) for stage, parts in stages.items()}
    back = {stage: list(backward_units(plan, parts)) for stage, parts in stages.items()}
    for action in schedule_of(plan).programs[pp_index]:
        if action.kind is Kind.FORWARD:
            yield from there[action.stage]
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            yield from back[action.stage]


def forward_units(plan: Plan, parts: Iterable[Part]) -> Iterator[str]:
    """The units that the forward pass of `parts` needs whole, in order."""
    for part in parts:
        yield from needed_at(plan, part)


def backward_units(plan: Plan, parts: Iterable[Part]) -> Iterator[str]:
    """The units that the backward pass of `parts` needs, in order; `parts` are in forward order."""
    for part in reversed([part for part in parts if part not in plan.marks.still]):
        if part not in ("embedding", "target"):
            units = [u for u in units_at(plan, part) if not u.startswith("relative.")]
            if plan.recompute.get(part) == "full":
                yield from units[:-1]  # the last is there for both
            yield from reversed(units)
        elif part == "embedding" and plan.shape.embedding_norm:
            yield "embedding"


def needed_at(plan: Plan, part: Part) -> list[str]:
    """The units that the forward pass of one part needs whole, in order."""
    by_rows = rows_read(plan)[0] if part == "embedding" else ""
    return [unit for unit in units_at(plan, part) if unit != by_rows]


def units_at(plan: Plan, part: Part) -> list[str]:
    """The units of one part, in the order in which its forward pass needs them."""
    if part.is_block:
        relative = [relative_unit(part.stack, plan.shape)] if _begins(plan, part) else []
        units = [*relative, part, f"{part}.experts"]
    else:
        units = ["head", "tied"] if part == "head" else ["tied", "embedding"]
        if part == "target" and "tied" in plan.bundles:
            units = ["tied"]
    return [unit for unit in units if unit in plan.bundles]


def _begins(plan: Plan, part: Part) -> bool:
    """Whether a block is the first of its stack on its stage: there the table of relative positions
    is looked up, for all that follow.
    """
    if plan.shape.positions != "relative":
        return False
    stage = next(parts for parts in plan.stages.parts if part in parts)
    return part == next(other for other in stage if other.stack == part.stack)


def gradient_units(plan: Plan, parts: Iterable[Part]) -> Iterator[str]:
    """The units to which the backward pass of `parts` adds gradients, in the order of the forward
    pass: read from the right, as the gradients come. A table of relative positions gets a term from
    each block of its stack.
    """
    for part in parts:
        relative = relative_unit(part.stack, plan.shape) if part.is_block else ""
        units = (unit for unit in units_at(plan, part) if unit != relative)
        yield from (unit for unit in units if unit in plan.ranks_of_unit)
        if relative in plan.ranks_of_unit:
            yield relative
