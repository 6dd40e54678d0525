"""The queue of what one connection sends: the most urgent first, with a window of bytes in flight.

    posted         push 9 (1 MB)   push 2 (1 MB)   pull 0
    sent           pull 0          push 2          push 9      acknowledged: 0 bytes so far
    window 1 MB    sent            sent            waits for the acknowledgement of push 2

What has a size waits until the bytes that were sent and not acknowledged fit in the window; one
chunk may always be under way. So a more urgent chunk, posted later, waits behind a window at most,
not behind all that was posted before (Peng et al. 2019, https://i.cs.hku.hk/~cwu/papers/yhpeng-sosp19.pdf).
What has no size (pulls, acknowledgements) never waits, or workers could wait for each other.

A thread of its own sends (`carry`). While it has nothing to do, a short letter is sent by the
thread that posts it, if the socket takes it at once: to wake another takes longer than to send.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from select import POLLOUT, poll
from threading import Condition
from time import monotonic
from typing import NamedTuple

from howdah.comm.frames import FrameError, Frames
from howdah.server.messages import PING, REFUSED, SILENCE, Fields

WINDOW = 8 << 20  # bytes
PULSE = SILENCE / 4  # seconds without a letter, after which a PING is sent
SHORT = 4 << 10  # bytes that a socket takes at once, if it takes any
MOMENT = 0.001  # seconds, the least wait


class Letter(NamedTuple):
    """A message to be sent; of two, the one with the lower place is first.

    place  urgency, then the order of posting
    size   bytes that count in the window
    sent   called when the buffers are not used any more
    """

    place: tuple[int, int]
    kind: int
    fields: bytes
    buffers: Sequence[memoryview] = ()
    size: int = 0
    sent: Callable[[], None] | None = None


class Outbox:
    """Letters of one connection: any thread posts, one thread carries.

    window  bytes that may be under way
    fifo    whether the order of posting alone counts
    pulse   seconds without a letter, after which a PING is sent
    deepest  the most letters that waited at once
    """

    def __init__(self, *, window: int = WINDOW, fifo: bool = False, pulse: float = PULSE) -> None:
        self._window, self._fifo, self._pulse = window, fifo, pulse
        self._small: list[Letter] = []
        self._large: list[Letter] = []
        self._flying, self._posted, self._closed = 0, 0, False
        self._last = False
        self._changed = Condition()
        self._due = monotonic() + pulse
        self._frames: Frames | None = None  # once a thread carries
        self._waits = False  # that thread, for a letter
        self._lent = False  # a thread that posts sends in its place
        self._poll = poll()
        self.deepest = 0

    def post(
        self,
        kind: int,
        fields: bytes = b"",
        buffers: Sequence[memoryview] = (),
        *,
        urgency: int = 0,
        size: int = 0,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Queues a letter, or sends it. The lower the urgency's number, the earlier it is sent."""
        with self._changed:
            self._posted += 1
            place = 0 if self._fifo else urgency, self._posted
            queue = self._large if size else self._small
            heappush(queue, Letter(place, kind, fields, buffers, size, sent))
            self.deepest = max(self.deepest, len(self._small) + len(self._large))
            if not self._may_send():
                self._changed.notify_all()
                return
            self._lent, letter = True, self._taken()
        self._send(letter)
        with self._changed:
            self._lent = False
            if self._small or self._large or self._last or self._closed:
                self._changed.notify_all()

    def carry(self, frames: Frames, refusal: Callable[[], str] = str) -> None:
        """Sends what is posted until the outbox is closed or the connection ends; ends it then.

        refusal  what the other end is told last, if anything
        """
        with self._changed:
            self._frames = frames
            self._poll.register(frames, POLLOUT)
        while (letter := self.take()) is not None:
            self._send(letter)
        with suppress(FrameError, OSError):
            if said := refusal():
                frames.send(REFUSED, said.encode()[: 1 << 12])
            frames.sock.shutdown(socket.SHUT_RDWR)

    def take(self) -> Letter | None:
        """Waits for the next letter that may be sent, or for a PING that is due; None: the outbox
        is closed.
        """
        with self._changed:
            while not self._closed:
                if not self._lent:
                    if self._ready():
                        return self._taken()
                    if self._last and not self._large:
                        return None
                    if monotonic() >= self._due:
                        self._due = monotonic() + self._pulse
                        return Letter((0, 0), PING, Fields().packed)
                self._waits = True
                self._changed.wait(max(self._due - monotonic(), MOMENT))
                self._waits = False
            return None

    def _ready(self) -> list[Letter]:
        """The queue whose first letter may be sent now; empty: there is none."""
        if self._small or not self._large:
            return self._small
        size = self._large[0].size
        return self._large if not self._flying or self._flying + size <= self._window else []

    def _taken(self) -> Letter:
        letter = heappop(self._ready())
        self._flying += letter.size
        self._due = monotonic() + self._pulse
        return letter

    def _may_send(self) -> bool:
        """Whether who posts may send the next letter: nobody sends, and the socket takes it."""
        if not self._waits or self._lent or self._closed or not (queue := self._ready()):
            return False
        letter = queue[0]
        short = len(letter.fields) + sum(part.nbytes for part in letter.buffers) <= SHORT
        return short and bool(self._poll.poll(0))

    def _send(self, letter: Letter) -> None:
        assert self._frames is not None
        try:
            self._frames.send(letter.kind, letter.fields, letter.buffers)
        except (FrameError, OSError):
            self.close()
            with suppress(OSError):  # who reads hears of it
                self._frames.sock.shutdown(socket.SHUT_RDWR)
        if letter.sent:
            letter.sent()

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
