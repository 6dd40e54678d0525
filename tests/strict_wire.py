"""The checker of lowered programs: do they finish on the strictest wire there is?

On that wire a send ends only when its receive has been posted too (rendezvous: nothing is
buffered), and what two ranks post to each other, both directions in one queue, is matched by
position. NCCL is such a wire. What finishes here finishes on any other.

    rank 0   send a to 1    wait send a       each waits for a receive that the other
    rank 1   send b to 0    wait send b       would post only afterwards: stuck

Two passes. First each list by itself: nothing is used before it is there, what was started is
waited for, no gradient misses its sum. Then all lists together, until nothing moves. A rank
waits for one thing at a time, and what was posted stays posted, so how far all of them come
does not depend on which goes first.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from howdah.plan.schedule.actions import Kind, Schedule, Value, makes, needs
from howdah.plan.schedule.clock import named
from howdah.plan.schedule.lowering import Instruction, Lowered, Verb

STARTS = (Verb.SEND, Verb.RECEIVE, Verb.REDUCE, Verb.TIE)


def check(lowered: Lowered) -> list[str]:
    """Everything wrong with the programs, as sentences; empty when they are sound."""
    alone = [
        f"rank {rank} {sentence}"
        for rank, program in enumerate(lowered.programs)
        for sentence in _alone(rank, program, lowered.schedule)
    ]
    return alone + _Wire(lowered.programs).problems()


def draw_stuck(lowered: Lowered) -> str:
    """Where everyone stands when nothing moves any more; empty when all ranks finish.

    rank 0   0F0 | wait receive 1B0 from 1
    rank 1       | wait receive 0F1 from 0
    0 waits for 1, 1 waits for 0
    """
    wire = _Wire(lowered.programs)
    stuck = wire.stuck()
    if not stuck:
        return ""
    rows = []
    for rank, program in enumerate(lowered.programs):
        done = (str(i.action) for i in program[: wire.at[rank]] if i.verb is Verb.COMPUTE)
        rows.append((" ".join(done), str(stuck.get(rank, "done"))))
    width = max(len(done) for done, _ in rows)
    lines = [f"rank {r}   {done:{width}} | {next_}" for r, (done, next_) in enumerate(rows)]
    waits = (f"{rank} waits for {instruction.peer}" for rank, instruction in stuck.items())
    return "\n".join([*lines, ", ".join(waits)])


# -- each list by itself -------------------------------------------------------


@dataclass
class _Hands:
    """What a rank has in its hands at one moment of its program."""

    there: set[Value] = field(default_factory=set)
    started: set[Instruction] = field(default_factory=set)  # and not waited for
    unsummed: set[int] = field(default_factory=set)  # stages, and so below
    unused: set[int] = field(default_factory=set)  # gradients that no update has taken


def _alone(rank: int, program: Sequence[Instruction], schedule: Schedule) -> Iterator[str]:
    planned = [a for a in schedule.programs[rank] if a.kind is not Kind.UPDATE]
    computed = [i.action for i in program if i.verb is Verb.COMPUTE]
    for plan, action in zip_longest(planned, computed):
        if plan != action:
            yield f"computes {action or 'nothing'} where the schedule says {plan or 'nothing'}"
            break
    hands = _Hands()
    for number, instruction in enumerate(program):
        for wrong in _wrong(instruction, hands, schedule):
            yield f"at {number}, '{instruction}': {wrong}"
        _carry_out(instruction, hands)
    yield from (f"never waits for '{started}'" for started in sorted(map(str, hands.started)))
    yield from (f"never updates stage {stage}" for stage in sorted(hands.unused))


def _wrong(instruction: Instruction, hands: _Hands, schedule: Schedule) -> Iterator[str]:
    """What forbids the instruction now."""
    verb, action = instruction.verb, instruction.action
    needed = needs(action, schedule) if verb is Verb.COMPUTE else []
    needed += [makes(action)] if verb is Verb.SEND else []
    yield from (f"{named(value)} is not there" for value in needed if value not in hands.there)
    if verb is Verb.WAIT and _begun(instruction) not in hands.started:
        yield "nothing like it was started"
    if verb in STARTS and instruction in hands.started:
        yield "it was started before and not waited for"
    if verb in (Verb.TIE, Verb.UPDATE):
        sums = {i.action.stage for i in hands.started if i.verb in (Verb.REDUCE, Verb.TIE)}
        if action.stage in hands.unsummed | sums:
            yield f"the gradients of stage {action.stage} are not summed"


def _carry_out(instruction: Instruction, hands: _Hands) -> None:
    verb, action = instruction.verb, instruction.action
    stage = action.stage
    if verb in STARTS:
        hands.started.add(instruction)
    if verb is Verb.WAIT:
        hands.started.discard(_begun(instruction))
    if verb is Verb.COMPUTE or instruction.started is Verb.RECEIVE:
        hands.there.add(makes(action))
    if verb is Verb.COMPUTE and action.kind in (Kind.BACKWARD, Kind.WEIGHT):
        hands.unsummed.add(stage)
        hands.unused.add(stage)
    if verb is Verb.REDUCE:
        hands.unsummed.discard(stage)
    if verb is Verb.UPDATE:
        hands.unused.discard(stage)


def _begun(wait: Instruction) -> Instruction:
    """The instruction that a wait ends."""
    assert wait.started is not None
    return Instruction(wait.started, wait.action, wait.peer)


# -- all lists together --------------------------------------------------------


class _Wire:
    """All programs, run on the strict wire until nothing moves.

    at[rank] is the number of the instruction before which the rank stands.
    """

    def __init__(self, programs: Sequence[Sequence[Instruction]]) -> None:
        self.programs, self.at = programs, [0] * len(programs)
        self._posted: dict[tuple[int, int], list[Instruction]] = defaultdict(list)
        self._place: dict[tuple[int, Instruction], int] = {}  # in the queue of the rank that posted
        self._ended: dict[tuple[int, int], int] = defaultdict(int)  # messages of (low, high) rank
        while sum(self._advance(rank) for rank in range(len(programs))):
            pass

    def stuck(self) -> dict[int, Instruction]:
        """The ranks that have not finished, and what each waits for."""
        standing = enumerate(zip(self.programs, self.at, strict=True))
        return {rank: program[at] for rank, (program, at) in standing if at < len(program)}

    def problems(self) -> list[str]:
        """First the pairs that disagree, then the ranks that are stuck."""
        sentences = []
        for low, high in sorted(pair for pair in self._posted if pair[0] < pair[1]):
            ended = self._ended[low, high]
            mine, theirs = self._posted[low, high][ended:], self._posted[high, low][ended:]
            if mine and theirs:
                sentences.append(
                    f"ranks {low} and {high} disagree on message {ended} between them: "
                    f"rank {low} posts '{mine[0]}', rank {high} '{theirs[0]}'"
                )
        stuck = self.stuck()
        for rank, wait in stuck.items():
            other = f"is at '{stuck[wait.peer]}'" if wait.peer in stuck else "has finished"
            sentences.append(
                f"rank {rank} is stuck at {self.at[rank]}, '{wait}': rank {wait.peer} {other}"
            )
        return sentences

    def _advance(self, rank: int) -> bool:
        """Runs a rank until it has to wait; whether it came any further."""
        before, program = self.at[rank], self.programs[rank]
        while self.at[rank] < len(program) and self._passes(rank, program[self.at[rank]]):
            instruction = program[self.at[rank]]
            if instruction.peer is not None and instruction.verb is not Verb.WAIT:
                queue = self._posted[rank, instruction.peer]
                self._place[rank, instruction] = len(queue)
                queue.append(instruction)
            self.at[rank] += 1
        return self.at[rank] > before

    def _passes(self, rank: int, instruction: Instruction) -> bool:
        """Whether the rank need not wait here; only a wait for a message can hold it."""
        peer = instruction.peer
        if peer is None or instruction.verb is not Verb.WAIT:
            return True
        pair = min(rank, peer), max(rank, peer)
        mine, theirs = self._posted[rank, peer], self._posted[peer, rank]
        while self._ended[pair] < min(len(mine), len(theirs)) and _match(
            mine[self._ended[pair]], theirs[self._ended[pair]]
        ):
            self._ended[pair] += 1
        return self._place.get((rank, _begun(instruction)), len(mine)) < self._ended[pair]


def _match(mine: Instruction, theirs: Instruction) -> bool:
    """Whether two posts are the two ends of one message."""
    if Verb.TIE in (mine.verb, theirs.verb):
        return mine.verb is theirs.verb
    return mine.verb is not theirs.verb and mine.action == theirs.action
