"""Flows: messages and computations of one rank, each of which starts when what it needs is there.

    task 0  turn 0  send a to 1                    a program of two pieces, a and b: b is sent
    task 1  turn 0  receive A from 1               while the sum of a is made, and the link is
    task 2  turn 0  a += A       after 0, 1        never idle
    task 3  turn 1  send b to 1
    task 4  turn 1  send a to 1  after 2

Messages between two ranks keep the order of their turns, and of the lists: both ends know it, so no
message needs a name. A task comes after tasks of its own turn that are before it in the list, and
of earlier turns. So of all tasks that are left on all ranks, those of the first turn can be done:
a flow comes to its end whatever starts early.

Long messages leave before those of later turns to other peers: two at once would share the card, so
both would arrive late, and so would what waits for the first. (A binomial broadcast over four hosts
took the time of three messages, not of two.)

A short message goes along with its call; a longer one when the peer has called, too: it may compute
for as long as it likes, and what its kernel does not take looks like a link that is down.

Messages between ranks of one machine may go over a wire beside (`near.py`), whose calls wait for
each other. All of them of a turn are one call, which comes after all other messages of the turns
before: else ranks might wait in two such calls for messages that neither of them moves.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from typing import NamedTuple, Protocol

from torch import Tensor

from howdah.comm.rounds import Message, Round, nothing

WITH_CALL = 32 << 10  # bytes of a message that goes along with its call: the kernel of a peer that
# calls late has room for them. For more it has none, and after a while the link counts as lost


class Beside(Protocol):
    """A wire that passes messages at once."""

    def __call__(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Returns when all were passed."""
        ...

    def abort(self) -> None:
        """Ends the waits of other ranks for this one."""
        ...


class Task(NamedTuple):
    """Something that a rank does.

    after    numbers of the tasks before it, in the same list
    peer     of a message; -1: it is none
    tensors  flat, of a message, one behind the other
    sends    whether it is sent, or received
    do       what is done, if it is no message
    beside   passes it, in place of the transport
    """

    turn: int
    after: Sequence[int]
    peer: int = -1
    tensors: tuple[Tensor, ...] = ()
    sends: bool = False
    do: Callable[[], object] = nothing
    beside: Beside | None = None


Flow = list[Task]


def in_turns(rounds: Sequence[Round]) -> Flow:
    """Rounds, one after the other; what goes to one peer in a round is one message."""
    tasks: Flow = []
    before: tuple[int, ...] = ()
    for turn, one in enumerate(rounds):
        first = len(tasks)
        for messages, sends in ((one.sends, True), (one.receives, False)):
            by_peer: dict[int, list[Tensor]] = {}
            for tensor, peer in messages:
                if tensor.numel():
                    by_peer.setdefault(peer, []).append(tensor)
            tasks += [Task(turn, before, peer, tuple(x), sends) for peer, x in by_peer.items()]
        tasks.append(Task(turn, (*before, *range(first, len(tasks))), do=one.after))
        before = (len(tasks) - 1,)
    return tasks


def as_one(lists: Sequence[Sequence[Round]]) -> list[Round]:
    """Lists of rounds that start together, as one list."""
    found = []
    for together in zip_longest(*lists, fillvalue=Round()):
        sends = [message for one in together for message in one.sends]
        receives = [message for one in together for message in one.receives]
        meets = any(one.meets for one in together)
        found.append(Round(sends, receives, partial(_each_after, together), meets))
    return found


def by_meetings(rounds: Sequence[Round]) -> Iterator[Sequence[Round]]:
    """Yields the rounds up to each one before which all ranks meet."""
    starts = [0, *(n for n, one in enumerate(rounds) if n and one.meets), len(rounds)]
    yield from (rounds[first:last] for first, last in pairwise(starts))


def _each_after(rounds: Sequence[Round]) -> None:
    for one in rounds:
        one.after()


def bytes_sent(flow: Flow) -> int:
    """Bytes of all messages that are sent."""
    return sum(x.nbytes for task in flow if task.sends for x in task.tensors)


class Flows:
    """Flows that run together.

    done   called with the number of a message when it is sent, or has arrived
    fresh  whether that was called since it was last set to False
    ahead  bytes of messages to one peer that are being sent at a time, or one message, which is
           then a long one; 0: any
    """

    ahead = 0

    def __init__(self, flows: Sequence[Flow]) -> None:
        self.tasks = [task for flow in flows for task in flow]
        self.left, self.fresh = len(self.tasks), False
        self._waits = [len(task.after) for task in self.tasks]
        self._next: list[list[int]] = [[] for _ in self.tasks]  # tasks that come after each
        start = 0
        for flow in flows:
            for number, task in enumerate(flow, start):
                for before in task.after:
                    self._next[start + before].append(number)
            start += len(flow)
        self._ready: deque[int] = deque()  # computations
        self._queues: defaultdict[tuple[int, bool], deque[int]] = defaultdict(deque)
        self._near: deque[list[int]] = deque()  # messages beside, turn by turn
        self._far = Counter[int]()  # messages by turn that are not done
        self._sending = Counter[int]()  # bytes that are being sent, by peer
        self._long = Counter[tuple[int, int]]()  # long messages that are, by turn and peer
        for number in sorted(range(self.left), key=lambda number: self.tasks[number].turn):
            self._file(number)

    def _file(self, number: int) -> None:
        task = self.tasks[number]
        if task.peer < 0:
            if not self._waits[number]:
                self._ready.append(number)
        elif task.beside is None:
            self._queues[task.peer, task.sends].append(number)
            self._far[task.turn] += 1
        elif self._near and self.tasks[self._near[-1][0]].turn == task.turn:
            self._near[-1].append(number)
        else:
            self._near.append([number])

    def first(self, peer: int, *, sends: bool) -> int | None:
        """The number of the first message to or from a peer, if it is one of the first turn, and
        short enough to go with the call; it is started by who asks.
        """
        queue = self._queues.get((peer, sends))
        if not queue or self.tasks[queue[0]].turn:
            return None
        if sum(x.nbytes for x in self.tasks[queue[0]].tensors) > WITH_CALL:
            return None
        return self._started(queue)

    def run(self, start: Callable[[list[int]], None], wait: Callable[[], None]) -> None:
        """Runs all.

        start  starts messages, by number
        wait   returns when one more is done
        """
        while not self.advance(start):
            wait()

    def advance(self, start: Callable[[list[int]], None]) -> bool:
        """Does and starts all that can be; whether nothing is left."""
        while True:
            while self._ready:
                number = self._ready.popleft()
                self.tasks[number].do()
                self.done(number)
            if found := [*self._startable()]:
                start(found)  # some may be done at once, for which others have waited
            elif not self.left or not self._pass_near():
                return not self.left

    def _startable(self) -> Iterator[int]:
        """Yields messages that are next for their peer, and wait for nothing."""
        for (peer, sends), queue in self._queues.items():
            while queue and not self._waits[queue[0]]:
                if sends and self.ahead and self._sending[peer] >= self.ahead:
                    break
                if sends and self._is_behind(self.tasks[queue[0]].turn, peer):
                    break
                yield self._started(queue)

    def _is_behind(self, turn: int, peer: int) -> bool:
        """Whether a long message of an earlier turn is on its way to another peer."""
        return any(first < turn and to != peer for first, to in self._long)

    def _started(self, queue: deque[int]) -> int:
        task = self.tasks[number := queue.popleft()]
        if task.sends:
            self._sending[task.peer] += (size := bytes_sent([task]))
            if 0 < self.ahead <= size:
                self._long[task.turn, task.peer] += 1
        return number

    def _pass_near(self) -> bool:
        """Passes the next messages beside, if they can be; whether there were any."""
        if not self._near or any(self._waits[number] for number in self._near[0]):
            return False
        tasks = [self.tasks[number] for number in self._near[0]]
        if any(turn < tasks[0].turn for turn in self._far):
            return False
        beside = tasks[0].beside
        assert beside is not None
        sends, receives = (
            [(x, task.peer) for task in tasks if task.sends == out for x in task.tensors]
            for out in (True, False)
        )
        beside(sends, receives)
        for number in self._near.popleft():
            self.done(number)
        return True

    def give_up(self) -> None:
        """After an error: ranks of this machine that wait beside the transport are told."""
        if self._near and (beside := self.tasks[self._near[0][0]].beside):
            beside.abort()

    def done(self, number: int) -> None:
        """Notes that a task is done."""
        task = self.tasks[number]
        self.left -= 1
        self.fresh = True
        if task.peer >= 0 and task.beside is None:
            if task.sends:
                self._sending[task.peer] -= bytes_sent([task])
                if self._long:
                    self._long -= Counter([(task.turn, task.peer)])  # keeps what is positive
            self._far[task.turn] -= 1
            if not self._far[task.turn]:
                del self._far[task.turn]
        for later in self._next[number]:
            self._waits[later] -= 1
            if not self._waits[later] and self.tasks[later].peer < 0:
                self._ready.append(later)
