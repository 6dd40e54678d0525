"""Lowering: add communication and updates to the computations that a schedule lists.

A schedule lists computation alone. Its lowered form also lists the messages between stages
(`messages`), the reductions of gradients over the replicas, and the updates. The executor runs the
lowered lists, and the simulator times them. Tests run them under the strictest rules for matching
messages that a transport may have.

    1f1b, rank 1 of 3, as it begins     Communication starts early, and is waited for late, so
        receive 0F0 from 0              that it runs while the rank computes:
        receive 0F1 from 0
        wait receive 0F0 from 0             send      as soon as its value has been made
        compute 1F0                         receive   one action before its value is used
        send 1F0 to 2                       reduce    after a stage's last gradient; waited for
        wait receive 0F1 from 0                       before the update
        compute 1F1
        send 1F1 to 2

With ZeRO-3, the all-gathers of weights are not listed: they run inside the actions, unit by unit,
in the same order on all replicas (`plan.gather_order`). An update includes its consequences:
gradient clipping, and with ZeRO-1 and 2 the all-gather of the updated weights.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from howdah.base.errors import UserError
from howdah.plan.schedule.actions import Action, Kind, Schedule, rank_of_stage
from howdah.plan.schedule.messages import Message, message_order, message_times


class Verb(StrEnum):
    """What an instruction does.

    SEND, RECEIVE, REDUCE and TIE only start their communication; a later WAIT completes it.
    """

    COMPUTE = "compute"
    SEND = "send"
    RECEIVE = "receive"
    REDUCE = "reduce"  # sum a stage's gradients over the replicas
    TIE = "tie"  # sum the gradients of weights that stages share, such as a tied embedding
    WAIT = "wait"
    RELEASE = "release"  # free an old version of the weights
    UPDATE = "update"


class Instruction(NamedTuple):
    """One entry of a lowered program.

    verb     what the instruction does
    action   COMPUTE and UPDATE: the action itself; messages: the action that makes the value;
             other verbs: the action for which, or after which, the instruction runs
    peer     the other rank of a message or a tie; of a tie of more ranks None
    version  version of the weights that is used, made or released; None in schedules with a flush
    started  WAIT: the verb that started the communication
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
    """A lowered schedule: programs[rank] is everything that the rank does in one step, in order."""

    schedule: Schedule
    programs: tuple[tuple[Instruction, ...], ...]


class Slot(NamedTuple):
    """The instructions around one action: starts and waits before it, and those that follow it."""

    starts: list[Instruction]
    waits: list[Instruction]
    follows: list[Instruction]


def lower(
    schedule: Schedule,
    *,
    reduce_each: bool = False,
    tied: Sequence[int] | None = None,
    versions: Mapping[Action, int] | None = None,
) -> Lowered:
    """The lowered form of `schedule`: everything that each rank does in one step.

    reduce_each  whether gradients are summed over the replicas after every micro-batch, not once
    tied         stages of different ranks that share weights, such as a tied embedding; None: no
                 ranks do
    versions     the version of the weights that each action uses, in a schedule without a flush

    Raises Deadlock if the schedule cannot finish, and UserError for `tied` in a schedule without
    a flush.
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
    """Appends the instruction `started` to `here`, and the wait that completes it to `waits`."""
    here.append(started)
    waits.append(Instruction(Verb.WAIT, started.action, started.peer, started=started.verb))


def _messages(
    rank: int, program: Sequence[Action], queue: Sequence[Message], slots: list[Slot]
) -> None:
    for message, start, wait in message_times(rank, program, queue):
        if message.source == rank:
            send = Instruction(Verb.SEND, message.action, message.target)
            _start(send, slots[start].follows, slots[wait].waits)
        else:
            receive = Instruction(Verb.RECEIVE, message.action, message.source)
            _start(receive, slots[start].starts, slots[wait].waits)


def _gradients(program: Sequence[Action], slots: list[Slot], *, reduce_each: bool) -> list[int]:
    """Adds the reductions of each stage's gradients, which end before the update that uses them.

    Returns the stages whose last gradients are used by no update in the program: they need an
    update at the flush.
    """
    taken = []  # (index of an update, indices of the actions that complete its gradients)
    done: dict[int, dict[int, int]] = defaultdict(dict)  # stage → micro-batch → backward's index
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


def _tie_peers(schedule: Schedule, tied: Sequence[int]) -> dict[int, int | None]:
    """For each tied stage, the rank of the other, with which it sums gradients of what they share;
    None where there are several others.

    Empty if all stages are on one rank. Raises UserError for a schedule without a flush.
    """
    if any(action.kind is Kind.UPDATE for program in schedule.programs for action in program):
        raise UserError(
            f"schedule {schedule.name} updates each stage by itself, so stages {tied[0]} and "
            f"{tied[1]} cannot share an embedding; untie it, or use a schedule with a flush"
        )
    ranks = [rank_of_stage(schedule)[stage] for stage in tied]
    if len({*ranks}) == 1:
        return {}
    return dict(zip(tied, reversed(ranks) if len(ranks) == 2 else [None] * len(ranks), strict=True))


def _versioned(
    program: Sequence[Action], versions: Mapping[Action, int], slots: Sequence[Slot]
) -> Iterator[Instruction]:
    """The program's instructions, each with the version of the weights that it uses or makes.

    Also adds to `slots` the release of each version after its last use, if an update has replaced
    the version by then.
    """
    latest: Counter[int] = Counter()
    replaced: dict[tuple[int, int], int] = {}  # (stage, version) → index of its last use
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
