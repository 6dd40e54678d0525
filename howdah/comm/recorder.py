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

from howdah.plan.recording import Call, Span, StepTrace
from howdah.plan.schedule.lowering import Instruction

KEPT = 8  # steps


class Recorder:
    """The last traces of one process. Outside of a step, nothing is noted."""

    def __init__(self) -> None:
        self.steps: deque[StepTrace] = deque(maxlen=KEPT)
        self._step: StepTrace | None = None

    @property
    def runs(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """What is done inside is one step."""
        step = self._step = StepTrace(number, perf_counter())
        try:
            yield
        finally:
            self._step = None
        self.steps.append(step)

    @contextmanager
    def span(self, instruction: Instruction) -> Iterator[None]:
        """What is done inside is one instruction."""
        began = perf_counter()
        yield
        self.note(instruction, began)

    def note(self, instruction: Instruction, began: float) -> None:
        """An instruction that began then, and has just ended."""
        if step := self._step:
            step.spans.append(Span(instruction, began - step.began, perf_counter() - step.began))

    def call(self, axis: str, operation: str, *, sent: int, began: float, ended: float) -> None:
        """An operation of a group."""
        if step := self._step:
            call = Call(axis, operation, sent, began - step.began, ended - step.began)
            step.calls.append(call)
