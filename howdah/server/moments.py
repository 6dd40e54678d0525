"""When units and chunks were pushed and pulled, for a trace.

worker   push of layers.0   from its first chunk that is posted to the last acknowledgement
         pull of layers.0   from its first chunk that is asked for to the last that has come
server   push of layers.0   from the head of a chunk's frame until it is applied, or waits for
                            others of its round
         pull of layers.0   from the wish for a chunk until it is answered: how long it waited
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from howdah.base.stopwatch import HOST, Interval

# is called with a peer, what was done, its bytes, and when: `Recorder.call`
Record = Callable[[str, str, int, Interval], None]


def nobody(peer: str, what: str, size: int, took: Interval) -> None:
    """Records nothing."""


class Message(NamedTuple):
    """What is under way: with whom, what, and of which clock."""

    peer: str
    what: str
    clock: int


@dataclass
class _Open:
    began: float
    chunks: int
    size: int


class Moments:
    """What is under way, until all of its chunks have come."""

    def __init__(self, record: Record = nobody) -> None:
        self._record = record
        self._open: dict[Message, _Open] = {}

    def begin(self, message: Message, *, chunks: int = 1, size: int = 0) -> None:
        """A message of so many chunks begins; one that is under way has begun already."""
        if chunks and message not in self._open:
            self._open[message] = _Open(HOST.mark(), chunks, size)

    def end(self, message: Message, *, size: int = 0) -> None:
        """A chunk of so many bytes has come; one that no message awaits is not counted."""
        one = self._open.get(message)
        if one is None:
            return
        one.chunks, one.size = one.chunks - 1, one.size + size
        if not one.chunks:
            self._open.pop(message, None)
            took = Interval(HOST, one.began, HOST.mark())
            self._record(message.peer, message.what, one.size, took)

    def forget(self, peer: str) -> None:
        """Drops the messages with a peer, which will not come."""
        for message in [*self._open]:  # threads add to it meanwhile
            if message.peer == peer:
                self._open.pop(message, None)
