"""The timeline of a step: when every rank does what, from the programs and given durations.

    rank 0   compute       |0F0|0F1|0F2|         |  0B0  | ···
             to 1              |0F0|0F1|0F2|
    rank 1   compute               |1F0|1F1|1F2| ···
             collectives                      |reduce 1B2|

The spans of one lane run one after the other; different lanes run in parallel.

A schedule that is not lowered is timed with messages that take no time, as in the papers' drawings.
A lowered schedule is timed with all its communication: a message starts when both ranks have posted
it and the previous message has arrived, and a rank idles only at a `wait`. Links are full-duplex in
this model; the order in which ranks post is that of the strictest transport
(`plan.schedule.messages`).

Events need not be sorted by time: every time is the maximum of times that are known before. So
ranks may be simulated in any order, each until it waits for an event whose time is not known yet.
The simulation is linear in the number of instructions.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

from howdah.plan.recording import COMPUTES, Span
from howdah.plan.schedule.actions import Action, Schedule
from howdah.plan.schedule.clock import Deadlock, clock, units
from howdah.plan.schedule.lowering import VERBS, Instruction, Lowered, Verb


@dataclass(frozen=True)
class Timeline:
    """The result of a simulation or a measurement of one step.

    spans[rank] lists, in order of their start, all computation of the rank and all communication
    that took any time. A message is listed with its sender.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """Seconds of the whole step."""
        return max((span.end for spans in self.spans for span in spans), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the seconds in which it computes."""
        return tuple(
            sum(span.end - span.start for span in spans if span.instruction.verb in COMPUTES)
            for spans in self.spans
        )

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they do not compute: idle / (idle + busy)."""
        time = len(self.spans) * self.makespan
        return 1 - sum(self.busy) / time if time else 0.0

    @property
    def bubble_to_ideal(self) -> float:
        """The papers' bubble: idle / busy, such as (p - 1)/m for GPipe and 1F1B."""
        return len(self.spans) * self.makespan / sum(self.busy) - 1 if sum(self.busy) else 0.0


def at_once(_: Instruction) -> float:
    """A `transfer` for `simulate`: communication takes no time."""
    return 0.0


def simulate(
    work: Schedule | Lowered,
    seconds: Callable[[Action], float] = units,
    transfer: Callable[[Instruction], float] = at_once,
) -> Timeline:
    """The timeline of a step.

    work      the schedule, or its lowered form
    seconds   duration of an action, updates included
    transfer  duration of a send, reduce or tie; not used for a schedule that is not lowered

    Raises Deadlock, which names what each stuck rank waits for, if the step cannot finish.
    """
    if isinstance(work, Lowered):
        return simulate_lowered(work, lambda one, _: seconds(one), lambda one, _: transfer(one))
    runs = clock(work, seconds)
    return Timeline(
        work,
        tuple(
            tuple(
                Span(Instruction(VERBS[action.kind], action), *runs[action]) for action in program
            )
            for program in work.programs
        ),
    )


def simulate_lowered(
    lowered: Lowered,
    seconds: Callable[[Action, float], float],
    transfer: Callable[[Instruction, float], float],
) -> Timeline:
    """The timeline of a step whose durations depend on when things start.

    Both functions are called with the moment of the start, once for each start, and for each rank
    in the order of its program. Raises Deadlock as `simulate` does.
    """
    return Timeline(lowered.schedule, _Simulation(lowered, seconds, transfer).run())


class _Simulation:
    """The state of a simulation: how far each rank is, and the times known so far."""

    def __init__(
        self,
        lowered: Lowered,
        seconds: Callable[[Action, float], float],
        transfer: Callable[[Instruction, float], float],
    ) -> None:
        self.programs, self.seconds, self.transfer = lowered.programs, seconds, transfer
        ranks = len(self.programs)
        self.at, self.now = [0] * ranks, [0.0] * ranks
        self.spans: list[list[Span]] = [[] for _ in range(ranks)]
        self.free: dict[Hashable, float] = defaultdict(float)  # lane → time from which it is free
        self.posted: dict[Hashable, tuple[Instruction, float]] = {}  # by the first rank
        self.over: dict[Hashable, float] = {}  # communication → its end
        self.asleep: dict[Hashable, list[int]] = {}  # communication → ranks that wait for it

    def run(self) -> tuple[tuple[Span, ...], ...]:
        ready = list(range(len(self.programs)))
        while ready:
            rank = ready.pop()
            ready += self._advance(rank)
        standing = enumerate(zip(self.programs, self.at, strict=True))
        stuck = [f"rank {r} waits at '{p[at]}'" for r, (p, at) in standing if at < len(p)]
        if stuck:
            raise Deadlock("; ".join(stuck))
        return tuple(tuple(sorted(spans, key=lambda span: span.start)) for spans in self.spans)

    def _advance(self, rank: int) -> list[int]:
        """Runs a rank until it waits for an unknown time. Returns the ranks that this wakes up."""
        program, at, now = self.programs[rank], self.at[rank], self.now[rank]
        woken: list[int] = []
        while at < len(program):
            instruction = program[at]
            verb = instruction.verb
            if verb in COMPUTES:
                start, now = now, now + self.seconds(instruction.action, now)
                self.spans[rank].append(Span(instruction, start, now))
            elif verb is Verb.WAIT:
                key = _key(rank, instruction)
                if key not in self.over:
                    self.asleep.setdefault(key, []).append(rank)
                    break
                now = max(now, self.over[key])
            elif verb is not Verb.RELEASE:
                woken += self._start(rank, instruction, now)
            at += 1
        self.at[rank], self.now[rank] = at, now
        return woken

    def _start(self, rank: int, instruction: Instruction, now: float) -> list[int]:
        """Starts communication beside computation. Returns the ranks that waited for its end.

        A message or tie starts when both ranks have posted it. A message uses a lane of its
        sender, a tie a lane of each rank. A tie of more than two ranks waits for no other.
        """
        key = _key(rank, instruction)
        ends = [(rank, instruction)]
        if instruction.peer is not None:
            if key not in self.posted:
                self.posted[key] = instruction, now
                return []
            theirs, posted = self.posted[key]
            ends.append((instruction.peer, theirs))
            now = max(now, posted)
        lanes = [
            (owner, (owner, one.peer if one.verb is Verb.SEND else owner), one)
            for owner, one in ends
            if one.verb is not Verb.RECEIVE
        ]
        start = max([now, *(self.free[lane] for _, lane, _ in lanes)])
        end = start + self.transfer(lanes[0][2], start)
        for owner, lane, one in lanes:
            self.free[lane] = end
            if end > start:
                self.spans[owner].append(Span(one, start, end))
        self.over[key] = end
        return self.asleep.pop(key, [])


def _key(rank: int, instruction: Instruction) -> Hashable:
    """The key of a communication, equal on all its ranks; of a message, the action that made it."""
    verb = instruction.started or instruction.verb
    if verb in (Verb.SEND, Verb.RECEIVE):
        return instruction.action
    if instruction.peer is None:
        return verb, instruction.action
    return verb, min(rank, instruction.peer), max(rank, instruction.peer)
