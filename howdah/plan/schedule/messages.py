"""The messages of a schedule: which, in what order, and where each is started and waited for.

NCCL has no tags: what two ranks post to each other is matched by position, and both directions
share one queue. So each pair of ranks needs **one agreed order of messages**. Here it is the
order in which they are made when the schedule runs on the papers' clock; of two made at the
same time, the lower rank's comes first.

    1F1B on two ranks                          the pair's order, read off the clock
    rank 0   F0F1    B0··F2B1··  B2··          0F0 0F1 1B0 0F2 1B1 1B2
    rank 1     F0B0··F1B1··F2B2··

Posting in this order never gets stuck, however long the actions really take. Say that a rank
must post a message before it can go on. All that stands before it in the order was made before
it, in a run of this very schedule: so none of it needs anything that comes later.

    a send     starts when its action is done, and is waited for where waiting costs nothing:
               when something comes back that the peer made after it had used what was sent;
               what is left over, at the end of the step
    a receive  starts one action before the one that uses it, so that it hides behind that
               action; later if its turn in the order is later
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from howdah.plan.schedule.actions import Action, Kind, Schedule, makes, needs
from howdah.plan.schedule.clock import clock, units


class Message(NamedTuple):
    """What goes from rank `source`, whose `action` makes it, to rank `target`.

    made  the number of `action` in the source's program
    used  the number of the action that uses it in the target's
    """

    action: Action
    source: int
    made: int
    target: int
    used: int


class Place(NamedTuple):
    """Where a rank starts a message and waits for it, as numbers of its actions.

    A send starts after number `start`, a receive before it; waits stand before number `wait`.
    """

    message: Message
    start: int
    wait: int


def message_order(schedule: Schedule) -> dict[tuple[int, int], list[Message]]:
    """The agreed order of each pair of ranks (lower, higher) that have something to say.

    Stages on one rank send each other nothing. Raises Deadlock if the schedule cannot finish.
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


def places(rank: int, program: Sequence[Action], queue: Sequence[Message]) -> Iterator[Place]:
    """Where `rank`, which runs `program`, starts and waits for the messages of a pair."""
    wanted = [m.made if m.source == rank else _before(program, m.used) for m in queue]
    latest = list(accumulate(reversed(wanted), min))[::-1]  # none starts after one behind it
    replies = [m for m in queue if m.target == rank]
    turn = 0  # the first action before which everything made so far has been sent
    for message, start in zip(queue, latest, strict=True):
        if message.target == rank:
            yield Place(message, max(start, turn), message.used)
        else:
            turn = message.made + 1
            reply = bisect_left(replies, message.used, key=lambda m: m.made)
            wait = replies[reply].used if reply < len(replies) else len(program)
            yield Place(message, message.made, wait)


def _before(program: Sequence[Action], number: int) -> int:
    """The number of the computation before `number`; behind an update nothing could hide."""
    before = (n for n in range(number - 1, -1, -1) if program[n].kind is not Kind.UPDATE)
    return next(before, 0)
