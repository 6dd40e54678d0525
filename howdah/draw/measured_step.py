"""A measured step beside the simulated one: the same actions, with the seconds that they took.

    measured    rank 0   |0F0|0F1|     |  0B0  |   |  0B1  |     times from the ranks' clocks
                rank 1      :|1F0|  1B0  |1F1|  1B1  |
    simulated   rank 0   |0F0|0F1|   |  0B0  | |  0B1  |         no delays: an action takes the
                rank 1       |1F0|  1B0  |1F1|  1B1  |           median of its kind and stage

Both have the same program and the same costs. If the measured step is longer, the program does not
explain the difference. Its causes are work between actions, messages that arrived late, and actions
that took longer than the median while other ranks waited. Waits for moves from and to homes
(`parallel/homes.py`) and for other ranks are inside of actions; they are told apart. So is how much
of the calls of a group ran beside computing, which is what overlap saves.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median, median_low
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.draw.perfetto import Part, trace_all
from howdah.draw.schedule_svg import draw_beside
from howdah.plan.homes import AXIS
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import program_of
from howdah.plan.recording import (
    IDLE,
    WAIT,
    Call,
    RankTrace,
    Span,
    StepTrace,
    Times,
    both,
    common,
    seconds_of,
    times_of,
)
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import Instruction, Verb
from howdah.sim.timeline import Timeline, simulate

DRAWN = 4  # most pipelines in a drawing
LONGEST = 3  # waits that are named
TWO_ENDS = (Verb.SEND, Verb.TIE)

Cost = Callable[[Verb, Action], float]


class StepComparison(NamedTuple):
    """One step of one pipeline, measured and simulated.

    number     number of the step
    ranks      the ranks of the pipeline, in the order of their stages
    measured   timeline of the recorded step
    simulated  timeline of the same program with the typical seconds of each action
    calls      for each rank, the recorded calls of its groups
    """

    number: int
    ranks: tuple[int, ...]
    measured: Timeline
    simulated: Timeline
    calls: tuple[tuple[Call, ...], ...]


def compare_step(plan: Plan, traces: Sequence[RankTrace]) -> list[StepComparison]:
    """Compares the measured step of median length with its simulation, for every pipeline.

    traces  the recorded steps of every rank, in the order of ranks

    Only steps with the largest number of micro-batches count. Raises UserError if the traces do
    not fit the plan.
    """
    sizes = {step.number: _micros(step) for step in traces[0].steps}
    micros = max(sizes.values())  # the batch may grow during the run
    steps = {n: common(traces, n) for n, size in sizes.items() if size == micros}
    ends = {n: max(s.end for step in step for s in step.spans) for n, step in steps.items()}
    chosen = min(ends, key=lambda n: abs(ends[n] - median_low(ends.values())))
    pipelines = sorted({tuple(axis(plan.layout, "pp").group(rank)) for rank in range(len(traces))})
    return [_one(plan, steps, ranks, chosen, micros) for ranks in pipelines]


def _micros(step: StepTrace) -> int:
    return 1 + max(span.instruction.action.micro for span in step.spans)


def _one(
    plan: Plan, steps: dict[int, list[StepTrace]], ranks: tuple[int, ...], chosen: int, micros: int
) -> StepComparison:
    program = program_of(plan, micros)
    traces = [steps[chosen][rank] for rank in ranks]
    where = plan.stages.where
    for rank, told, step in zip(ranks, program.programs, traces, strict=True):
        if not _follows(step, told):
            raise UserError(
                f"step {chosen} of rank {rank} is not one of {plan.layout} with {micros} "
                "micro-batches: what was measured is of another run, or damaged; train on to have "
                "it written again"
            )
    spans = tuple(
        tuple(_in_lanes(step.spans, first=where.index(index))) for index, step in enumerate(traces)
    )
    cost = _costs([[step[rank] for rank in ranks] for step in steps.values()])

    def seconds(action: Action) -> float:
        if action.kind is not Kind.UPDATE:
            return cost(Verb.COMPUTE, action)
        index = where[action.stage]  # a rank updates all of its stages at once
        return cost(Verb.UPDATE, action._replace(stage=index)) / where.count(index)

    def transfer(instruction: Instruction) -> float:
        return cost(instruction.verb, instruction.action)

    simulated = simulate(program, seconds, transfer)
    calls = tuple(tuple(step.calls) for step in traces)
    return StepComparison(chosen, ranks, Timeline(program.schedule, spans), simulated, calls)


def _follows(step: StepTrace, program: Sequence[Instruction]) -> bool:
    """Whether a rank computed all that its program contains, and nothing else."""
    told = {instruction[:3] for instruction in program}
    did = {s.instruction[:3] for s in step.spans if s.instruction.verb is not Verb.UPDATE}
    return did <= told and all(one in did for one in told if one[0] is Verb.COMPUTE)


def _in_lanes(spans: Sequence[Span], first: int) -> Iterator[Span]:
    """The spans in order of their start, without overlap in a lane: a message that is posted while
    the previous one still travels starts after it. A rank's update is drawn as that of its `first`
    stage.
    """
    free: dict[str, float] = defaultdict(float)
    for span in sorted(spans, key=lambda span: span.start):
        told = span.instruction
        if told.verb is Verb.UPDATE:
            told = told._replace(action=told.action._replace(stage=first))
        start = min(max(span.start, free[span.lane]), span.end)
        free[span.lane] = span.end
        yield Span(told, start, span.end)


def _costs(steps: Sequence[Sequence[StepTrace]]) -> Cost:
    """Typical seconds by verb, kind and stage (of updates, by pipeline rank).

    They are the median over the steps; for communication between two ranks the minimum, because
    most of its time is waiting for the other rank.
    """
    found: dict[tuple[Verb, Kind, int], list[float]] = defaultdict(list)
    for ranks in steps:
        for index, step in enumerate(ranks):
            for (verb, action, *_), start, end in step.spans:
                stage = index if verb is Verb.UPDATE else action.stage
                found[verb, action.kind, stage].append(end - start)
    costs = {key: (min if key[0] in TWO_ENDS else median)(all) for key, all in found.items()}
    return lambda verb, action: costs.get((verb, action.kind, action.stage), 0.0)


def to_svg(found: Sequence[StepComparison]) -> str:
    """The SVG of the first DRAWN pipelines: each as measured, and below it as simulated."""
    parts = []
    for one in found[:DRAWN]:
        ranks = "ranks" if len(one.ranks) > 1 else "rank"
        name = f"step {one.number}, {ranks} {', '.join(map(str, one.ranks))}"
        parts += [(f"{name}, measured", one.measured), (f"{name}, simulated", one.simulated)]
    return draw_beside(parts)


def to_perfetto(found: Sequence[StepComparison]) -> str:
    """The JSON for ui.perfetto.dev: all pipelines, measured and simulated, with measured calls."""
    measured = [Part(one.measured, [f"rank {r}" for r in one.ranks], one.calls) for one in found]
    simulated = [Part(one.simulated, [f"rank {r}, simulated" for r in one.ranks]) for one in found]
    return trace_all([*measured, *simulated])


def report(found: Sequence[StepComparison], layout: str, *, algorithms: str = "") -> Iterator[str]:
    """The comparison as lines of text.

    algorithms  those that were chosen for collectives
    """
    yield f"layout      {layout}, step {found[0].number}"
    if algorithms:
        yield f"algorithms  {algorithms}"
    yield f"{'rank':<12s}{'computes':>12s}{'waits':>12s}{'simulated':>12s}"
    for one in found:
        each = zip(one.ranks, one.measured.busy, one.simulated.busy, away(one), strict=True)
        for rank, spent, ideal, lost in each:
            busy = spent - lost
            waits = one.measured.makespan - busy, one.simulated.makespan - ideal
            yield f"{rank:<12d}{busy:11.4f}s{waits[0]:11.4f}s{waits[1]:11.4f}s"
    slowest = max(found, key=lambda one: one.measured.makespan)
    took, ideal = slowest.measured.makespan, slowest.simulated.makespan
    yield (
        f"step        {took:.4f} s measured, {ideal:.4f} s simulated from the same actions: "
        f"{took / ideal - 1:+.1%}"
    )
    measured, simulated = [one.measured for one in found], [one.simulated for one in found]
    yield f"bubble      {_bubble(measured):.1%} measured, {_bubble(simulated):.1%} simulated"
    called, beside = overlap(found[0])
    if called:
        share = f"{beside / called:.1%} of the {called:.4f} s in which there are calls"
        yield f"overlap     {share}, rank {found[0].ranks[0]} computes"
    yield from _calls(found[0].calls[0])
    for one in found:
        for rank, calls in zip(one.ranks, one.calls, strict=True):
            yield from _homes(rank, calls)


def _bubble(pipelines: Sequence[Timeline]) -> float:
    """The fraction of the time of all pipelines' ranks in which they do not compute."""
    time = sum(len(one.spans) * one.makespan for one in pipelines)
    return 1 - sum(sum(one.busy) for one in pipelines) / time if time else 0.0


def away(one: StepComparison) -> list[float]:
    """For each rank, the seconds of its computations in which it waited for a home or a rank."""
    return [
        seconds_of(both(_computing(spans), times_of(call for call in calls if _waits(call))))
        for spans, calls in zip(one.measured.spans, one.calls, strict=True)
    ]


def overlap(one: StepComparison) -> tuple[float, float]:
    """Of the first rank, the seconds in which calls send, and of these those that it computes."""
    spans, calls = one.measured.spans[0], one.calls[0]
    called = times_of(call for call in calls if call.sent and call.axis != AXIS)
    beside = both(called, _computing(spans))
    return seconds_of(called), seconds_of(beside) - seconds_of(
        both(beside, times_of(call for call in calls if _waits(call)))
    )


def _computing(spans: Sequence[Span]) -> Times:
    return times_of(span for span in spans if span.lane == "compute")


def _waits(call: Call) -> bool:
    return call.operation.startswith((WAIT, IDLE))


def exposed(calls: Sequence[Call]) -> tuple[float, float]:
    """Of the calls of a rank, the seconds of waits for moves from and to homes, and those in which
    there are moves: of each direction those in which at least one is under way.
    """
    waited, moved, free = 0.0, 0.0, dict[str, float]()
    for call in sorted((call for call in calls if call.axis == AXIS), key=lambda one: one.start):
        way = call.operation.split()[0]
        if _waits(call):
            waited += call.end - call.start
        else:
            begins = max(call.start, free.get(way, call.start))
            moved += max(call.end - begins, 0.0)
            free[way] = max(begins, call.end)
    return waited, moved


def _homes(rank: int, calls: Sequence[Call]) -> Iterator[str]:
    """What a rank waited for of its moves from and to homes; nothing if there are none."""
    waited, moved = exposed(calls)
    if not moved:
        return
    each: dict[str, float] = defaultdict(float)
    for call in (one for one in calls if one.axis == AXIS and _waits(one)):
        each[call.operation.removeprefix(WAIT).strip()] += call.end - call.start
    longest = sorted(each.items(), key=lambda one: -one[1])[:LONGEST]
    told = ", ".join(f"{what} {seconds:.4f} s" for what, seconds in longest)
    yield (
        f"{AXIS:<12s}rank {rank} waits {waited:.4f} s for moves of {moved:.4f} s: "
        f"{waited / moved:.1%} exposed" + (f"; for {told}" if told else "")
    )


def _calls(calls: Sequence[Call]) -> Iterator[str]:
    """A line for each axis and operation of the first rank's calls, of all units together."""
    found: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        if not _waits(call):
            found[call.axis, call.operation.partition(" of ")[0]].append(call)
    for (name, operation), each in sorted(found.items()):
        sent, seconds = sum(call.sent for call in each), sum(call.end - call.start for call in each)
        yield (
            f"{name:<12s}{operation} {len(each)} times by rank 0: {sent / 1e6:.3f} MB, "
            f"{seconds:.4f} s"
        )
