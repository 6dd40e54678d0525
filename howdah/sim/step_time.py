"""How long a step takes, from stated efficiencies: a first estimate, not a calibrated one.

    compute     flops of a stage / (dense flop/s of the device · its stated efficiency)
    memory      operations that are no matrix product (norms, residuals, activations, softmax) pass
                over the residual stream PASSES times a block, and as often for each of the two
                gradients; attention without a flash kernel also makes SQUARE_PASSES passes over the
                s² numbers of a head
    tp, cp, ep  bytes of the axis / bandwidth of its path + messages · latency; none of it
                overlaps with computation
    pp          a transfer at each stage boundary, overlapped with computation
    dp          zero3 gathers weights unit by unit, and sharded gradients are reduced, both in
                parallel with computation: a pass takes the longer of the two. Full gradients are
                reduced unit by unit in the last backward pass; the step waits for what exceeds
                that pass, and for the last unit
    update      bytes of gradients, masters, moments and weights / memory bandwidth, and for
                zero1 and zero2 the all-gather of the new weights
    stragglers  the slowest of many nodes: 1 % more for every doubling of their number

These times of a stage become the durations of its actions, and the event simulation of the lowered
schedule combines them. Its result contains the bubbles and the communication that is not hidden.
The cluster's numbers are `attained`: measured values where there are any, otherwise nominal values
times a stated efficiency.
"""

from collections import Counter
from dataclasses import dataclass
from math import log2

from howdah.machines.cluster import Cluster, attained, peak
from howdah.machines.network import Pattern, axis_groups, path
from howdah.plan.mesh_axes import Axis, axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of, tied_stages
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb, lower
from howdah.plan.sharding import local_buffers, local_of
from howdah.shapes.dims import Dim
from howdah.shapes.products import conventions, part_flops
from howdah.sim.timeline import Timeline, simulate
from howdah.sim.traffic import step_traffic

# For each axis of a traffic row: the axis whose groups communicate, and in which pattern.
GROUPS: dict[str, tuple[Axis, Pattern]] = {
    "tp": ("tp", "ring"),
    "cp": ("cp", "ring"),
    "ep": ("ep", "all"),
    "dp": ("replicas", "ring"),
    "pp": ("pp", "ring"),
}

# In an eager implementation; a fused one makes about half as many.
PASSES = 16
# Scores: written; read and written by scale and mask, softmax, dropout; read to weight the values.
SQUARE_PASSES = 8
STRAGGLERS = 0.01


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step of the full batch.

    seconds    from the first forward to the end of the update
    timeline   simulated timeline of one pipeline, rank by rank
    breakdown  seconds of the busiest pipeline rank by cause; they add up to `seconds`
    mfu        model flops (all pairs of tokens) per second over the dense peak of all devices
    """

    seconds: float
    timeline: Timeline
    breakdown: dict[str, float]
    tokens_per_second: float
    mfu: float


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage for one micro-batch (and token slice).

    forward   matrix products of the forward pass
    touch     passes over memory of the forward pass
    again     recomputation in the backward pass
    messages  communication of tp, cp and ep, in forward and backward together
    gather    all-gather of the weights for one pass, in zero3
    reduce    reduce-scatter of the gradients, if it runs for every micro-batch
    """

    forward: float
    touch: float
    again: float
    messages: float
    gather: float
    reduce: float

    def seconds(self, kind: Kind) -> float:
        """Seconds of an action. I and W, the halves of a backward, take about one forward each."""
        forward, half = self.forward + self.touch, self.messages / 2
        return {
            Kind.FORWARD: max(forward + half, self.gather),
            Kind.BACKWARD: max(2 * forward + self.again + half, self.gather + self.reduce),
            Kind.INPUT: max(forward + self.again + half, self.gather),
            Kind.WEIGHT: max(forward, self.reduce),
        }[kind]


class Wire:
    """Seconds of communication on a cluster, for the groups of a plan's layout."""

    def __init__(self, plan: Plan, counted: Cluster) -> None:
        self._links: dict[str, tuple[float, float]] = {}
        for name, (group, pattern) in GROUPS.items():
            size, stride = axis(plan.layout, group)
            if size > 1:
                groups = axis_groups(plan.layout.world, size=size, stride=stride)
                found = path(counted, groups, pattern=pattern)
                self._links[name] = found.link.bandwidth, found.messages * found.link.latency

    def seconds(self, name: str, sent: float) -> float:
        """Seconds of a collective on axis `name` in which each rank sends `sent` bytes."""
        if not sent or name not in self._links:
            return 0.0
        bandwidth, latency = self._links[name]
        return sent / bandwidth + latency


def step_time(plan: Plan, cluster: Cluster, *, flash: bool = True) -> StepTime:
    """The predicted time of a step of `plan` on `cluster`, which must have enough devices.

    flash  whether attention runs in a kernel that does not write the s² numbers of a head to memory

    Raises UserError if the device has no arithmetic in the plan's precision.
    """
    counted, layout = attained(cluster), plan.layout
    wire, ranks = Wire(plan, counted), axis(layout, "pp").group(0)
    sent = [_sent(plan, rank) for rank in ranks]
    where = plan.stages.where
    touches = [_touch(plan, counted, stage, flash=flash) for stage in range(len(where))]
    costs = [
        _stage_cost(plan, counted, wire, s, touch=touches[s], sent=sent[home])
        for s, home in enumerate(where)
    ]
    reduces = [_last_reduce(plan, wire, costs[s], s, sent[home]) for s, home in enumerate(where)]
    updates = [_update(plan, counted, wire, rank, sent[i]) for i, rank in enumerate(ranks)]
    send = wire.seconds("pp", _boundary(plan))

    def seconds(action: Action) -> float:
        if action.kind is Kind.UPDATE:  # a rank updates its stages one after the other
            return updates[where[action.stage]] / layout.virtual
        return costs[action.stage].seconds(action.kind)

    def transfer(instruction: Instruction) -> float:
        return reduces[instruction.action.stage] if instruction.verb is Verb.REDUCE else send

    timeline = simulate(lower(schedule_of(plan), tied=tied_stages(plan)), seconds, transfer)
    return _summed(plan, cluster, timeline, costs, updates)


# -- one stage ---------------------------------------------------------------------


def _sent(plan: Plan, rank: int) -> Counter[tuple[str, str]]:
    """Bytes that `rank` sends in a step, by (axis, operation); (axis, "") is the sum of an axis."""
    total: Counter[tuple[str, str]] = Counter()
    for row, count in step_traffic(plan, rank).items():
        total[row.axis, row.operation] += count
        total[row.axis, ""] += count
    return total


def _stage_cost(
    plan: Plan,
    counted: Cluster,
    wire: Wire,
    stage: int,
    *,
    touch: float,
    sent: Counter[tuple[str, str]],
) -> StageCost:
    layout, parts = plan.layout, plan.stages.parts[stage]
    speed = peak(counted.device, plan.method.precision) * layout.tp * layout.cp * layout.slices
    work = {part: plan.micro_batch * part_flops(plan.shape, part, plan.sequence) for part in parts}
    blocks = [part for part in parts if part.is_block]
    again = [part for part in blocks if plan.recompute[part] == "full"]
    part_again = len(again) / len(blocks) if blocks else 0.0
    times = plan.micros * layout.virtual * layout.slices
    gather = sent["dp", "all_gather"] / times / 2 if layout.zero == 3 else 0.0
    reduce = sent["dp", "reduce_scatter"] / times if layout.accumulate == "shard" else 0.0
    return StageCost(
        forward=sum(work.values()) / speed,
        touch=touch,
        again=sum(work[part] for part in again) / speed + touch * part_again,
        messages=sum(wire.seconds(name, sent[name, ""] / times) for name in ("tp", "cp", "ep")),
        gather=wire.seconds("dp", gather),
        reduce=wire.seconds("dp", reduce),
    )


def _touch(plan: Plan, counted: Cluster, stage: int, *, flash: bool) -> float:
    """Seconds of the passes over memory in a stage's blocks: one micro-batch, forward only."""
    of = local_of(plan, axis(plan.layout, "pp").group(0)[plan.stages.where[stage]])
    numbers = PASSES * of.counts["sp_token"] * plan.shape.width
    if not flash:
        numbers += SQUARE_PASSES * of.counts["pair"] * of.size(Dim("heads", plan.shape.heads))
    blocks = sum(part.is_block for part in plan.stages.parts[stage])
    return blocks * numbers * plan.compute_bytes / counted.device.bandwidth


def _boundary(plan: Plan) -> float:
    """Bytes that a stage sends to the next stage for one micro-batch and token slice."""
    layout = plan.layout
    tokens = plan.micro_batch * plan.sequence / (layout.cp * layout.slices)
    return tokens * plan.shape.width * plan.compute_bytes / (layout.tp if layout.sp else 1)


def _last_reduce(
    plan: Plan, wire: Wire, cost: StageCost, stage: int, sent: Counter[tuple[str, str]]
) -> float:
    """Seconds of a stage's gradient reduction that its last backward pass does not hide."""
    if plan.layout.accumulate == "shard":
        return 0.0
    moved = sent["dp", "reduce_scatter"]
    if plan.layout.zero == 0:
        moved += sent["dp", "all_gather"]
    whole = wire.seconds("dp", moved / plan.layout.virtual)
    return max(whole - 2 * (cost.forward + cost.touch), whole / len(plan.stages.parts[stage]))


def _update(
    plan: Plan, counted: Cluster, wire: Wire, rank: int, sent: Counter[tuple[str, str]]
) -> float:
    """Seconds of a rank's update.

    It reads gradients, masters and moments of the rank's share, and writes masters, moments and
    weights; zero1 and zero2 then gather the weights.
    """
    layout, states = plan.layout, len(plan.method.optimizer.states)
    own = sum(b.length for b in local_buffers(plan, rank)) / (layout.sharers if layout.zero else 1)
    touched = own * ((3 + 2 * states) * plan.master_bytes + plan.compute_bytes)
    gathered = sent["dp", "all_gather"] if layout.zero in (1, 2) else 0
    return touched / counted.device.bandwidth + wire.seconds("dp", gathered)


# -- together ----------------------------------------------------------------------


def _summed(
    plan: Plan, cluster: Cluster, timeline: Timeline, costs: list[StageCost], updates: list[float]
) -> StepTime:
    nodes = -(-plan.layout.world // cluster.devices_per_node)
    straggling = timeline.makespan * STRAGGLERS * log2(nodes)
    seconds, times = timeline.makespan + straggling, plan.micros * plan.layout.slices
    busiest = max(range(plan.layout.pp), key=lambda rank: timeline.busy[rank])
    own = [c for c, home in zip(costs, plan.stages.where, strict=True) if home == busiest]
    parts = {
        "compute": times * sum(3 * cost.forward for cost in own),
        "memory": times * sum(3 * cost.touch for cost in own),
        "recompute": times * sum(cost.again for cost in own),
        "tp, cp, ep": times * sum(cost.messages for cost in own),
        "update": updates[busiest],
        "stragglers": straggling,
    }
    parts["waiting"] = max(seconds - sum(parts.values()), 0.0)
    assert plan.batch.global_batch is not None
    tokens = plan.batch.global_batch * plan.sequence
    dense = peak(cluster.device, plan.method.precision) * plan.layout.world
    model = conventions(plan.shape, plan.sequence).model * tokens
    return StepTime(seconds, timeline, parts, tokens / seconds, model / seconds / dense)
