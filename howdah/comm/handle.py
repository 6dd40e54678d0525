"""Handles: what an operation of a group returns when it has been started.

    handle = group.reduce_scatter(flats, async_op=True)
    ...                            nobody writes what is sent, or touches what is received
    handle.result()                from here on, later work sees the result

On the CPU, a progress thread runs the operation, and `result` waits for the thread. On a GPU, a
stream of its own runs it (`lane.py`), and `result` makes the compute stream wait, not the host.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, runtime_checkable

from howdah.base.errors import UserError
from howdah.base.stopwatch import HOST

Note = Callable[[Any], None]  # called with the mark (`base/stopwatch.py`) of the operation's end


@runtime_checkable
class Handle(Protocol):
    """An operation that has been started."""

    def result(self) -> None:
        """Orders all later work behind the operation. Raises the error of an operation that
        failed.
        """
        ...

    def then(self, note: Note) -> None:
        """Calls `note` with the mark of the operation's end, once that is known."""
        ...

    def done(self) -> bool:
        """Whether the operation has ended; never waits."""
        ...


class Ended:
    """The handle of an operation that has ended."""

    def result(self) -> None:
        """Returns at once."""

    def then(self, note: Note) -> None:
        """Calls `note` at once."""
        note(HOST.mark())

    def done(self) -> bool:
        """True."""
        return True


class OnThread:
    """The handle of an operation on a progress thread."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def result(self) -> None:
        """Waits for the thread."""
        self._future.result()

    def then(self, note: Note) -> None:
        """Calls `note` on the progress thread."""
        self._future.add_done_callback(lambda _: note(HOST.mark()))

    def done(self) -> bool:
        """Whether the thread has ended it."""
        return self._future.done()


DONE: Handle = Ended()


class Later:
    """The handle of an operation that starts when it is begun, or else waited for.

    start  starts it
    """

    def __init__(self, start: Callable[[], Handle]) -> None:
        self._start = start
        self._started: Handle | None = None

    def begin(self) -> Handle:
        """Starts the operation, once."""
        if self._started is None:
            self._started = self._start()
        return self._started

    def result(self) -> None:
        """Waits for it."""
        self.begin().result()

    def then(self, note: Note) -> None:
        """Calls `note` when it has ended."""
        self.begin().then(note)

    def done(self) -> bool:
        """Whether it has been started, and has ended."""
        return self._started is not None and self._started.done()


class Several:
    """The handle of several operations."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def result(self) -> None:
        """Waits for all of them. Raises the error of one."""
        for handle in self._handles:
            handle.result()

    def then(self, note: Note) -> None:
        """Calls `note` when the last of the list has ended; others may end later."""
        self._handles[-1].then(note)

    def done(self) -> bool:
        """Whether all of them have ended."""
        return all(handle.done() for handle in self._handles)


class OfBlock:
    """The handle of operations that start together at the end of a block; it is theirs from there.

    started  the handle of all of them; before the block has ended, one that refuses
    """

    def __init__(self) -> None:
        self.started: Handle = NotStarted()

    def result(self) -> None:
        """Waits for all operations. Raises the error of one."""
        self.started.result()

    def then(self, note: Note) -> None:
        """Calls `note` when all operations have ended."""
        self.started.then(note)

    def done(self) -> bool:
        """Whether all operations have ended."""
        return self.started.done()


class NotStarted(Ended):
    """In place of the handle of operations whose block has not ended, or has failed."""

    def result(self) -> None:
        """Refuses."""
        raise UserError("what is called inside of together() starts when the block has ended")

    def then(self, note: Note) -> None:
        """Refuses."""
        self.result()

    def done(self) -> bool:
        """False."""
        return False
