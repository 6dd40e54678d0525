"""When the sums of gradients start in a backward pass, and when the rank waits for them.

`plan/sum_order.py` decides. Here it is told of a backward pass, part by part, and what it does is
written down. The last micro-batch of three blocks on `dp2 tp2 sp`: sums 0 to 3 are over tp, 4 to 7
over dp, and 4 awaits 0 and 1, as the head and layers.2 have one bucket:

    behind head         0 starts
    behind layers.2     wait for 0; 1 starts
    behind layers.1     wait for 1; 4 starts; 2 starts
    behind layers.0     wait for 2; 5 starts; 3 starts
    when all are done   wait for 3; 6 starts; 7 starts; wait for 4 5 6 7
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from howdah.plan.plan import Plan
from howdah.plan.sum_order import Complete, SumOrder
from howdah.plan.sums import Sum
from howdah.shapes.part import Part
from howdah.shapes.weights import parts_of


class Event(NamedTuple):
    """A sum starts, or the rank waits for it; `number` is its number in the list."""

    number: int
    starts: bool


class Events(NamedTuple):
    """The events of a backward pass: before and behind each part, and when all parts are done."""

    before: Mapping[Part, Sequence[Event]]
    behind: Mapping[Part, Sequence[Event]]
    end: Sequence[Event]

    def at_the_end(self) -> "Events":
        """All events in their order, when all parts are done."""
        beside = [
            event
            for part in (*self.before, *(part for part in self.behind if part not in self.before))
            for event in (*self.before.get(part, ()), *self.behind.get(part, ()))
        ]
        return Events({}, {}, [*beside, *self.end])


NOTHING = Events({}, {}, ())


def events_of(plan: Plan, sums: Sequence[Sum], stage: int, *, last: bool) -> Events:
    """The events of a backward pass of `stage`.

    sums  all sums of the rank
    last  whether it completes the gradients of the step
    """
    own = [row for row in sums if row.stage == stage]
    each = any(row.every_micro for row in own)
    if not own or not (each or last):
        return NOTHING
    backward = _Backward(plan, sums, stage)
    if each:
        backward.count_slots()
    return backward.events(last=last)


def _by_units(row: Sum, plan: Plan) -> Sum:
    """A sum that awaits one weight of each unit in place of all: they are ready together."""
    first = {plan.weight(name).unit: name for name in reversed(row.names)}
    return replace(row, names=tuple(reversed(first.values())))


class _Log:
    """Writes down what the order decides.

    slots  slots of the window; None: as many as are wanted
    most   the most buckets that were open at once
    """

    def __init__(self, sums: Sequence[Sum]) -> None:
        self._sums = sums
        self.slots: int | None = None
        self.most = 0
        self._open, self._running = 0, 0  # buckets that fill, and that are reduced
        self._events: list[Event] = []

    def open(self, number: int, *, add: bool) -> bool:
        if not add and self.slots is not None and self._open + self._running >= self.slots:
            return False
        self._open += 1
        self.most = max(self.most, self._open)
        return True

    def start(self, number: int) -> Complete:
        self._events.append(Event(number, starts=True))
        in_window = self._sums[number].in_window
        self._open -= in_window
        self._running += in_window
        return partial(self._complete, number)

    def _complete(self, number: int) -> None:
        self._events.append(Event(number, starts=False))
        self._running -= self._sums[number].in_window

    def take(self) -> list[Event]:
        """The events since the last call."""
        taken, self._events = self._events, []
        return taken


class _Backward:
    """The backward passes of a stage, as the order of its sums is told of them."""

    def __init__(self, plan: Plan, sums: Sequence[Sum], stage: int) -> None:
        sums = [_by_units(row, plan) if row.stage == stage else row for row in sums]
        self._log, self._stage, self._parts = _Log(sums), stage, plan.stages.parts[stage]
        own = frozenset(self._parts)
        self._order = SumOrder(sums, self._log)
        self._opened: dict[Part, list[int]] = defaultdict(list)  # by the part that it begins with
        self._names: dict[Part, list[str]] = defaultdict(list)  # by the part that completes them

        def users(unit: str) -> list[Part]:
            """The parts of the stage that use a unit, in forward order."""
            return [part for part in parts_of(unit, plan.shape) if part in own]

        for number, row in enumerate(sums):
            if row.stage == stage:
                for name in row.names:
                    self._names[users(plan.weight(name).unit)[0]].append(name)
                for span in row.spans if row.in_window else ():
                    self._opened[users(span.unit)[-1]].append(number)

    def count_slots(self) -> None:
        """Runs a first backward pass, and gives the window the slots that it needs, as
        `plan/window.py` does. Later passes may wait for sums of this one.
        """
        self.events(last=False)
        self._log.slots = min(self._log.most + 1, sum(map(len, self._opened.values())))

    def events(self, *, last: bool) -> Events:
        """The events of the next backward pass."""
        before, behind = {}, {}
        if last:
            self._order.arm(self._stage)
        for part in reversed(self._parts):
            for number in self._opened[part]:
                self._order.open(number)
            before[part] = self._log.take()
            for name in self._names[part]:
                self._order.ready(name)
            behind[part] = self._log.take()
        self._order.finish(self._stage)
        return Events(before, behind, self._log.take())
