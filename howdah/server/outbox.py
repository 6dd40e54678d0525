"""The queue of what one connection sends: the most urgent first, with a window of bytes in flight.

    posted         push 9 (1 MB)   push 2 (1 MB)   pull 0
    sent           pull 0          push 2          push 9      acknowledged: 0 bytes so far
    window 1 MB    sent            sent            waits for the acknowledgement of push 2

What has a size waits until the bytes that were sent and not acknowledged fit in the window; one
chunk may always be under way. So a more urgent chunk, posted later, waits behind a window at most,
not behind all that was posted before (Peng et al. 2019, https://i.cs.hku.hk/~cwu/papers/yhpeng-sosp19.pdf).
The kernel keeps little of it (`frames.UNSENT`): there, all goes in turn. What has no size (pulls,
acknowledgements) never waits, or workers could wait for each other.

A thread of its own sends (`carry`). While it has nothing to do, short letters are sent by the
thread that posts them, if the socket takes them at once: to wake another takes longer than to send.
Short letters that wait leave in one system call.
"""

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from select import POLLOUT, poll
from time import monotonic
from typing import NamedTuple

from howdah.comm.frames import HEADER, FrameError, Frames
from howdah.plan.comm import Comm
from howdah.server.awaited import Awaited
from howdah.server.messages import PING, REFUSED, SILENCE, Fields

WINDOW = Comm().push_window  # bytes
PULSE = SILENCE / 4  # seconds without a letter, after which a PING is sent
SHORT = 4 << 10  # bytes of one system call that a socket takes at once, if it takes any
MOMENT = 0.001  # seconds, the least wait


class Letter(NamedTuple):
    """A message to be sent.

    urgency  the lower the number, the earlier it is sent; of two, the one that was posted first
    size     bytes that count in the window
    sent     called when the buffers are not used any more
    """

    kind: int
    fields: bytes = b""
    buffers: Sequence[memoryview] = ()
    urgency: int = 0
    size: int = 0
    sent: Callable[[], None] | None = None

    @property
    def bytes(self) -> int:
        """What its frame takes."""
        return HEADER.size + len(self.fields) + sum(part.nbytes for part in self.buffers)


Queue = list[tuple[tuple[int, int], Letter]]  # a heap, by urgency and the order of posting


class Outbox:
    """Letters of one connection: any thread posts, one thread carries.

    window  bytes that may be under way
    fifo    whether the order of posting alone counts
    pulse   seconds without a letter, after which a PING is sent
    deepest  the most letters that waited at once
    """

    def __init__(self, *, window: int = WINDOW, fifo: bool = False, pulse: float = PULSE) -> None:
        self._window, self._fifo, self._pulse = window, fifo, pulse
        self._small: Queue = []
        self._large: Queue = []
        self._flying, self._posted, self._closed = 0, 0, False
        self._last = False
        self._changed = Awaited()
        self._due = monotonic() + pulse
        self._frames: Frames | None = None  # once a thread carries
        self._waits = False  # that thread, for a letter
        self._lent = False  # a thread that posts sends in its place
        self._poll = poll()
        self.deepest = 0

    def post(self, *letters: Letter) -> None:
        """Queues letters, or sends them."""
        with self._changed:
            for letter in letters:
                self._posted += 1
                place = 0 if self._fifo else letter.urgency, self._posted
                heappush(self._large if letter.size else self._small, (place, letter))
            self.deepest = max(self.deepest, len(self._small) + len(self._large))
            if not self._may_send():
                return
            self._lent, taken = True, self._taken()
        try:
            self._send(taken)
        finally:
            with self._changed:
                self._lent = False

    @property
    def waiting(self) -> int:
        """How many letters wait now."""
        with self._changed:
            return len(self._small) + len(self._large)

    @property
    def closed(self) -> bool:
        """Whether nothing is sent any more."""
        return self._closed

    def carry(self, frames: Frames, refusal: Callable[[], str] = str) -> None:
        """Sends what is posted until the outbox is closed or the connection ends; ends it then.

        refusal  what the other end is told last, if anything
        """
        with self._changed:
            self._frames = frames
            self._poll.register(frames, POLLOUT)
        while letters := self.take():
            self._send(letters)
        with suppress(FrameError, OSError):
            if said := refusal():
                frames.send(REFUSED, said.encode()[: 1 << 12])
            frames.sock.shutdown(socket.SHUT_RDWR)

    def take(self) -> list[Letter]:
        """Waits for the next letters that may be sent, or for a PING that is due; none: the outbox
        is closed.
        """
        while True:
            with self._changed:
                self._waits = False
                if not self._lent:  # who posts may be in the middle of a frame
                    if self._closed:
                        return []
                    if self._ready():
                        return self._taken()
                    if self._last and not self._large:
                        return []
                    if monotonic() >= self._due:
                        self._due = monotonic() + self._pulse
                        return [Letter(PING, Fields().packed)]
                self._waits = True
                pause = max(self._due - monotonic(), MOMENT)
            self._changed.wait(self._called, pause)

    def _called(self) -> bool:
        """Whether the thread that sends has something to do."""
        done = self._closed or (self._last and not self._large)
        return not self._lent and (done or bool(self._ready()))

    def _ready(self) -> Queue:
        """The queue whose first letter may be sent now; empty: there is none."""
        if self._small or not self._large:
            return self._small
        size = self._large[0][1].size
        return self._large if not self._flying or self._flying + size <= self._window else []

    def _taken(self) -> list[Letter]:
        """The next letter, and those behind it that are short enough to go with it."""
        found, room = list[Letter](), SHORT
        while (queue := self._ready()) and (not found or queue[0][1].bytes <= room):
            _, letter = heappop(queue)
            self._flying += letter.size
            room -= letter.bytes
            found.append(letter)
        self._due = monotonic() + self._pulse
        return found

    def _may_send(self) -> bool:
        """Whether who posts may send the next letter: nobody sends, and the socket takes it."""
        if not self._waits or self._lent or self._closed or not (queue := self._ready()):
            return False
        return queue[0][1].bytes <= SHORT and bool(self._poll.poll(0))

    def _send(self, letters: Sequence[Letter]) -> None:
        assert self._frames is not None
        try:
            self._frames.send_all((one.kind, one.fields, one.buffers) for one in letters)
        except (FrameError, OSError):
            self.close()
            with suppress(OSError):  # who reads hears of it
                self._frames.sock.shutdown(socket.SHUT_RDWR)
        for letter in letters:
            if letter.sent:
                letter.sent()

    def landed(self, size: int) -> None:
        """So many bytes were acknowledged."""
        with self._changed:
            self._flying -= size

    def finish(self) -> None:
        """Lets `take` return nothing when all letters are taken."""
        with self._changed:
            self._last = True

    def close(self) -> None:
        """Lets `take` return nothing."""
        with self._changed:
            self._closed = True
