"""Records the last few steps of a rank: when it ran which instruction, and its groups' calls.

    step       │ 0F0 │ 0F1 │   0B0   │ 0F2 │      spans: instructions of the step's program
    pp           [send 1.0 MB]  [send 1.0 MB]     calls: on the threads of the groups
    dp                                 [reduce_scatter 8.4 MB]

A run writes these traces when it saves (`plan/trace_file.py`), and `howdah trace` draws them.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from howdah.base.stopwatch import HOST, Clock, Interval
from howdah.plan.recording import Call, Span, StepTrace
from howdah.plan.schedule.lowering import Instruction

KEPT = 8  # steps


@dataclass
class _Step:
    """A step as it is recorded: with marks in place of seconds.

    began    by the host's clock
    origins  its start by each clock
    """

    number: int
    began: float
    origins: dict[Clock, Any]
    spans: list[tuple[Instruction, Any, Any]] = field(default_factory=list)
    calls: list[tuple[str, str, int, Interval]] = field(default_factory=list)


class Recorder:
    """The traces of the last KEPT steps of one process. Nothing is recorded outside of a step.

    clock  that of what is computed
    """

    def __init__(self, clock: Clock = HOST) -> None:
        self.clock = clock
        self._steps: deque[_Step] = deque(maxlen=KEPT)
        self._step: _Step | None = None

    @property
    def runs(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    @property
    def steps(self) -> list[StepTrace]:
        """The traces, of which the last is the newest. Waits until the GPU has passed them."""
        return [self._resolve(step) for step in self._steps]

    def mark(self) -> Any:
        """A mark of the present moment, to give to `note`."""
        return self.clock.mark()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Records the block as step `number`."""
        origins = {HOST: HOST.mark(), self.clock: self.clock.mark()}
        step = self._step = _Step(number, perf_counter(), origins)
        try:
            yield
        finally:
            self._step = None
        self._steps.append(step)

    @contextmanager
    def span(self, instruction: Instruction) -> Iterator[None]:
        """Records the block as the span of one instruction."""
        began = self.clock.mark()
        yield
        self.note(instruction, began)

    def note(self, instruction: Instruction, began: Any, ended: Any = None) -> None:
        """Records an instruction between two marks; without `ended`, it has just ended."""
        if step := self._step:
            if ended is None or (isinstance(ended, float) and self.clock is not HOST):
                ended = self.clock.mark()  # a thread of the host has ended it: by its own clock
            step.spans.append((instruction, began, ended))

    def call(self, axis: str, operation: str, sent: int, took: Interval) -> None:
        """Records an operation of a group: the bytes that it sent, and when."""
        if step := self._step:
            step.calls.append((axis, operation, sent, took))

    def _resolve(self, step: _Step) -> StepTrace:
        """The step with seconds after its start, by the clock of each mark."""
        trace, clock = StepTrace(step.number, step.began), self.clock
        start = step.origins[clock]
        for instruction, began, ended in step.spans:
            ends = clock.seconds(start, began), clock.seconds(start, ended)
            trace.spans.append(Span(instruction, *ends))
        for axis, operation, sent, (clock, began, ended) in step.calls:
            start = step.origins.get(clock, step.origins[self.clock])
            ends = clock.seconds(start, began), clock.seconds(start, ended)
            trace.calls.append(Call(axis, operation, sent, *ends))
        return trace
