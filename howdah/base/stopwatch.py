"""Clocks and stopwatches: add up the seconds of the blocks in which they run.

watch = Stopwatch()
with watch:
    handle.result()
watch.seconds

A clock takes marks, and tells the seconds between two of them. The host's marks are numbers. Those
of a GPU are events in a stream, whose seconds are known only when the GPU has passed both: so
stopwatches keep the marks, and ask the clock when they are read (`comm/lane.py`).
"""

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple, Protocol

KEPT = 4096  # pairs of marks, before they are added up without being asked for


class Clock(Protocol):
    """Takes marks of the present moment."""

    def mark(self) -> Any:
        """A mark of the present moment, as the clock sees it."""
        ...

    def seconds(self, began: Any, ended: Any) -> float:
        """The seconds between two marks. Waits until both are past."""
        ...


class HostClock:
    """The clock of the host: its marks are `perf_counter()`."""

    def mark(self) -> float:
        """The present moment in seconds."""
        return perf_counter()

    def seconds(self, began: float, ended: float) -> float:
        """The difference."""
        return ended - began


HOST = HostClock()


class Interval(NamedTuple):
    """What passed between two marks of a clock."""

    clock: Clock
    began: Any
    ended: Any

    @property
    def seconds(self) -> float:
        """Its length; waits until it is past."""
        return self.clock.seconds(self.began, self.ended)


class Stopwatch:
    """Runs inside `with` blocks of one thread, not nested, of each of which `note` is told."""

    def __init__(
        self, clock: Clock = HOST, note: Callable[[Interval], object] | None = None
    ) -> None:
        self._clock, self._note, self._total = clock, note, 0.0
        self._began: Any = None
        self._pairs: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self._began = self._clock.mark()

    def __exit__(self, *_: object) -> None:
        self._pairs.append((self._began, self._clock.mark()))
        if self._note:
            self._note(Interval(self._clock, *self._pairs[-1]))
        if len(self._pairs) > KEPT:
            self._add_up()

    @property
    def seconds(self) -> float:
        """Seconds of all blocks so far."""
        self._add_up()
        return self._total

    def _add_up(self) -> None:
        pairs, self._pairs = self._pairs, []
        self._total += sum(self._clock.seconds(*pair) for pair in pairs)
