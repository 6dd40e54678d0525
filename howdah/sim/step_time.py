"""How long a step takes, on a cluster, under a framework's profile (`sim/profile.py`).

    compute, memory   of each part of the model (`sim/part_times.py`)
    tp, cp, ep        exchanges of activations; the profile says which share hides
    pp                a tensor at each stage boundary, overlapped with computation
    dp                sums of gradients and gathers of weights, message by message, each on the path
                      of its own ranks; they start and are awaited as in a run, and hide behind
                      computation where that lets them (`sim/rank_clock.py`)
    update            bytes of gradients, masters, moments and weights / memory bandwidth; that of
                      the host, where they are not on the device
    homes             what moves from and to homes make a step longer, in the passes and in the
                      update (`sim/home_times.py`); what hides behind computation does not
    stragglers        the slowest of many nodes: 0.5 % more for every doubling of their number; on
                      a measured machine, the slowest of its ranks

The event simulation runs the program of a step, action by action. Its result contains the bubbles
and the communication that is not hidden. The cluster's numbers are `attained`: measured values
where there are any, otherwise nominal values times a stated efficiency.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log2

from howdah.machines.cluster import Cluster, attained, peak
from howdah.plan.exchanges import exchanges
from howdah.plan.flat_buffers import Buffer
from howdah.plan.homes import homes, states_away
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import program_of, tied_stages
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb
from howdah.plan.sharding import local_buffers, own_range
from howdah.plan.sums import sums_of
from howdah.plan.worker_ranks import served_buffers
from howdah.shapes.products import conventions
from howdah.sim.chosen import settled_plan
from howdah.sim.home_times import update_bandwidth, update_seconds, without_moves
from howdah.sim.message_times import MessageTimes, RankMessages
from howdah.sim.operator_times import NAMES, Speeds
from howdah.sim.part_times import part_times, waited
from howdah.sim.profile import PLAIN, Profile
from howdah.sim.rank_clock import RankClock
from howdah.sim.timeline import Timeline, simulate_lowered


@dataclass(frozen=True)
class StepTime:
    """The predicted time of one step of the full batch.

    seconds    from the first forward to the end of the update
    timeline   simulated timeline of one pipeline, rank by rank
    breakdown  seconds of the busiest pipeline rank by cause; they add up to `seconds`
    mfu        model flops (all pairs of tokens) per second over the dense peak of all devices,
               in the precision of the linear layers
    profile    of the framework
    bubble     share of all ranks' time in which they do not compute: they wait, or exchange
    """

    seconds: float
    timeline: Timeline
    breakdown: dict[str, float]
    tokens_per_second: float
    mfu: float
    profile: Profile
    bubble: float

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which four of five steps take; None where that is not known."""
        spread = self.profile.spread
        return (self.seconds / spread, self.seconds * spread) if spread else None


def step_time(plan: Plan, cluster: Cluster, profile: Profile = PLAIN) -> StepTime:
    """The predicted time of a step of `plan` on `cluster`, which must have enough devices.

    profile  what the framework does beyond the plan (`sim/profile.py`)

    Raises UserError if the device has no arithmetic in the plan's precision.
    """
    found = _step_time(plan, cluster, profile)
    if homes(plan.layout) == {"device"}:
        return found
    free = _step_time(*without_moves(plan, cluster), profile)
    share = min(found.seconds / free.seconds, 1.0)
    parts = {name: part * share for name, part in free.breakdown.items()}
    parts["homes"] = max(found.seconds - free.seconds, 0.0)
    bubble = 1 - (1 - free.bubble) * min(free.seconds / found.seconds, 1.0)
    return replace(found, breakdown=parts, bubble=bubble)


def _step_time(plan: Plan, cluster: Cluster, profile: Profile) -> StepTime:
    """The time of a step; waits for homes are part of what waits, and of the update."""
    plan = settled_plan(plan, cluster)
    counted, lowered = wired(attained(cluster), profile), program_of(plan)
    speeds = Speeds(cluster, counted, plan.method, profile)
    times, where = MessageTimes(plan, counted, profile), plan.stages.where
    ranks = [
        _Rank(plan, rank, speeds, times, program=program, profile=profile)
        for rank, program in zip(
            axis(plan.layout, "pp").group(0), lowered.schedule.programs, strict=True
        )
    ]

    def seconds(action: Action, start: float) -> float:
        return ranks[where[action.stage]].seconds(action, start)

    def transfer(instruction: Instruction, start: float) -> float:
        return ranks[where[instruction.action.stage]].transfer(instruction, start)

    timeline = simulate_lowered(lowered, seconds, transfer)
    return _summed(plan, cluster, timeline, ranks, profile)


def wired(counted: Cluster, profile: Profile) -> Cluster:
    """The cluster with the bandwidths that the framework's collectives reach, and what its messages
    take besides.
    """
    inside, between = (
        replace(link, bandwidth=link.bandwidth * factor, latency=link.latency + profile.meet)
        for link, factor in (
            (counted.inside, profile.inside),
            (counted.between, profile.inside if counted.alone else profile.between),
        )
    )
    return replace(counted, inside=inside, between=between)


class _Rank:
    """The durations of one pipeline rank, in the order of its program.

    parts   the parts of its stages
    update  seconds of its update
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        speeds: Speeds,
        times: MessageTimes,
        *,
        program: Sequence[Action],
        profile: Profile,
    ) -> None:
        runs, self._virtual = plan.micros * plan.layout.slices, plan.layout.virtual
        blocking: dict[tuple[int, bool], float] = defaultdict(float)
        self._sends: dict[tuple[int, bool], float] = {}
        for row in exchanges(plan, rank):
            once, way = times.of_exchange(row, rank) / runs, (row.stage, row.back)
            if row.axis == "pp":
                self._sends[way] = once
            if row.axis != "pp" or not profile.pp:
                blocking[way] += waited(row, once, plan, speeds, profile)
        sums, held = sums_of(plan, rank), local_buffers(plan, rank)
        stages = part_times(plan, speeds, rank, blocking, profile)
        self.parts = [part for parts in stages.values() for part in parts.values()]
        messages = RankMessages(times, plan, rank, sums=sums, held=held)
        self._clock = RankClock(plan, program, messages, stages, profile)
        at = plan.layout.workers if plan.layout.servers_update else rank  # who updates
        self._beside = 0.0  # seconds of an update that runs beside the passes
        kept = served_buffers(plan) if plan.layout.servers_update else held
        self.update = profile.update * _update(plan, speeds.bandwidth, at, kept)
        if states_away(plan.layout):
            bandwidth = update_bandwidth(speeds.cluster)
            late = plan.method.optimizer.delay
            self._beside = late * profile.update * _update(plan, bandwidth, at, held)
            element = 0.0 if late else profile.update * _element(plan) / bandwidth
            self.update = update_seconds(plan, speeds.cluster, at, held, element=element)
        self.update += profile.waits * times.of_scalars()
        self._tie = sum((times.of_sum(row) for row in sums if row.stage is None), 0.0)
        if not tied_stages(plan):
            self.update += self._tie

    def seconds(self, action: Action, start: float) -> float:
        """Seconds of the next action, which starts at `start`."""
        if action.kind is Kind.UPDATE:  # a rank updates its stages one after the other
            self.update += max(self._beside - start, 0.0)
            self._beside = 0.0
            return self.update / self._virtual
        return self._clock.end(action, start) - start

    def transfer(self, instruction: Instruction, start: float) -> float:
        """Seconds of a send or a tie; of a sum, those by which it outlasts computation."""
        action = instruction.action
        if instruction.verb is Verb.REDUCE:
            return max(self._clock.summed(action) - start, 0.0)
        if instruction.verb is Verb.TIE:
            return self._tie
        return self._sends[action.stage, action.kind is not Kind.FORWARD]


def _update(plan: Plan, bandwidth: float, rank: int, held: Sequence[Buffer]) -> float:
    """Seconds in which a rank reads gradients, masters and moments of its share, and writes
    masters, moments and weights.
    """
    ranges = (own_range(buffer, plan.layout, rank) for buffer in held if buffer.trains)
    return sum(stop - start for start, stop in ranges) * _element(plan) / bandwidth


def _element(plan: Plan) -> int:
    """Bytes that the update of an element reads and writes."""
    states = len(plan.method.optimizer.states)
    return (3 + 2 * states) * plan.master_bytes + plan.compute_bytes


def _lent(timeline: Timeline, crowd: float) -> float:
    """Seconds of a timeline in which `crowd` ranks compute on each core, and each as slowly as if
    all computed: those that wait leave more of the core to the others.
    """
    if crowd == 1:  # to the last bit
        return timeline.makespan
    busy = sum(timeline.busy) / len(timeline.busy)
    return busy + (timeline.makespan - busy) / crowd


def _summed(
    plan: Plan,
    cluster: Cluster,
    timeline: Timeline,
    ranks: Sequence[_Rank],
    profile: Profile,
) -> StepTime:
    nodes = -(-plan.layout.world // cluster.devices_per_node)
    makespan = _lent(timeline, profile.crowd)
    lost = profile.straggling * log2(nodes) + profile.uneven * (plan.layout.world > 1)
    straggling = makespan * lost
    times = plan.micros * plan.layout.slices
    seconds = makespan + straggling + profile.step
    busiest = ranks[max(range(plan.layout.pp), key=timeline.busy.__getitem__)]
    parts = {
        "compute": times * sum(sum(part.products) for part in busiest.parts),
        "memory": times * sum(part.touch + part.touched for part in busiest.parts),
        "recompute": times * sum(part.again for part in busiest.parts),
        "host": times * sum(part.host for part in busiest.parts),
        "tp, cp, ep": times * sum(part.ahead + part.back for part in busiest.parts),
        "update": busiest.update,
        "stragglers": straggling,
    }
    parts["host"] += profile.step * profile.adds
    if (told := sum(parts.values())) > seconds:  # of ranks that wait less because others wait
        parts = {name: part * seconds / told for name, part in parts.items()}
    parts["waiting"] = max(seconds - sum(parts.values()), 0.0)
    assert plan.batch.global_batch is not None
    tokens = plan.batch.global_batch * plan.sequence
    precision = plan.method.precision
    dense = peak(cluster.device, NAMES.get(precision, precision)) * plan.layout.world
    model = conventions(plan.shape, plan.sequence, marks=plan.marks).model * tokens
    rates = tokens / seconds, model / seconds / dense
    computing = sum(_computing(rank, times) for rank in ranks)
    bubble = 1 - min(computing / seconds / len(ranks), 1.0)
    return StepTime(seconds, timeline, parts, *rates, profile, bubble)


def _computing(rank: _Rank, times: int) -> float:
    """Seconds in which a rank computes, without what its actions wait for, or exchange."""
    parts = (sum(one.products) + one.touch + one.touched + one.again for one in rank.parts)
    return times * sum(parts) + rank.update
