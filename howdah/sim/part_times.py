"""Seconds of each part of the model on the rank that runs it: computation and blocking exchanges.

compute     flops / (dense flop/s of the device · its stated efficiency)
memory      operations that are no matrix product (norms, residuals, activations, softmax) pass
            over the residual stream PASSES times a block, and as often for each of the two
            gradients; attention without a flash kernel also makes SQUARE_PASSES passes over the
            s² numbers of a head
tp, cp, ep  the exchanges of the part's stage (`plan/exchanges.py`), spread over its parts;
            nothing runs beside them
"""

from collections.abc import Mapping
from typing import NamedTuple

from howdah.machines.cluster import Cluster, peak
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import local_of
from howdah.shapes.dims import Dim
from howdah.shapes.part import Part
from howdah.shapes.products import part_flops

# In an eager implementation; a fused one makes about half as many.
PASSES = 16
# Scores: written; read and written by scale and mask, softmax, dropout; read to weight the values.
SQUARE_PASSES = 8


class PartTimes(NamedTuple):
    """Seconds of one part for one micro-batch (and token slice).

    forward   matrix products of the forward pass
    touch     passes over memory of the forward pass
    again     recomputation in the backward pass
    ahead     exchanges of the forward pass
    back      exchanges of the backward pass
    """

    forward: float
    touch: float
    again: float
    ahead: float
    back: float

    def seconds(self, kind: Kind) -> float:
        """Seconds of an action. I and W, the halves of a backward, take about one forward each."""
        forward = self.forward + self.touch
        return {
            Kind.FORWARD: forward + self.ahead,
            Kind.BACKWARD: 2 * forward + self.again + self.back,
            Kind.INPUT: forward + self.again + self.back,
            Kind.WEIGHT: forward,
        }[kind]


PartsOfStages = dict[int, dict[Part, PartTimes]]  # by stage, its parts in forward order


def part_times(
    plan: Plan,
    cluster: Cluster,
    rank: int,
    exchanged: Mapping[tuple[int, bool], float],
    *,
    flash: bool,
) -> PartsOfStages:
    """The parts of the stages of `rank`.

    cluster    with attained rates
    exchanged  seconds of the exchanges of one micro-batch, by (stage, whether backward)
    flash      whether attention runs in a kernel that does not write the s² numbers of a head
    """
    layout, stages = plan.layout, stage_parts(plan, axis(plan.layout, "pp").index_of(rank))
    speed = peak(cluster.device, plan.method.precision) * layout.tp * layout.cp * layout.slices
    touch = _touch(plan, rank, flash=flash) / cluster.device.bandwidth
    # blocks of one kind take equally long
    kinds = {_kind(plan, part): part for parts in stages.values() for part in parts}
    forward = {
        kind: plan.micro_batch * part_flops(plan.shape, part, plan.sequence) / speed
        for kind, part in kinds.items()
    }
    found: PartsOfStages = {}
    for stage, parts in stages.items():
        ahead, back = (exchanged.get((stage, way), 0.0) / len(parts) for way in (False, True))
        found[stage] = {}
        for part in parts:
            own, passes = forward[_kind(plan, part)], touch if part.is_block else 0.0
            again = own + passes if plan.recompute.get(part) == "full" else 0.0
            found[stage][part] = PartTimes(own, passes, again, ahead, back)
    return found


def _kind(plan: Plan, part: Part) -> tuple[str, bool]:
    return part.stack, plan.sparse(part)


def _touch(plan: Plan, rank: int, *, flash: bool) -> float:
    """Bytes of the passes over memory of a block: one micro-batch, forward only."""
    of = local_of(plan, rank)
    numbers = PASSES * of.counts["sp_token"] * plan.shape.width
    if not flash:
        numbers += SQUARE_PASSES * of.counts["pair"] * of.size(Dim("heads", plan.shape.heads))
    return numbers * plan.compute_bytes
