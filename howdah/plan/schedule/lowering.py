"""Lowering: from what each rank computes to everything it does, in order.

A schedule lists computation alone. Its lowering adds what surrounds it: messages between
stages (`messages`), gradients that are summed over the replicas, updates. The executor runs the
lowered lists, and the simulator times them; tests hold them to the strictest wire there is.

    1f1b, rank 1 of 3, as it begins     what takes time is started early and waited for late, so
        receive 0F0 from 0              that it hides behind computation:
        receive 0F1 from 0
        wait receive 0F0 from 0             send      as soon as there is something to send
        compute 1F0                         receive   one action before it is used
        send 1F0 to 2                       reduce    at a stage's last gradient; waited for
        wait receive 0F1 from 0                       before the update
        compute 1F1
        send 1F1 to 2

Weights that are shared out (ZeRO-3) are gathered inside of actions, unit by unit, in one order on
all replicas (`plan.gather_order`). An update includes what follows from it: clipping, and sending
the new weights round where each replica updates its share (ZeRO-1 and 2).
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.plan.schedule.actions import Action, Kind, Schedule, rank_of_stage
from howdah.plan.schedule.messages import Message, message_order, places


class Verb(StrEnum):
    """What a rank is told to do. `send` to `tie` only start it; a `wait` ends it."""

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"  # a stage's gradients, summed over the replicas
    TIE = "tie"  # a tied embedding's gradients, summed over its two stages
    WAIT = "wait"
    RELEASE = "release"  # an old version of the weights
    UPDATE = "update"


class Instruction(NamedTuple):
    """One entry of a lowered program.

    action   what is computed; of a message, what made it; else what it is done for or after
    peer     the other rank of a message or a tie
    version  of the weights that is used, made or released; None where there is a flush
    started  the verb that a wait ends
    """

    verb: Verb
    action: Action
    peer: int | None = None
    version: int | None = None
    started: Verb | None = None

    def __str__(self) -> str:
        toward = {Verb.SEND: "to", Verb.RECEIVE: "from"}.get(self.started or self.verb, "with")
        words = [self.verb, *([self.started] if self.started else []), str(self.action)]
        words += [] if self.peer is None else [toward, str(self.peer)]
        return " ".join(words if self.version is None else [*words, f"v{self.version}"])


VERBS = {kind: Verb.UPDATE if kind is Kind.UPDATE else Verb.COMPUTE for kind in Kind}


class Lowered(NamedTuple):
    """programs[rank] is everything that the rank does in one step of `schedule`, in order."""

    schedule: Schedule
    programs: tuple[tuple[Instruction, ...], ...]


class Slot(NamedTuple):
    """What stands around one action: what is started and waited for before it; what follows."""

    starts: list[Instruction]
    waits: list[Instruction]
    follows: list[Instruction]


def lower(
    schedule: Schedule,
    *,
    reduce_each: bool = False,
    tied: tuple[int, int] | None = None,
    versions: Mapping[Action, int] | None = None,
) -> Lowered:
    """Everything that each rank does in one step.

    reduce_each  gradients are summed over the replicas after every micro-batch, not once
    tied         the two stages that hold one embedding
    versions     of the weights that each action uses, where there is no flush

    Raises Deadlock if the schedule cannot finish.
    """
    messages = message_order(schedule)
    peers = _tie_peers(schedule, tied) if tied else {}
    programs = []
    for rank, program in enumerate(schedule.programs):
        slots = [Slot([], [], []) for _ in range(len(program) + 1)]  # the last: end of the step
        for pair, queue in messages.items():
            if rank in pair:
                _messages(rank, program, queue, slots)
        flushed = _gradients(program, slots, reduce_each=reduce_each)
        updates = [Action(Kind.UPDATE, stage, schedule.micros - 1) for stage in flushed]
        for update in updates:
            if update.stage in peers:
                follows = slots[-1].follows
                _start(Instruction(Verb.TIE, update, peers[update.stage]), follows, follows)
        slots[-1].follows.extend(Instruction(Verb.UPDATE, update) for update in updates)
        computed = [Instruction(VERBS[action.kind], action) for action in program]
        if versions:
            computed = list(_versioned(program, versions, slots))
        programs.append(tuple(_merge(computed, slots)))
    return Lowered(schedule, tuple(programs))


def _start(started: Instruction, here: list[Instruction], waits: list[Instruction]) -> None:
    """Adds what is started here, and there the wait that ends it."""
    here.append(started)
    waits.append(Instruction(Verb.WAIT, started.action, started.peer, started=started.verb))


def _messages(
    rank: int, program: Sequence[Action], queue: Sequence[Message], slots: list[Slot]
) -> None:
    for message, start, wait in places(rank, program, queue):
        if message.source == rank:
            send = Instruction(Verb.SEND, message.action, message.target)
            _start(send, slots[start].follows, slots[wait].waits)
        else:
            receive = Instruction(Verb.RECEIVE, message.action, message.source)
            _start(receive, slots[start].starts, slots[wait].waits)


def _gradients(program: Sequence[Action], slots: list[Slot], *, reduce_each: bool) -> list[int]:
    """Sums each stage's gradients over the replicas, before the update that takes them.

    Returns the stages whose last gradients no update in the program takes: those of the flush.
    """
    taken = []  # of each update: its number, and those of the actions that complete its gradients
    done: dict[int, dict[int, int]] = defaultdict(dict)  # stage → micro-batch → last backward
    for number, action in enumerate(program):
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            done[action.stage][action.micro] = number
        elif action.kind is Kind.UPDATE:
            taken.append((number, sorted(done.pop(action.stage).values())))
    taken += [(len(program), sorted(micros.values())) for micros in done.values()]
    for update, lasts in taken:
        for last in lasts if reduce_each else lasts[-1:]:
            reduce = Instruction(Verb.REDUCE, program[last])
            _start(reduce, slots[last].follows, slots[update].waits)
    return sorted(done)


def _tie_peers(schedule: Schedule, tied: tuple[int, int]) -> dict[int, int]:
    """With which rank each tied stage sums its embedding's gradients; none if with itself."""
    if any(action.kind is Kind.UPDATE for program in schedule.programs for action in program):
        raise UserError(
            f"schedule {schedule.name} updates each stage by itself, so stages {tied[0]} and "
            f"{tied[1]} cannot share an embedding; untie it, or use a schedule with a flush"
        )
    ranks = [rank_of_stage(schedule)[stage] for stage in tied]
    return dict(zip(tied, reversed(ranks), strict=True)) if ranks[0] != ranks[1] else {}


def _versioned(
    program: Sequence[Action], versions: Mapping[Action, int], slots: Sequence[Slot]
) -> Iterator[Instruction]:
    """The program with the version of the weights that each action uses or makes.

    A version is released after its last use, if an update has replaced it by then.
    """
    latest: Counter[int] = Counter()
    replaced: dict[tuple[int, int], int] = {}  # stage, version → number of its last use
    for number, action in enumerate(program):
        if action.kind is Kind.UPDATE:
            latest[action.stage] += 1
            version = latest[action.stage]
        else:
            version = versions[action]
            if version < latest[action.stage]:
                replaced[action.stage, version] = number
        yield Instruction(VERBS[action.kind], action, version=version)
    for (_, version), number in replaced.items():
        release = Instruction(Verb.RELEASE, program[number], version=version)
        slots[number].follows.append(release)


def _merge(computed: Sequence[Instruction], slots: Sequence[Slot]) -> Iterator[Instruction]:
    for slot, instruction in zip(slots, [*computed, None], strict=True):
        yield from slot.starts
        yield from slot.waits
        if instruction is not None:
            yield instruction
        yield from slot.follows
