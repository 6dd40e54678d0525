"""Records the last few steps of a rank: when it ran which instruction, and its groups' calls.

    step       │ 0F0 │ 0F1 │   0B0   │ 0F2 │      spans: instructions of the step's program
    pp           [send 1.0 MB]  [send 1.0 MB]     calls: on the threads of the groups
    dp                                 [reduce_scatter 8.4 MB]

A run writes these traces when it saves (`plan/trace_file.py`), and `howdah trace` draws them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from howdah.plan.recording import Call, Span, StepTrace
from howdah.plan.schedule.lowering import Instruction

KEPT = 8  # steps


class Recorder:
    """The traces of the last KEPT steps of one process. Nothing is recorded outside of a step."""

    def __init__(self) -> None:
        self.steps: deque[StepTrace] = deque(maxlen=KEPT)
        self._step: StepTrace | None = None

    @property
    def runs(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records the block as step `number`."""
        step = self._step = StepTrace(number, perf_counter())
        try:
            yield
        finally:
            self._step = None
        self.steps.append(step)

    @contextmanager
    def span(self, instruction: Instruction) -> Iterator[None]:
        """Records the block as the span of one instruction."""
        began = perf_counter()
        yield
        self.note(instruction, began)

    def note(self, instruction: Instruction, began: float) -> None:
        """Records an instruction that has just ended; `began` is perf_counter() at its start."""
        if step := self._step:
            step.spans.append(Span(instruction, began - step.began, perf_counter() - step.began))

    def call(self, axis: str, operation: str, *, sent: int, began: float, ended: float) -> None:
        """Records an operation of a group: bytes sent, and perf_counter() at its start and end."""
        if step := self._step:
            call = Call(axis, operation, sent, began - step.began, ended - step.began)
            step.calls.append(call)
