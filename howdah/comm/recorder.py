"""When a rank did what, in its last few steps: what it computed, and what its groups called.

    step       │ 0F0 │ 0F1 │   0B0   │ 0F2 │      spans: instructions of the step's program
    pp           [send 1.0 MB]  [send 1.0 MB]     calls: on the threads of the groups
    dp                                 [reduce_scatter 8.4 MB]

A run writes them down when it saves (`plan/recording.py`), and `howdah trace` draws them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from howdah.plan.recording import Call, Lap, Span
from howdah.plan.schedule.lowering import Instruction

KEPT = 8  # steps


class Clock:
    """The last laps of one process. Outside of a step, nothing is noted."""

    def __init__(self) -> None:
        self.laps: deque[Lap] = deque(maxlen=KEPT)
        self._lap: Lap | None = None

    @property
    def runs(self) -> bool:
        """Whether a step is under way."""
        return self._lap is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What is done inside is one lap."""
        lap = self._lap = Lap(number, perf_counter())
        try:
            yield
        finally:
            self._lap = None
        self.laps.append(lap)

    @contextmanager
    def span(self, instruction: Instruction) -> Iterator[None]:
        """What is done inside is one instruction."""
        began = perf_counter()
        yield
        self.note(instruction, began)

    def note(self, instruction: Instruction, began: float) -> None:
        """An instruction that began then, and has just ended."""
        if lap := self._lap:
            lap.spans.append(Span(instruction, began - lap.began, perf_counter() - lap.began))

    def call(self, axis: str, operation: str, *, sent: int, began: float, ended: float) -> None:
        """An operation of a group."""
        if lap := self._lap:
            call = Call(axis, operation, sent, began - lap.began, ended - lap.began)
            lap.calls.append(call)
