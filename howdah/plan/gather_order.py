"""Which unit's weights a rank asks for, one after the other: what ZeRO-3 gather_counts.

    forward    tied  layers.0  layers.1  head  tied ┐         head: the norm behind the last block
    backward         layers.0  layers.1  head  tied ┘         ← read from the right

A unit that is asked for again before any other is still there: the one in which forward turns to
backward is gathered once for both, here `tied`. The backward pass of an embedding adds rows of a
gradient, and asks for no weight. A block that is computed again asks twice for the same unit.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of, stage_parts
from howdah.plan.schedule.actions import Kind


def gather_counts(plan: Plan, rank: int) -> Counter[str]:
    """How often each unit is gathered in a step: once, where what was gathered stays."""
    if plan.layout.release == "step":
        return Counter(set(_step(plan, rank)))
    if plan.layout.pp == 1:  # a micro-batch begins where none ends: in the embedding
        once = Counter(_runs(_micro(plan)))
        return Counter({unit: count * plan.micros for unit, count in once.items()})
    return Counter(_runs(_step(plan, rank)))


def _runs(units: Iterable[str]) -> Iterator[str]:
    return (unit for unit, _ in groupby(units))


def _micro(plan: Plan) -> Iterator[str]:
    """Of one micro-batch, without a pipeline."""
    every = [part for parts in plan.stages.parts for part in parts]
    yield from forward_units(plan, every)
    yield from backward_units(plan, every)


def _step(plan: Plan, rank: int) -> Iterator[str]:
    """Of a whole step, in the order of its schedule. What is left for the gradients of weights
    needs no weight.
    """
    place = axis(plan.layout, "pp").place(rank)
    stages = stage_parts(plan, place)
    there = {stage: list(forward_units(plan, parts)) for stage, parts in stages.items()}
    back = {stage: list(backward_units(plan, parts)) for stage, parts in stages.items()}
    for action in schedule_of(plan).programs[place]:
        if action.kind is Kind.FORWARD:
            yield from there[action.stage]
        elif action.kind in (Kind.BACKWARD, Kind.INPUT):
            yield from back[action.stage]


def forward_units(plan: Plan, parts: Iterable[str]) -> Iterator[str]:
    """The units that the forward pass of some parts asks for."""
    for part in parts:
        yield from _units_at(plan, part)


def backward_units(plan: Plan, parts: Iterable[str]) -> Iterator[str]:
    """The same of their backward pass."""
    for part in reversed(list(parts)):
        if part not in ("embedding", "target"):
            units = _units_at(plan, part)
            yield from (unit for unit in reversed(units) if not unit.startswith("relative."))


def _units_at(plan: Plan, part: str) -> list[str]:
    """The units of one part, as its forward pass asks for them."""
    if "." in part:
        stack, _, layer = part.partition(".")
        looks_both_ways = stack == "encoder" or plan.shape.family == "encoder"
        relative = "relative.encoder" if looks_both_ways else "relative.decoder"
        units = [relative if layer == "0" else "", part, f"{part}.experts"]
    else:
        units = ["head", "tied"] if part == "head" else ["tied", "embedding"]
        if part == "target" and "tied" in plan.ranks_of_unit:
            units = ["tied"]
    return [unit for unit in units if unit in plan.ranks_of_unit]
