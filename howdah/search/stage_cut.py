"""Stages by time: a pipeline's layout with `stages=`, cut so that the slowest stage is fastest.

A layout's stages have equal FLOPs. Seconds are another measure: a head passes its logits through
memory, a block waits for its exchanges.
"""

from dataclasses import replace

from howdah.plan.layout import Layout
from howdah.plan.plan import Plan
from howdah.plan.stages import by_cost
from howdah.search.part_tables import PartTables, Shape
from howdah.search.space import RECOMPUTE, context_number
from howdah.shapes.part import Part

GAIN = 0.005  # of a step, from which another cut is worth its word


def part_seconds(tables: PartTables, plan: Plan) -> dict[Part, float]:
    """Seconds of every part of the model, forward and backward, for one micro-batch of a plan."""
    layout = plan.layout
    again, context = RECOMPUTE.index(layout.recompute), context_number(layout)
    sizes = layout.tp, layout.cp, layout.ep, int(layout.sp), plan.micro_batch
    return tables.seconds_of(Shape(*sizes, again, context))


def cut_by_time(tables: PartTables, plan: Plan) -> Layout | None:
    """The layout of a plan with stages of equal seconds; None where it has no pipeline, where these
    are its stages, or where no `stages=` says them.
    """
    layout = plan.layout
    if layout.pp == 1 or layout.stages or layout.slices > 1:
        return None
    found = by_cost(part_seconds(tables, plan), plan.stages.where)
    counts = tuple(sum(part.is_block for part in parts) for parts in found.parts)
    if found == plan.stages or 0 in counts[1:-1]:
        return None
    return replace(layout, stages=counts)
