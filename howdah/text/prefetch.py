"""Prefetching: the next batches are read in a thread while the devices compute on this one.

    thread   read 0 | read 1 | read 2 |  room for 2: waits  | read 3 ...
    loop             step 0 ......................... step 1 .......

A thread is enough: reading a batch is a few large copies, during which numpy releases the
interpreter lock. A batch is a function of the step alone, so nothing is lost when the loop stops:
the batches read ahead are dropped, and a later run reads them again.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from howdah.base.stopwatch import Stopwatch

T = TypeVar("T")


class Prefetch(Generic[T]):
    """Calls `read(step)`, `read(step + 1)`, ... in a thread, at most `depth` batches ahead.

    An exception of `read` is raised by the `next` that would have returned its result, and by
    every later `next`. `waited` runs while `next` waits.
    """

    def __init__(self, read: Callable[[int], T], *, step: int = 0, depth: int = 2) -> None:
        self.waited = Stopwatch()
        self._read = read
        self._ready: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(step,), name="howdah-prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, step: int) -> None:
        while self._room.acquire() and not self._closed.is_set():
            try:
                self._ready.put((self._read(step), None))
            except BaseException as error:  # `next` raises it in the caller's thread
                self._ready.put((None, error))
                return
            step += 1

    def next(self) -> T:
        """Returns the batch of the next step; waits for it if it is not ready."""
        if self._closed.is_set():
            raise ValueError("this Prefetch is closed")
        with self.waited:
            batch, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))
            raise error
        self._room.release()
        return batch  # type: ignore[return-value]  # a T when there is no error

    def close(self) -> None:
        """Ends the thread once it has read its current batch. Closing twice is allowed."""
        self._closed.set()
        self._room.release()
        self._thread.join()
