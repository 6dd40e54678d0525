"""Runs the operations of one group, in the order of their calls, and counts what they send.

    a CPU tensor            on the caller's thread; asynchronous ones on the progress thread
    a GPU's tensor          on the transport's lane, if it has one for this GPU: only the GPU waits
    … without a lane        through pinned memory of the host, as a CPU tensor

A synchronous operation on a thread waits for the asynchronous ones, so the group's transport runs
one operation at a time.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.stopwatch import HOST, Interval
from howdah.comm.chosen import near_sent
from howdah.comm.counters import Counters, add
from howdah.comm.engine import Engine
from howdah.comm.handle import DONE, Handle, OfBlock, OnThread
from howdah.comm.lane import CudaStreams, Landing, Lane
from howdah.comm.signature import caller
from howdah.comm.staging import DIRECT, Pinned, Scratch, Stage, pinned
from howdah.comm.transport import Transport
from howdah.plan.recording import Traffic

Sent = int | dict[str, int]  # bytes; of an all-reduce, those of its two halves by name
Calls = list[Callable[[], int | None]]  # calls of the transport, which return the bytes they sent
# An operation: it yields its calls, is sent their bytes once they are made, goes on with what
# follows them, and may return the bytes by name.
Steps = Generator[Calls, int, Any]
Work = Callable[[Stage], Steps]  # on tensors that the stage brings to the transport
Started = list[tuple[str, Work]]  # operations that start together, with their names
NEAR = Engine.link


class Made(NamedTuple):
    """Bytes that an operation sent, and those of them that went over shared memory beside the wire
    of a group that spans machines.
    """

    sent: Sent
    near: int


class Runner:
    """Runs and counts the operations of a group along `axis`.

    scratch  memory for narrow copies, by device
    """

    def __init__(self, transport: Transport, axis: str, counters: Counters) -> None:
        self._transport, self._axis, self._counters = transport, axis, counters
        self._table, self._recorder = counters.table(), counters.recorder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{axis}-progress")
        self._last: Handle | None = None
        self._pinned: Pinned | None = None
        self.scratch: dict[torch.device, Scratch] = defaultdict(Scratch)
        self._open: tuple[Started, list[Tensor], OfBlock] | None = None

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
        if self._open is None:
            return self._start([(operation, work)], tensors, async_op, after)
        started, of_all, handle = self._open
        if not tensors or after is not DONE:
            what = "follows no handle: the block does" if tensors else "starts alone"
            raise UserError(f"{operation}: inside of together() an operation {what}")
        started.append((operation, work))
        of_all += tensors
        return handle

    @contextmanager
    def together(self, async_op: bool, after: Handle) -> Iterator[OfBlock]:
        """Operations called inside are started together when the block ends, and not before. A
        block inside of another one is part of it.
        """
        if self._open is not None:
            if after is not DONE:
                raise UserError("together: a block inside of another one follows no handle")
            yield self._open[2]
            return
        block = self._open = list[tuple[str, Work]](), list[Tensor](), OfBlock()
        started, tensors, handle = block
        try:
            yield handle
        finally:
            self._open = None
        handle.started = self._start(started, tensors, async_op, after) if started else DONE

    def _start(
        self, started: Started, tensors: Sequence[Tensor], async_op: bool, after: Handle
    ) -> Handle:
        if isinstance(after, OfBlock):
            after = after.started
        if after is not DONE and not isinstance(after, Handle):
            raise UserError(f"an operation comes after a handle, not after {after!r}")
        if any(x.device != tensors[0].device for x in tensors):
            raise UserError(f"{started[0][0]}: the tensors of one call are on one device")
        lane = self._transport.lane_of(tensors[0]) if tensors else None
        if lane is not None:
            landing = self._on_lane(lane, started, tensors, after)
            if not async_op:
                landing.result()
            return landing
        if not tensors or tensors[0].is_cpu:
            return self._on_host(partial(self._count, started, tensors, DIRECT), async_op, after)
        if self._transport.size == 1:  # nothing is sent: the compute stream does it
            after.result()
            self._made(started, tensors, DIRECT)
            return DONE
        return self._through_host(started, tensors, async_op, after)

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

    def _count(self, started: Started, tensors: Sequence[Tensor], stage: Stage) -> None:
        """Runs operations on this thread, and counts them."""
        began = HOST.mark()
        sent = self._made(started, tensors, stage)
        took = Interval(HOST, began, HOST.mark())
        for rows in self._rows(started, sent, self._transport.link, took):
            add(self._table, rows, took.seconds / len(started))

    def _through_host(
        self, started: Started, tensors: Sequence[Tensor], async_op: bool, after: Handle
    ) -> Handle:
        streams = CudaStreams(tensors[0].device)
        stage = self._pinned = self._pinned or Pinned(streams, pinned)
        called = stage.called()

        def job() -> None:
            stage.begin(called)
            self._count(started, tensors, stage)

        return self._on_host(job, async_op, after)

    def _on_lane(
        self, lane: Lane, started: Started, tensors: Sequence[Tensor], after: Handle
    ) -> Landing:
        sent: list[Made] = []

        def launch() -> None:
            sent.extend(self._made(started, tensors, DIRECT))

        if self._transport.checked:  # calls are compared over the wire of the host
            self.settle()
        landing = lane.start(launch, tensors, after=after, site=caller())
        took = Interval(lane.clock, landing.began, landing.ended)
        total: Counter[Traffic] = Counter()
        link = self._transport.wire_of(tensors[0]).link
        for rows in self._rows(started, sent, link, took):
            add(self._table, rows, 0.0)
            total.update(rows)
        self._counters.time_later(self._table, total, took)
        return landing

    def _made(self, started: Started, tensors: Sequence[Tensor], stage: Stage) -> list[Made]:
        """Makes the calls of operations, several of them together; the bytes that each sent."""
        if tensors:
            self.scratch[tensors[0].device].begin()
        works = [work(stage) for _, work in started]
        calls = [next(work) for work in works]
        if len(calls) == len(calls[0]) == 1:
            sent = [self._called(calls[0])]
        else:
            wire = self._transport.wire_of(tensors[0]) if tensors else self._transport
            with wire.group():
                sent = [self._called(one) for one in calls]
        pairs = zip(works, sent, strict=True)
        return [Made(_ended(work, count), near) for work, (count, near) in pairs]

    def _called(self, calls: Calls) -> tuple[int, int]:
        """Makes the calls of an operation; the bytes that they send, and those of them that go over
        shared memory though the group spans machines.
        """
        before = near_sent(self._transport)
        sent = (calls[0]() or 0) if len(calls) == 1 else sum(call() or 0 for call in calls)
        return sent, near_sent(self._transport) - before

    def _rows(
        self, started: Started, sent: list[Made], link: str, took: Interval
    ) -> Iterator[dict[Traffic, int]]:
        """Yields the rows of the table for each operation, and records it."""
        for (operation, _), (count, near) in zip(started, sent, strict=True):
            parts = {operation: count} if isinstance(count, int) else count
            if self._recorder.runs:
                self._recorder.call(self._axis, operation, sum(parts.values()), took)
            rows = {Traffic(self._axis, part, link): count for part, count in parts.items()}
            if near:  # a program's, which is counted by the name of the operation
                rows[Traffic(self._axis, operation, link)] -= near
                rows[Traffic(self._axis, operation, NEAR)] = near
            yield rows


def _ended(work: Steps, sent: int) -> Sent:
    """Does what follows the calls of an operation; the bytes that it sent."""
    try:
        work.send(sent)
    except StopIteration as end:
        named: dict[str, int] | None = end.value
        return sent if named is None else named
    raise AssertionError("an operation yields its calls once")
