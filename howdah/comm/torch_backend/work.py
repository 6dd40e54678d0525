"""Work: what calls of the torch backend return, and in which order they run.

    group.allreduce([x])             runs on the caller's thread, behind all calls before it
    work = … with async_op=True      queued; the lane's thread runs it, or who waits for it first
    work.wait()

The calls of one lane run one at a time, in their order. A thread that waits runs what is queued
itself, up to what it waits for. The lane's thread is woken only if nobody has come for a call
within GRACE (`alarm.py`).
"""

import atexit
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from threading import Lock, Thread, current_thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from howdah.comm.signature import caller
from howdah.comm.torch_backend.alarm import NOW, OFF, Alarm, spec
from howdah.comm.torch_backend.untraced import untraced

Future: TypeAlias = "torch.futures.Future[Any]"
Results = Sequence[Any]  # the tensors that a call wrote
GRACE = 500e-6  # seconds: DTensor waits some 100 us behind its call
FOREVER = timedelta(0)  # torch's word for: no time-out of its own


@untraced
class Work(dist.Work):
    """A call that has been made."""

    def __init__(self, results: Results) -> None:
        super().__init__()
        self._results: list[Any] = list(results)
        self.error: BaseException | None = None
        self.source = -1  # the rank that sent, of a message from anywhere
        self._ends: Future | None = None
        self._future: Future

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Returns when the call is done. Raises its error."""
        return True

    def is_completed(self) -> bool:
        """Whether the call has ended, also with an error."""
        return True

    def is_success(self) -> bool:
        """Whether the call has ended without an error."""
        return self.is_completed() and self.error is None

    def exception(self) -> BaseException | None:
        """The error of the call."""
        return self.error

    def result(self) -> list[Tensor]:
        """The tensors that were written."""
        self.wait()
        return self._results

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        return self.source

    def get_future(self) -> Future:
        """A future of the tensors, for DDP and its hooks."""
        if self._ends is None:
            self._ends, self._future = self._futures()
            self._ends.set_result(None)
        return self._future

    def _futures(self) -> tuple[Future, Future]:
        """One that is set at the end of the call, and one of its tensors, or of its error.

        `Future.set_exception` is for Python alone: C++ takes the exception for a list of tensors,
        and DDP ends the process by a segmentation fault. An error of a callback is one for both.
        """
        ends: Future = torch.futures.Future()
        return ends, ends.then(self._value)

    def _value(self, _: object) -> list[Any]:
        if self.error is not None:
            raise self.error
        return self._results


@untraced
class Queued(Work):
    """A call that runs later."""

    def __init__(self, lane: "Lane | None", job: Callable[[], None], results: Results) -> None:
        super().__init__(results)
        self.site, self._lane, self._job = caller(), lane, job
        self._lock, self._gate = Lock(), Lock()
        self._ended = self.has_run = False
        self._gate.acquire()  # opened at the end

    def run(self) -> None:
        """Runs it, once."""
        try:
            self._job()
        except BaseException as raised:
            self.error = raised
        self._job = _nothing  # its tensors are let go
        self.has_run = True

    def end(self) -> None:
        """Wakes those who wait, and runs the callbacks of its future: they may make calls, and wait
        for them, so the lane must be free.
        """
        with self._lock:
            if not self._ended:
                self._ended = True
                self._gate.release()
            ends = self._ends
        if ends is not None:
            ends.set_result(None)

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """Runs what is queued up to this, or waits for the thread that does."""
        if not self._ended:
            if timeout > FOREVER:
                if not self._passes(timeout.total_seconds()):
                    raise RuntimeError(f"the call at {self.site} is not done after {timeout}")
            elif self._lane is not None:
                self._lane.finish(self)
                if not self.has_run:
                    self._passes()
            else:
                self._passes()
        if self.error is not None:
            raise self.error
        return True

    def _passes(self, seconds: float = -1) -> bool:
        """Whether the end comes within these seconds; -1: it is waited for."""
        if ended := self._gate.acquire(timeout=seconds):
            self._gate.release()
        return ended

    def is_completed(self) -> bool:
        return self.has_run or self._ended

    def get_future(self) -> Future:
        if self._lane is not None and self._lane.is_here:  # who waits for it is who runs it
            self._lane.finish(self)
        elif self._lane is not None and not self.has_run:  # nobody who waits for it runs it
            self._lane.hurry()
        with self._lock:
            if self._ends is None:
                self._ends, self._future = self._futures()
                if self._ended:
                    self._ends.set_result(None)
        return self._future


@untraced
class Several(Work):
    """Several calls as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([one for work in works for one in work._results])
        self._works = works

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class Lane:
    """Calls that run one at a time, in their order.

    starts  called with the line of a call before it runs, and with nothing after it
    grace   seconds after which the lane's thread runs a call for which nobody waits
    """

    def __init__(self, name: str, starts: Callable[[str], None], grace: float = GRACE) -> None:
        self._name, self._starts, self._delay = name, starts, spec(grace)
        self._turn, self._queue = Lock(), deque[Queued]()
        self._door = Lock()  # of the queue and the alarm together
        self._alarm: Alarm | None = None  # of the thread, made with it
        self._thread: Thread | None = None
        self._open = True

    def now(self, job: Callable[[], None]) -> None:
        """Runs a call on this thread, behind those that are queued."""
        ran: list[Queued] = []
        try:
            with self._turn:
                while self._queue:
                    ran.append(self._next())
                job()
        finally:
            for one in ran:
                one.end()

    def later(self, job: Callable[[], None], results: Results) -> Queued:
        """Queues a call."""
        work = Queued(self, job, results)
        with self._door:
            self._queue.append(work)
            if self._alarm is None:
                self._alarm = Alarm()
                self._thread = Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
                atexit.register(self._at_exit)
            if len(self._queue) == 1:
                self._alarm.set(self._delay)
        return work

    def finish(self, work: Queued) -> None:
        """Runs what is queued, up to `work`."""
        ran: list[Queued] = []
        with self._turn:
            while self._queue and not work.has_run:
                ran.append(self._next())
        for one in ran:
            one.end()

    def hurry(self) -> None:
        """Wakes the thread for what is queued."""
        with self._door:
            if self._queue and self._alarm is not None:
                self._alarm.set(NOW)

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the lane."""
        return current_thread() is self._thread

    @property
    def busy(self) -> bool:
        """Whether a call runs, or waits."""
        return self._turn.locked() or bool(self._queue)

    def close(self) -> None:
        """Ends the thread behind what is queued."""
        with self._door:
            self._open = False
        if self._alarm is not None and self._thread is not None:
            self._alarm.set(NOW)
            atexit.unregister(self._at_exit)
            self._thread.join()
            self._alarm.close()
            self._thread = self._alarm = None

    def _at_exit(self) -> None:
        """Ends a thread that has callbacks of finished calls left and nothing else: Python stops
        daemon threads at any line, and one stopped inside C++ aborts the process.
        """
        if not self.busy:
            self.close()

    def _next(self) -> Queued:
        """Runs the first of the queue. With the last one, its thread need not come."""
        with self._door:
            work = self._queue.popleft()
            if not self._queue and self._open and self._alarm is not None:
                self._alarm.set(OFF)
        self._starts(work.site)
        try:
            work.run()
        finally:
            self._starts("")
        return work

    def _serve(self) -> None:
        alarm = self._alarm
        assert alarm is not None
        while self._open or self._queue:
            alarm.wait()
            while self._queue:
                ran = None
                with self._turn:
                    if self._queue:
                        ran = self._next()
                if ran is not None:
                    ran.end()


def _nothing() -> None:
    """In place of a job that is done."""
