"""When each sum of gradients starts, and when its result is waited for.

`plan/sums.py` lists the sums of a rank. This file decides the moments, from what the backward pass
reports; a `Performer` does what is decided. The same decisions move tensors in training
(`parallel/sums.py`) and count the slots of the window in a plan (`plan/window.py`).

A sum starts when the gradients and the sums that it awaits are complete, and all earlier sums of
its stage with the same ranks have started: so all ranks start their sums in one order. `finish`
starts those that the backward pass did not reach.

    backward   head ── layers.3 ── layers.2 ── layers.1 ── …
    tp              [head    ][layers.3][layers.2]…       a sum over tp ranks is waited for when
    dp                        [head    ][layers.3]…       the one of the next unit starts

Results over tp ranks are copied to their places, and shares are added to those of earlier
micro-batches; sums that follow must wait for that. All other results are complete where they are:
what follows is chained on their end, and they are waited for in `finish`. Sums of shares are waited
for when their slot of the window is needed again, or when the step ends.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from howdah.plan.sums import Sum

Complete = Callable[[], None]  # waits for the result of a sum, and puts it in its place


class Performer(Protocol):
    """Does what is decided; sums are named by their number in the list."""

    def open(self, number: int, *, add: bool) -> bool:
        """Gives a sum a slot of the window. If there is none: adds one, or returns False."""
        ...

    def start(self, number: int) -> Complete:
        """Starts a sum."""
        ...


@dataclass(eq=False)
class RunningSum:
    """A sum that has started, as the `turn`-th of all; `last` if of the step's last micro-batch."""

    number: int
    turn: int
    last: bool
    complete: Complete


class SumOrder:
    """The sums of one rank, and how far they are."""

    def __init__(self, sums: Sequence[Sum], performer: Performer) -> None:
        self.sums, self._performer = sums, performer
        self._awaits = {name: number for number, row in enumerate(sums) for name in row.names}
        self._followers: dict[int, list[int]] = defaultdict(list)  # the sums that await a sum
        self._of_stage: dict[int | None, list[int]] = defaultdict(list)
        self._lanes: dict[object, list[int]] = defaultdict(list)  # sums that start in this order
        for number, row in enumerate(sums):
            for before in row.after:
                self._followers[before].append(number)
            self._of_stage[row.stage].append(number)
            self._lanes[row.stage, row.axis, row.ranks].append(number)
        self._missing = [len(row.names) + len(row.after) for row in sums]
        self._armed: set[int | None] = set()
        self._open: set[int] = set()
        self._started: set[int] = set()
        self._turns = count()
        self._running: dict[int, RunningSum] = {}  # by turn
        self._running_of: dict[int, list[RunningSum]] = defaultdict(list)  # by number
        self._packed: set[int] = set()  # numbers of those that run and are packed

    # -- what the backward pass reports

    def arm(self, stage: int) -> None:
        """The last gradients of `stage` in this step come next."""
        self._armed.add(stage)

    def open(self, number: int) -> None:
        """A gradient of sum `number` comes, and needs the sum's slot of the window."""
        if number in self._open:
            return
        while not self._performer.open(number, add=False):
            running = self._running.values()
            oldest = next((one for one in running if self.sums[one.number].in_window), None)
            if oldest is None:
                self._performer.open(number, add=True)
                break
            self._complete(oldest)
        self._open.add(number)

    def ready(self, name: str) -> None:
        """The gradient of `name` is complete for this micro-batch."""
        number = self._awaits.get(name)
        if number is not None and self._runs(number):
            self._count(number)

    def finish(self, stage: int) -> None:
        """All gradients of a micro-batch have been added to `stage`. After the last micro-batch of
        the step, all sums of the stage are complete when this returns.
        """
        for number in self._of_stage[stage]:
            if self._runs(number):
                self._complete_all(self.sums[number].after)
                if number not in self._started:
                    self._start(number)
        if stage in self._armed:
            self._complete_all(self._of_stage[stage])
        self._rewind(stage)

    def begin_tied(self) -> None:
        """Starts the sums over the stages of a tied embedding, whose other sums are complete."""
        for number in self._of_stage[None]:
            self._start(number)

    def finish_tied(self) -> None:
        """Waits for these sums."""
        self._complete_all(self._of_stage[None])
        self._rewind(None)

    # -- what follows from it

    def _runs(self, number: int) -> bool:
        """Whether a sum runs after this micro-batch."""
        row = self.sums[number]
        return row.every_micro or row.stage in self._armed

    def _count(self, number: int) -> None:
        """One of the gradients or sums that a sum awaits is complete."""
        row = self.sums[number]
        self._missing[number] -= 1
        for other in self._lanes[row.stage, row.axis, row.ranks]:
            if other not in self._started:
                if self._missing[other]:
                    return
                self._start(other)

    def _start(self, number: int) -> None:
        row = self.sums[number]
        if row.packed:
            self._complete_all(self._packed_of_other_units(row))
        if row.in_window:
            self.open(number)  # in case no gradient came
            self._open.discard(number)
        self._started.add(number)
        complete, last = self._performer.start(number), row.stage in self._armed
        running = RunningSum(number, next(self._turns), last, complete)
        self._running[running.turn] = running
        self._running_of[number].append(running)
        if row.packed:
            self._packed.add(number)
        if not row.moves_result:
            self._release_followers(running)

    def _packed_of_other_units(self, row: Sum) -> list[int]:
        unit = row.spans[0].unit
        return [number for number in self._packed if self.sums[number].spans[0].unit != unit]

    def _complete_all(self, numbers: Iterable[int]) -> None:
        due = [running for number in set(numbers) for running in self._running_of[number]]
        for running in sorted(due, key=lambda one: one.turn):
            self._complete(running)

    def _complete(self, running: RunningSum) -> None:
        running.complete()
        del self._running[running.turn]
        self._running_of[running.number].remove(running)
        if not self._running_of[running.number]:
            self._packed.discard(running.number)
        if self.sums[running.number].moves_result:
            self._release_followers(running)

    def _release_followers(self, running: RunningSum) -> None:
        """Counts a sum for those that await it."""
        for number in self._followers[running.number]:
            row = self.sums[number]
            if row.every_micro or (running.last and row.stage is not None):
                self._count(number)

    def _rewind(self, stage: int | None) -> None:
        """Expects the gradients of another micro-batch."""
        for number in self._of_stage[stage]:
            self._missing[number] = len(self.sums[number].names) + len(self.sums[number].after)
            self._started.discard(number)
        self._armed.discard(stage)
