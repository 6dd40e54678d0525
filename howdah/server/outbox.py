"""The queue of what one connection sends: the most urgent first, with a window of bytes in flight.

    posted         push 9 (1 MB)   push 2 (1 MB)   pull 0
    sent           pull 0          push 2          push 9      acknowledged: 0 bytes so far
    window 1 MB    sent            sent            waits for the acknowledgement of push 2

What has a size waits until the bytes that were sent and not acknowledged fit in the window; one
chunk may always be under way. So a more urgent chunk, posted later, waits behind a window at most,
not behind all that was posted before (Peng et al. 2019, https://i.cs.hku.hk/~cwu/papers/yhpeng-sosp19.pdf).
What has no size (pulls, acknowledgements) never waits, or workers could wait for each other.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from threading import Condition
from time import monotonic
from typing import NamedTuple

from howdah.server.messages import PING, SILENCE, Fields

WINDOW = 8 << 20  # bytes
PULSE = SILENCE / 4  # seconds without a letter, after which a PING is sent


class Letter(NamedTuple):
    """A message to be sent; of two, the one with the lower place is first.

    place  urgency, then the order of posting
    size   bytes that count in the window
    """

    place: tuple[int, int]
    kind: int
    fields: bytes
    buffers: Sequence[memoryview]
    size: int


class Outbox:
    """Letters of one connection: any thread posts, one thread takes.

    window  bytes that may be under way
    fifo    whether the order of posting alone counts
    pulse   seconds without a letter, after which a PING is taken
    deepest  the most letters that waited at once
    """

    def __init__(self, *, window: int = WINDOW, fifo: bool = False, pulse: float = PULSE) -> None:
        self._window, self._fifo, self._pulse = window, fifo, pulse
        self._small: list[Letter] = []
        self._large: list[Letter] = []
        self._flying, self._posted, self._closed = 0, 0, False
        self._last = False
        self._changed = Condition()
        self.deepest = 0

    def post(
        self,
        kind: int,
        fields: bytes = b"",
        buffers: Sequence[memoryview] = (),
        *,
        urgency: int = 0,
        size: int = 0,
    ) -> None:
        """Queues a letter. The lower the urgency's number, the earlier it is sent."""
        with self._changed:
            self._posted += 1
            place = 0 if self._fifo else urgency, self._posted
            queue = self._large if size else self._small
            heappush(queue, Letter(place, kind, fields, buffers, size))
            self.deepest = max(self.deepest, len(self._small) + len(self._large))
            self._changed.notify_all()

    def take(self) -> Letter | None:
        """Waits for the next letter that may be sent, or for a PING that is due; None: the outbox
        is closed.
        """
        with self._changed:
            due = monotonic() + self._pulse
            while not self._closed:
                if self._small:
                    return heappop(self._small)
                if self._large and self._fits(self._large[0].size):
                    self._flying += self._large[0].size
                    return heappop(self._large)
                if self._last and not self._large:
                    return None
                if monotonic() >= due:
                    return Letter((0, 0), PING, Fields().packed, (), 0)
                self._changed.wait(due - monotonic())
            return None

    def _fits(self, size: int) -> bool:
        return not self._flying or self._flying + size <= self._window

    def landed(self, size: int) -> None:
        """So many bytes were acknowledged."""
        with self._changed:
            self._flying -= size
            self._changed.notify_all()

    def finish(self) -> None:
        """Lets `take` return None when all letters are taken."""
        with self._changed:
            self._last = True
            self._changed.notify_all()

    def close(self) -> None:
        """Lets `take` return None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
