"""The clock of one pipeline rank: when its actions end, with the messages that run beside them.

    compute   |layers.2 |layers.1 |layers.0 |wait  |          messages of one group of ranks run
    dp                  |sum 2     |sum 1     |sum 0    |     one after the other, those of two
    shard     |gather 1 |gather 0 |                           groups at the same time

An action consists of *turns*: computation with one unit. A turn waits for the weights of its unit
where they are gathered. Gradients are complete at the end of the last turn of a part of the model.

    sums      the list of `plan/sums.py`, started and awaited as `sim/sum_events.py` finds
    weights   zero1, zero2: gathered in the order of the forward pass, from the first forward on;
              so are those that come from servers
              zero3, and from a home: the next units in the order of use, while one is used, as
              many as the window holds (`storage.window`)
    homes     moves have lanes of their own (`sim/home_times.py`), and do not slow computation: a
              unit's weights come before they are gathered, its gradients go behind their sum. What
              a block keeps goes behind its forward, while the next one runs, and comes back while
              the backward of the block behind it does

Micro-batches repeat themselves: an action that begins with the same messages under way as an
earlier one of its kind takes as long, and is not computed again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from howdah.plan.gather_order import backward_units, needed_at
from howdah.plan.plan import Plan
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.storage import staying
from howdah.shapes.part import Part
from howdah.sim.home_times import Way
from howdah.sim.message_times import RankMessages
from howdah.sim.part_times import PartTimes
from howdah.sim.profile import PLAIN, Profile
from howdah.sim.sum_events import NOTHING, Event, Events, events_of

GRADIENTS = (Kind.BACKWARD, Kind.WEIGHT)  # actions that add to the gradients of weights
RETURNS = (Kind.BACKWARD, Kind.INPUT)  # actions that need what the forward pass has kept
ALIKE = 1e-10  # times that differ by this fraction of an action are the same


class Turn(NamedTuple):
    """Computation with one unit, or with none; whether it is a part's first, and its last."""

    part: Part
    unit: str
    seconds: float
    first: bool
    last: bool


class UnderWay(NamedTuple):
    """The messages under way between two actions. Times are seconds after some moment.

    free    by lane, the end of its latest message
    coming  units that are gathered and were not used so far, and the end of the gather
    ends    by number, the end of each sum that has not ended
    here    units that zero3 has gathered and not released
    used    the latest of them that was used
    """

    free: tuple[float, ...]
    coming: tuple[tuple[str, float], ...] = ()
    ends: tuple[tuple[int, float], ...] = ()
    here: frozenset[str] = frozenset()
    used: str = ""

    def later(self, seconds: float) -> "UnderWay":
        """These ends, in seconds after a later moment. What has ended by then ends at 0."""
        return UnderWay(
            tuple(max(end - seconds, 0.0) for end in self.free),
            tuple((unit, max(end - seconds, 0.0)) for unit, end in self.coming),
            tuple((number, max(end - seconds, 0.0)) for number, end in self.ends),
            self.here,
            self.used,
        )

    def rounded(self, step: float) -> tuple[object, ...]:
        """Equal for states whose times differ by less than about `step` seconds."""
        free = tuple(round(end / step) for end in self.free)
        ends = tuple((what, round(end / step)) for what, end in (*self.coming, *self.ends))
        return free, ends, self.here, self.used


class Took(NamedTuple):
    """The seconds of an action, those until its sums have ended, and what is under way then, in
    seconds after the beginning of the action.
    """

    seconds: float
    summed: float
    left: UnderWay


class RankClock:
    """The times of one rank's actions, which are asked for in the order of its program.

    program   the actions
    messages  what runs beside them
    parts     by stage, the seconds of its parts
    """

    def __init__(
        self,
        plan: Plan,
        program: Sequence[Action],
        messages: RankMessages,
        parts: Mapping[int, Mapping[Part, PartTimes]],
        profile: Profile = PLAIN,
    ) -> None:
        self._profile = profile
        self._plan, self._program, self._messages = plan, program, messages
        kinds = {(action.kind, action.stage) for action in program}
        self._turns = {one: list(self._make_turns(one[0], parts[one[1]])) for one in kinds}
        self._seconds = {one: sum(t.seconds for t in turns) for one, turns in self._turns.items()}
        self._needs = {one: [t.unit for t in turns if t.unit] for one, turns in self._turns.items()}
        adding = [action for action in program if action.kind in GRADIENTS]
        self._completes = {(action.stage, action.micro): action for action in adding}
        self._last = {action.stage: action for action in adding}
        self._needed = frozenset(unit for units in self._needs.values() for unit in units)
        self._events: dict[tuple[int, bool], Events] = {}
        self._known: dict[object, Took] = {}
        self._alike = ALIKE * max(self._seconds.values()) or 1.0
        self._number = -1  # of the latest action
        self._began, self._left = 0.0, UnderWay((0.0,) * messages.lanes)
        self._summed: dict[Action, float] = {}
        self._keeps = bool(messages.homes and messages.homes.goes)
        self._stays = plan.layout.release == "step"
        if messages.by_use:
            first = self._units_after(frozenset())[: plan.storage.window - 1]
            self._begin(0.0, [[unit] for unit in first])

    def end(self, action: Action, now: float) -> float:
        """The end of the program's next action, if it starts at `now`."""
        self._number += 1
        layout, by_use = self._plan.layout, self._messages.by_use
        if self._number == 0 and (layout.zero in (1, 2) or layout.servers_update) and not by_use:
            self._begin(now, self._messages.buckets)
        one, last = (action.kind, action.stage), self._last.get(action.stage) == action
        events = self._events_of(action, last=last)
        if events is NOTHING and not self._waits(one) and not self._keeps:
            return now + self._seconds[one]
        begun = self._left.later(now - self._began)
        after = self._units_after(self._kept(begun.here, one))
        key = one, last, after, begun.rounded(self._alike)
        if key not in self._known:
            run = _Run(self._plan, self._messages, begun, self._profile)
            turns = self._turns[one]
            self._known[key] = run.took(action.kind, turns, events, after, last=last)
        took = self._known[key]
        self._began, self._left, self._summed[action] = now, took.left, now + took.summed
        return now + took.seconds

    def summed(self, action: Action) -> float:
        """The end of the sums that the latest run of `action` started."""
        return self._summed.get(action, 0.0)

    # -- what an action consists of

    def _make_turns(self, kind: Kind, parts: Mapping[Part, PartTimes]) -> Iterator[Turn]:
        """The time of a part is divided evenly over the units that it waits for."""
        for part in parts if kind is Kind.FORWARD else reversed(list(parts)):
            units = self._units(kind, part) or [""]
            seconds = parts[part].seconds(kind) / len(units)
            for number, unit in enumerate(units):
                yield Turn(part, unit, seconds, number == 0, number == len(units) - 1)

    def _units(self, kind: Kind, part: Part) -> list[str]:
        found: Iterable[str] = ()
        if kind is Kind.FORWARD:
            found = needed_at(self._plan, part)
        elif kind is not Kind.WEIGHT and self._messages.by_use:
            found = backward_units(self._plan, [part])
        return [unit for unit in found if unit in self._messages.comes]

    def _events_of(self, action: Action, *, last: bool) -> Events:
        if self._completes.get((action.stage, action.micro)) != action:
            return NOTHING
        if (action.stage, last) not in self._events:
            found = events_of(self._plan, self._messages.sums, action.stage, last=last)
            beside = self._profile.overlap
            self._events[action.stage, last] = found if beside else found.at_the_end()
        return self._events[action.stage, last]

    # -- weights

    def _begin(self, now: float, buckets: Iterable[Sequence[str]]) -> None:
        """Starts to gather the first units."""
        run = _Run(self._plan, self._messages, self._left, self._profile)
        if not self._profile.gather:  # all are there before any is used
            buckets = [[unit for bucket in buckets for unit in bucket]]
        for bucket in buckets:
            run.gather(*filter(None, bucket))
        self._began, self._left = now, run.left()

    def _waits(self, one: tuple[Kind, int]) -> bool:
        """Whether an action may have to wait for weights, or starts to gather some."""
        if self._messages.by_use:
            there = self._left.here if self._stays else {self._left.used}
            return not set(self._needs[one]) <= there
        return any(unit in self._needs[one] for unit, _ in self._left.coming)

    def _kept(self, here: frozenset[str], one: tuple[Kind, int]) -> frozenset[str]:
        """The units that stay to the end of the step and are here when an action has ended."""
        return here.union(self._needs[one]) if self._stays else frozenset()

    def _units_after(self, kept: frozenset[str]) -> tuple[str, ...]:
        """The first units that later actions need, in their order and without those that are
        `kept`, as many as the window holds.
        """
        found = dict[str, None]()
        most = min(self._plan.storage.window, len(self._needed - kept))
        if self._messages.by_use and most:
            for action in self._program[self._number + 1 :]:
                needs = self._needs[action.kind, action.stage]
                found |= dict.fromkeys(unit for unit in needs if unit not in kept)
                if len(found) >= most:
                    break
        return tuple(found)[:most]


class _Run:
    """An action, turn by turn. Times are seconds after its beginning."""

    def __init__(
        self, plan: Plan, messages: RankMessages, begun: UnderWay, profile: Profile
    ) -> None:
        self._messages, self._profile, self._homes = messages, profile, messages.homes
        self._by_use, self._stays = messages.by_use, plan.layout.release == "step"
        self._window = plan.storage.window
        self.now = 0.0
        self._back: dict[Part, float] = {}  # ends of the moves of activations that come
        self._free, self._coming = list(begun.free), dict(begun.coming)
        self._ends: dict[int, float] = dict(begun.ends)
        self._here, self._used = begun.here, begun.used

    def took(
        self,
        kind: Kind,
        turns: Sequence[Turn],
        events: Events,
        after: Sequence[str],
        *,
        last: bool,
    ) -> Took:
        """Runs the action.

        after  the units that are gathered behind its own
        last   whether it completes the gradients of a step: what follows does not wait for its sums
        """
        gone = 0.0  # the end of the moves of the activations of the block before
        for number, turn in enumerate(turns):
            if turn.unit:
                self._use(turns, number, after)
            if turn.first:
                self._play(events.before.get(turn.part, ()))
            if turn.part == "embedding" and kind is Kind.FORWARD and self._homes:
                self.now = self._run(self._homes.rows)
            if turn.first and kind in RETURNS:
                self._return([one.part for one in turns[number:]])
            if not turn.part.is_block:
                self.now = max(self.now, gone)
            self._compute(turn.seconds)
            if turn.last:
                self._play(events.behind.get(turn.part, ()))
            if turn.last and kind is Kind.FORWARD:
                gone, before = self._go(turn.part), gone
                self.now = max(self.now, before)
        ended = self.now = max(self.now, gone)
        self._play(events.end)
        summed = max([self.now, *self._ends.values()])
        return Took(ended if last else self.now, summed, self.left())

    def _compute(self, seconds: float) -> None:
        """Computes; beside messages that takes longer."""
        slowdown = self._profile.slowdown
        if slowdown > 1 and (beside := self._last_message() - self.now) > 0:
            slowed = min(seconds * slowdown, beside)
            seconds = slowed + seconds - slowed / slowdown
        self.now += seconds

    def _last_message(self) -> float:
        """The end of the latest message of all groups; moves from and to homes are none."""
        return max(self._free[: self._messages.groups], default=0.0)

    def gather(self, *units: str) -> None:
        """Starts to gather some units, which are there when all are."""
        for unit in units:
            self._coming[unit] = self._run(self._messages.comes[unit])
        end = max((self._coming[unit] for unit in units), default=0.0)
        self._coming.update(dict.fromkeys(units, end))

    def left(self) -> UnderWay:
        """What is under way."""
        ends = tuple((number, end) for number, end in self._ends.items() if end > self.now)
        free, coming = tuple(self._free), tuple(self._coming.items())
        return UnderWay(free, coming, ends, self._here, self._used)

    def _use(self, turns: Sequence[Turn], number: int, after: Sequence[str]) -> None:
        """Waits for the unit of a turn; zero3 starts to gather the next ones before."""
        unit = turns[number].unit
        if self._by_use and unit not in (self._here if self._stays else {self._used}):
            soon = [unit, *(turn.unit for turn in turns[number + 1 :] if turn.unit), *after]
            soon = [*dict.fromkeys(soon)]
            stay = soon[: staying(self._window)]
            here = self._here if self._stays else self._here.intersection(stay)
            if unit not in self._here | self._coming.keys():
                self.gather(unit)
            self._here, self._used = here | {unit}, unit
            ahead = [one for one in soon if one not in self._here] if self._stays else soon[1:]
            for one in ahead[: self._window - 1] if self._profile.gather else ():
                if one not in self._here | self._coming.keys():
                    self.gather(one)
        self.now = max(self.now, self._coming.pop(unit, 0.0))

    # -- moves from and to homes

    def _run(self, ways: Iterable[Way], begins: float = 0.0) -> float:
        """Starts messages or moves, each behind the one before; returns when the last ends."""
        end = max(self.now, begins)
        for lane, seconds in ways:
            end = self._free[lane] = max(end, self._free[lane]) + seconds
        return end

    def _go(self, part: Part) -> float:
        """Starts to move what a block keeps to its home; returns when it is there."""
        if not self._homes or part not in self._homes.goes:
            return 0.0
        return self._run([self._homes.goes[part]])

    def _return(self, parts: Sequence[Part]) -> None:
        """Waits for what the first of some parts keeps; that of the next block starts to come."""
        comes = self._homes.comes if self._homes else {}
        away = [part for part in dict.fromkeys(parts) if part in comes]
        for part in away[:2] if parts[0] in comes else ():
            if part not in self._back:
                self._back[part] = self._run([comes[part]])
        self.now = max(self.now, self._back.pop(parts[0], 0.0))

    def _play(self, events: Sequence[Event]) -> None:
        for number, starts in events:
            if not starts:
                self.now = max(self.now, self._ends.get(number, 0.0))
                continue
            row, (lane, seconds) = self._messages.sums[number], self._messages.of_sum[number]
            begins = max(self.now, self._free[lane], *(self._ends[n] for n in row.after))
            self._ends[number] = self._free[lane] = begins + seconds
            if self._homes and (evicts := self._homes.evicts.get(number)):
                self._ends[number] = self._run(evicts, begins + seconds)
