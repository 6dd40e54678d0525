"""Lanes: a GPU's stream for the operations of one communicator, beside the stream that computes.

    compute   ── fill a ──┬── other work ──────────┬── use a ──
                          │ start                  │ result
    lane                  └── reduce-scatter a ────┘

`start` orders the lane behind all work that the compute stream was given so far. `result` orders
what the compute stream is given later behind the operation. The host waits for neither, but for an
operation of a thread that `start` is to be behind. These are
the two edges that a progress thread has, with streams in place of threads: a program that is right
with one is right with the other. The rules, each with its test, are in docs/gpu.md.

A handle holds its tensors until `result`, and what `work` makes besides (`keep`), so that their
memory is not given to others meanwhile; `record_stream` is not needed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from time import monotonic
from typing import Any, Protocol

import torch
from torch import Tensor

from howdah.base.stopwatch import HOST, Clock
from howdah.comm.handle import DONE, Handle, Note


class Streams(Protocol):
    """The streams and events of one device, as torch.cuda has them."""

    def current(self) -> Any:
        """The stream that the calling thread computes on."""
        ...

    def new(self) -> Any:
        """A stream of high priority."""
        ...

    def inside(self, stream: Any) -> AbstractContextManager[Any]:
        """A block whose work goes to `stream`."""
        ...

    def event(self) -> Any:
        """An event, which keeps the time when it is passed."""
        ...


class CudaStreams:
    """The streams of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> Any:
        """The current stream of the calling thread."""
        return torch.cuda.current_stream(self._device)

    def new(self) -> Any:
        """A stream of high priority, so that messages start before the next kernel."""
        return torch.cuda.Stream(self._device, priority=-1)

    def inside(self, stream: Any) -> AbstractContextManager[Any]:
        """A block whose work goes to `stream`."""
        block: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return block

    def event(self) -> Any:
        """An event with a time."""
        return torch.cuda.Event(enable_timing=True)


class StreamClock:
    """A clock whose marks are events of the current stream."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def mark(self) -> Any:
        """An event behind the work that the current stream was given so far."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Seconds between two events, by the GPU's clock. The host waits for the later one."""
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a GPU; None for the CPU."""
    return None if device.type == "cpu" else CudaStreams(device)


def clock_of(device: torch.device) -> Clock:
    """The clock of what `device` computes."""
    return HOST if device.type == "cpu" else StreamClock(CudaStreams(device))


class Landing:
    """The handle of an operation on a lane.

    began, ended  events around it, as marks of a clock
    site          the line that started it
    since         monotonic() at its start
    """

    def __init__(self, lane: "Lane", held: Sequence[Tensor], site: str) -> None:
        self.site, self.since = site, monotonic()
        self.began: Any = lane.clock.mark()
        self.ended: Any = None
        self._lane, self._held = lane, [*held]

    def behind(self, stream: Any) -> None:
        """Orders what `stream` is given later behind the operation."""
        stream.wait_event(self.ended)

    def result(self) -> None:
        """Orders what is computed later behind the operation, and lets go of its tensors."""
        self._lane.check()
        self.behind(self._lane.streams.current())
        self._held = []

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Holds more tensors until `result`."""
        self._held += tensors

    def then(self, note: Note) -> None:
        """Calls `note` at once: the mark of the end is an event that the GPU has still to reach."""
        note(self.ended)

    def done(self) -> bool:
        """Whether the GPU has passed the end of the operation."""
        return bool(self.ended.query())


class Lane:
    """The stream of one communicator, on which its operations run in the order of their calls.

    check    raises the error of a communicator that was aborted
    flying   operations that the GPU may not have ended yet, the oldest first
    """

    def __init__(self, streams: Streams, check: Callable[[], None] = lambda: None) -> None:
        self.streams, self.check = streams, check
        self.clock: Clock = StreamClock(streams)
        self.flying: deque[Landing] = deque()
        self._stream = streams.new()
        self._starting: Landing | None = None

    def start(
        self,
        work: Callable[[], None],
        tensors: Sequence[Tensor],
        *,
        after: Handle = DONE,
        site: str = "",
    ) -> Landing:
        """Gives an operation to the lane, behind what was computed so far and behind `after`.

        work     calls the communicator; it must not wait
        tensors  what it reads and writes
        """
        self.check()
        self._stream.wait_stream(self.streams.current())
        if isinstance(after, Landing):
            after.behind(self._stream)
        else:
            after.result()
        with self.streams.inside(self._stream):
            landing = self._starting = Landing(self, tensors, site)
            work()
            landing.ended, self._starting = self.clock.mark(), None
        while self.flying and self.flying[0].done():
            self.flying.popleft()
        self.flying.append(landing)
        return landing

    def keep(self, tensors: Sequence[Tensor]) -> None:
        """Called by `work` with tensors that it has made, for the handle to hold."""
        if self._starting is not None:
            self._starting.keep(tensors)

    def oldest(self) -> Landing | None:
        """The first operation that the GPU has not ended; None if it has ended all. Any thread may
        ask.
        """
        with suppress(RuntimeError):  # another thread starts an operation just now
            return next((landing for landing in self.flying if not landing.done()), None)
        return None
