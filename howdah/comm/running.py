"""Runs the operations of one group, in the order of their calls, and counts what they send.

    a CPU tensor            on the caller's thread; asynchronous ones on the progress thread
    a GPU's tensor          on the transport's lane, if it has one for this GPU: only the GPU waits
    … without a lane        through pinned memory of the host, as a CPU tensor

A synchronous operation on a thread waits for the asynchronous ones, so the group's transport runs
one operation at a time.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.stopwatch import HOST, Interval
from howdah.comm.counters import Counters, add
from howdah.comm.handle import DONE, Handle, OnThread
from howdah.comm.lane import CudaStreams, Landing, Lane
from howdah.comm.signature import caller
from howdah.comm.staging import DIRECT, Pinned, Stage, pinned
from howdah.comm.transport import Transport
from howdah.plan.recording import Traffic

Sent = int | dict[str, int]  # bytes; of an all-reduce, those of its two halves by name
Work = Callable[[Stage], Sent]  # an operation on tensors that the stage brings to the transport


class Runner:
    """Runs and counts the operations of a group along `axis`."""

    def __init__(self, transport: Transport, axis: str, counters: Counters) -> None:
        self._transport, self._axis, self._counters = transport, axis, counters
        self._table, self._recorder = counters.table(), counters.recorder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{axis}-progress")
        self._last: Handle | None = None
        self._pinned: Pinned | None = None

    def __call__(
        self,
        operation: str,
        work: Work,
        tensors: Sequence[Tensor] = (),
        async_op: bool = False,
        after: Handle = DONE,
    ) -> Handle:
        """Runs an operation on `tensors`, all of which are on one device.

        after  what it follows, besides the group's earlier operations
        """
        if after is not DONE and not isinstance(after, Handle):
            raise UserError(f"an operation comes after a handle, not after {after!r}")
        if any(x.device != tensors[0].device for x in tensors):
            raise UserError(f"{operation}: the tensors of one call are on one device")
        lane = self._transport.lane_of(tensors[0]) if tensors else None
        if lane is not None:
            landing = self._on_lane(lane, operation, work, tensors, after)
            if not async_op:
                landing.result()
            return landing
        if not tensors or tensors[0].is_cpu:
            return self._on_host(partial(self._count, operation, work, DIRECT), async_op, after)
        if self._transport.size == 1:  # nothing is sent: the compute stream does it
            after.result()
            work(DIRECT)
            return DONE
        return self._through_host(operation, work, tensors[0], async_op, after)

    def settle(self) -> None:
        """Waits for the operations on the progress thread: then the wire of the host is free."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def close(self) -> None:
        """Ends the progress thread after it has finished all started operations."""
        self._thread.shutdown()

    def _on_host(self, job: Callable[[], None], async_op: bool, after: Handle) -> Handle:
        if async_op:
            try:
                self._last = OnThread(self._thread.submit(self._for, caller(), job, after))
            except RuntimeError:
                raise UserError("this group is closed: it starts nothing more") from None
            return self._last
        if after is not DONE:
            after.result()
        self.settle()
        job()
        return DONE

    def _for(self, site: str, job: Callable[[], None], after: Handle) -> None:
        """Runs an operation on the progress thread. `site` is the line that called it."""
        after.result()
        self._transport.site = site
        try:
            job()
        finally:
            self._transport.site = ""

    def _count(self, operation: str, work: Work, stage: Stage) -> None:
        """Runs an operation on this thread, and counts it."""
        began = HOST.mark()
        rows = self._rows(operation, work(stage), self._transport.link)
        took = Interval(HOST, began, HOST.mark())
        add(self._table, rows, took.seconds)
        self._record(operation, rows, took)

    def _through_host(
        self, operation: str, work: Work, x: Tensor, async_op: bool, after: Handle
    ) -> Handle:
        stage = self._pinned = self._pinned or Pinned(CudaStreams(x.device), pinned)
        called = stage.called()

        def job() -> None:
            stage.begin(called)
            self._count(operation, work, stage)

        return self._on_host(job, async_op, after)

    def _on_lane(
        self, lane: Lane, operation: str, work: Work, tensors: Sequence[Tensor], after: Handle
    ) -> Landing:
        sent: Sent = 0

        def launch() -> None:
            nonlocal sent
            sent = work(DIRECT)

        if self._transport.checked:  # calls are compared over the wire of the host
            self.settle()
        landing = lane.start(launch, tensors, after=after, site=caller())
        rows = self._rows(operation, sent, self._transport.link_of(tensors[0]))
        took = Interval(lane.clock, landing.began, landing.ended)
        add(self._table, rows, 0.0)
        self._counters.time_later(self._table, rows, took)
        self._record(operation, rows, took)
        return landing

    def _rows(self, operation: str, sent: Sent, link: str) -> dict[Traffic, int]:
        """The rows of the table for a call that sent so many bytes over a link."""
        parts = {operation: sent} if isinstance(sent, int) else sent
        return {Traffic(self._axis, part, link): count for part, count in parts.items()}

    def _record(self, operation: str, rows: dict[Traffic, int], took: Interval) -> None:
        if self._recorder.runs:
            self._recorder.call(self._axis, operation, sum(rows.values()), took)
