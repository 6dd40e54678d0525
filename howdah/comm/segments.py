"""Segments: what a message is cut into, and what each end of a line knows of the next frame.

message of 600 KB    CALL with its record and segment 0 | PART segment 1 | PART segment 2
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from howdah.comm.frames import Buffers

CALL, PART, BYE, GAVE_UP = range(1, 5)  # kinds of frames
TAG = struct.Struct("<III")  # fields of a PART: call, message, segment
SEGMENT = 1 << 18  # bytes


class Segment(NamedTuple):
    """A frame to send, or one that is expected.

    fields  all of them; of an expected CALL its record, which is compared by `heard`
    heard   called with the fields of an expected CALL before its payload is taken; may raise
    done    called when the kernel has all of it, or its payload has landed whole
    """

    kind: int
    fields: bytes
    buffers: Buffers = ()
    heard: Callable[[bytes], None] | None = None
    done: Callable[[], None] = lambda: None


class Last:
    """Calls `then` at its `count`-th call."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left, self._then = count, then

    def __call__(self) -> None:
        self._left -= 1
        if not self._left:
            self._then()


def spelled(fields: bytes) -> str:
    """The fields of a PART as text."""
    if len(fields) != TAG.size:
        return "of a call"
    call, message, number = TAG.unpack(fields)
    return f"{number} of message {message} in call #{call}"


def segments(
    call: int, message: int, buffers: Sequence[memoryview], first: bytes = b""
) -> Iterator[Segment]:
    """The frames of one message to one peer.

    message  number of frames before it in this call

    first  the fields of a CALL, which goes first, alone if there is nothing to send
    """
    part: list[memoryview] = []
    number, room = 0, SEGMENT
    for buffer in buffers:
        at = 0
        while at < buffer.nbytes:
            take = min(room, buffer.nbytes - at)
            part.append(buffer[at : at + take])
            at, room = at + take, room - take
            if not room:
                yield _segment(call, message, number, part, first)
                part, number, room = [], number + 1, SEGMENT
    if part or (first and number == 0):
        yield _segment(call, message, number, part, first)


def _segment(call: int, message: int, number: int, part: Buffers, first: bytes) -> Segment:
    if first and number == 0:
        return Segment(CALL, first, part)
    return Segment(PART, TAG.pack(call & 0xFFFFFFFF, message, number), part)
