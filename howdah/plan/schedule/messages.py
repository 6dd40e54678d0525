"""The messages of a schedule: their order, and where each is started and waited for.

NCCL has no tags: it matches the messages between two ranks by their position, and both directions
share one queue. So each pair of ranks needs **one agreed order of messages**. It is the order in
which the messages are made when the schedule runs on the papers' clock (`clock`); of two messages
made at the same time, the one from the lower rank is first.

    1F1B on two ranks                          the pair's order, read off the clock
    rank 0   F0F1    B0··F2B1··  B2··          0F0 0F1 1B0 0F2 1B1 1B2
    rank 1     F0B0··F1B1··F2B2··

Posting in this order cannot deadlock, however long the actions really take. Suppose that a rank
must post a message before it can continue. Every earlier message of the order was made before it
in one complete run of this schedule, so no earlier message depends on a later one.

    a send     starts when its action is done, and is waited for where waiting costs nothing:
               when the rank receives a value that the peer made after it had used the sent one;
               if there is no such value, at the end of the step
    a receive  starts one action before the action that uses it, so that this action hides it;
               later if its turn in the order is later
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from howdah.plan.schedule.actions import Action, Kind, Schedule, makes, needs
from howdah.plan.schedule.clock import clock, units


class Message(NamedTuple):
    """The value that `action` makes on rank `source`, sent to rank `target`.

    made  index of `action` in the source's program
    used  index of the action that uses the value in the target's program
    """

    action: Action
    source: int
    made: int
    target: int
    used: int


class MessageTimes(NamedTuple):
    """Where a rank starts a message and waits for it, as indices into the rank's program.

    A send starts after action `start`, a receive before it. The wait is before action `wait`.
    """

    message: Message
    start: int
    wait: int


def message_order(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """The agreed order of messages for each pair of ranks (lower, higher) that exchange any.

    Stages on the same rank exchange no messages. Raises Deadlock if the schedule cannot finish.
    """
    runs = clock(schedule, units)
    makers = {
        makes(action): (rank, index)
        for rank, program in enumerate(schedule.programs)
        for index, action in enumerate(program)
    }
    queues: dict[tuple[int, int], list[Message]] = defaultdict(list)
    for target, program in enumerate(schedule.programs):
        for used, action in enumerate(program):
            for value in needs(action, schedule):
                source, made = makers[value]
                if source != target:
                    maker = schedule.programs[source][made]
                    pair = min(source, target), max(source, target)
                    queues[pair].append(Message(maker, source, made, target, used))
    for queue in queues.values():
        queue.sort(key=lambda message: (runs[message.action].end, message.source))
    return dict(queues)


def message_times(
    rank: int, program: Sequence[Action], queue: Sequence[Message]
) -> Iterator[MessageTimes]:
    """Where `rank` starts each message of a pair and where it waits for it.

    program  the actions of `rank`
    queue    the agreed order of messages between `rank` and one other rank
    """
    wanted = [m.made if m.source == rank else _before(program, m.used) for m in queue]
    latest = list(accumulate(reversed(wanted), min))[::-1]  # no start is after a later message's
    replies = [m for m in queue if m.target == rank]
    turn = 0  # earliest start of a receive: after all sends before it in the queue
    for message, start in zip(queue, latest, strict=True):
        if message.target == rank:
            yield MessageTimes(message, max(start, turn), message.used)
        else:
            turn = message.made + 1
            reply = bisect_left(replies, message.used, key=lambda m: m.made)
            wait = replies[reply].used if reply < len(replies) else len(program)
            yield MessageTimes(message, message.made, wait)


def _before(program: Sequence[Action], number: int) -> int:
    """Index of the last action before `number` that is no update: an update could hide nothing."""
    before = (n for n in range(number - 1, -1, -1) if program[n].kind is not Kind.UPDATE)
    return next(before, 0)
