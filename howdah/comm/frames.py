"""Frames: messages over one socket, of which a damaged, cut, repeated or too long one is told.

    header    MAGIC, kind, flags, number, bytes of fields, bytes of payload, CRC-32 of the payload,
              CRC-32 of the header and the fields           HEADER.size bytes, little-endian
    fields    a few bytes that say what the payload is, as its sender and reader agree
    payload   bytes of tensors: gathered from buffers, and scattered into others, without a copy

Nothing is pickled. A reader believes no number before its checksum was compared, and allocates
nothing for a payload: its reader says where it lands (`into`), or refuses it. Both ends count
their frames, so one that comes twice, or that is missing, has a wrong number.

A frame costs as few system calls as can be: short ones leave together, and are read ahead with
what stands behind them; the rest of a payload lands in its place in one call. The kernel looks at
the time, because Python would poll before each call.

A checksum finds damage, not forgery. Peers have proved who they are before (`handshake.py`).

    frames = Frames(sock, "rank 3", seconds=600)
    frames.send(PUSH, b'{"key": 7}', [memoryview(gradient)])
    frame = frames.receive(lambda head: [room_of(head.fields)])
"""

import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from howdah.comm.crc import crc32

MAGIC = b"hwd1"
HEADER = struct.Struct("<4sHHQIQII")  # its last number is the CRC-32 of all others and the fields
CHECK = struct.Struct("<I")
FIELDS = 1 << 16  # the most bytes of fields
MOST = 1 << 40  # the most bytes of a payload that a header may announce
VECTOR = 512  # buffers of one system call; the kernel takes 1024
AHEAD = 1 << 12  # bytes that are read ahead
UNSENT = 1 << 18  # bytes that wait in the kernel: what is urgent is sent behind them
TIME = struct.Struct("@ll")  # seconds and microseconds, of a socket's option

Buffers = Sequence[memoryview]


class FrameError(RuntimeError):
    """A frame, or its connection, is of no use; the message says what is wrong and from whom. The
    connection is to be closed: where its next frame begins is not known.
    """


class Gone(FrameError):
    """The peer has ended the connection, or its machine or link is down."""


class Silent(FrameError):
    """Nothing has come, or could be sent, for too long."""


def is_damage(error: Exception) -> bool:
    """Whether a connection has ended because of what was sent: not by its end, nor in silence."""
    return not isinstance(error, Gone | Silent | OSError)


class Head(NamedTuple):
    """What a header says, and the fields behind it.

    kind    what the frame is: a number of its two ends, below 65,536
    flags   16 bits of theirs
    number  how many frames came before it on this connection
    size    bytes of the payload
    check   CRC-32 of the payload
    """

    kind: int
    flags: int
    number: int
    size: int
    check: int
    fields: bytes


class Frame(NamedTuple):
    """A frame that was read, whose payload has the right checksum.

    buffers  where the payload landed
    """

    kind: int
    flags: int
    fields: bytes
    buffers: Buffers

    @property
    def payload(self) -> bytes:
        """A copy of the payload as one piece."""
        return b"".join(self.buffers)


Into = Callable[[Head], Buffers]
Unsent = tuple[int, bytes, Buffers]  # a frame to be sent: kind, fields, buffers


def pack(
    kind: int, fields: bytes, buffers: Buffers, *, number: int, flags: int = 0
) -> tuple[bytes, int]:
    """The header and the fields of a frame, and the bytes of its payload."""
    if len(fields) > FIELDS:
        raise ValueError(f"fields of {len(fields)} bytes: a frame has at most {FIELDS}")
    size, check = 0, 0
    for part in buffers:
        size, check = size + part.nbytes, crc32(part, check)
    head = HEADER.pack(MAGIC, kind, flags, number, len(fields), size, check, 0)[: -CHECK.size]
    return head + CHECK.pack(crc32(fields, crc32(head))) + fields, size


def kind_of(header: bytes) -> int:
    """The kind that a header names, whose checksum is not compared yet."""
    return int(HEADER.unpack(header)[1])


def fields_bytes(header: bytes, peer: str) -> int:
    """How many bytes of fields follow a header. Raises FrameError if it is none."""
    magic, _, _, _, fields, _, _, _ = HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameError(f"{peer} sent {header[:4]!r} where a frame begins: bytes are damaged")
    if fields > FIELDS:
        raise FrameError(f"{peer} sent a frame with {fields} bytes of fields: {FIELDS} is the most")
    return int(fields)


def unpack(header: bytes, fields: bytes, peer: str, *, number: int, most: int = MOST) -> Head:
    """The head of a frame. Raises FrameError, which names the `peer`.

    number  that the frame must have
    most    bytes that its payload may have
    """
    _, kind, flags, theirs, _, size, check, own = HEADER.unpack(header)
    if crc32(fields, crc32(header[: -CHECK.size])) != own:
        raise FrameError(f"a frame of {peer} has a wrong checksum: its header is damaged")
    if theirs != number:
        what = "again, or late" if theirs < number else "too early: frames are missing"
        raise FrameError(f"{peer} sent frame {theirs} {what}: frame {number} was next")
    if size > most:
        raise FrameError(f"{peer} sent a frame with {size} bytes of payload: {most} is the most")
    return Head(kind, flags, theirs, size, check, fields)


def require_whole(head: Head, buffers: Buffers, peer: str) -> None:
    """Raises FrameError unless the payload in the buffers has the checksum of its head."""
    check = 0
    for part in buffers:
        check = crc32(part, check)
    if check != head.check:
        raise FrameError(
            f"the payload of frame {head.number} of {peer} has a wrong checksum: of its "
            f"{head.size} bytes at least one is damaged"
        )


def own_room(head: Head) -> Buffers:
    """New memory for a payload. For peers that are trusted with its size."""
    return [memoryview(bytearray(head.size))] if head.size else []


class Frames:
    """Frames over one connected stream socket, which it owns. One thread sends at a time, and one
    receives.

    sock     connected, after its handshake
    peer     who is at the other end, as errors name him
    seconds  after which he counts as silent: no byte has come, or could be sent; None: never
    most     bytes of the largest payload that he may send
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        seconds: float | None = None,
        most: int = MOST,
    ) -> None:
        sock.settimeout(None)
        if seconds is not None:
            whole = int(seconds)
            time = TIME.pack(whole, max(int((seconds - whole) * 1e6), not whole))  # 0: never
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, time)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            # Otherwise a short frame waits 40 ms for an acknowledgement of the one before it, or
            # behind the megabytes that the kernel would take.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT)
        self.sock, self.peer, self.most, self._seconds = sock, peer, most, seconds
        self.sent = self.received = 0  # frames so far
        self._ahead = memoryview(bytearray(AHEAD))
        self._first = self._last = 0  # of the bytes in it that were not used

    def fileno(self) -> int:
        """The socket's descriptor, for a poll."""
        return self.sock.fileno()

    def send(self, kind: int, fields: bytes = b"", buffers: Buffers = (), *, flags: int = 0) -> int:
        """Sends a frame; returns the bytes of its payload. The buffers may be changed then.

        fields   at most FIELDS bytes
        buffers  contiguous, of bytes (`memoryview(x).cast("B")`)

        Raises Gone or Silent.
        """
        return self.send_all([(kind, fields, buffers)], flags=flags)

    def send_all(self, frames: Iterable[Unsent], *, flags: int = 0) -> int:
        """Sends frames behind each other, as `send` does each; returns the bytes of payload."""
        left, total = list[memoryview](), 0
        for kind, fields, buffers in frames:
            head, size = pack(kind, fields, buffers, number=self.sent, flags=flags)
            left += [memoryview(head), *(part for part in buffers if part.nbytes)]
            total += size
            self.sent += 1
        try:
            while left:
                done = self.sock.sendmsg(left[:VECTOR])
                left = after(left, done)
        except OSError as error:
            raise self._failed(error, "took no more bytes") from None
        return total

    def receive(self, into: Into | None = None) -> Frame:
        """Reads the next frame.

        into  from its head, the buffers in which its payload lands, with `head.size` bytes in all;
              None: the frame must have none. It may raise to refuse a frame; the connection is then
              to be closed. Nothing that the buffers hold is to be used unless this returns

        Raises FrameError, or its Gone and Silent.
        """
        header = self._bytes(HEADER.size, first=True)
        fields = self._bytes(fields_bytes(header, self.peer))
        most = self.most if into else 0
        head = unpack(header, fields, self.peer, number=self.received, most=most)
        buffers = into(head) if into else ()
        if sum(part.nbytes for part in buffers) != head.size:
            raise FrameError(
                f"{self.peer} sent {head.size} bytes in frame {head.number}, for which there is "
                f"room of {sum(part.nbytes for part in buffers)}"
            )
        for part in buffers:
            self._fill(part)
        require_whole(head, buffers, self.peer)
        self.received += 1
        return Frame(head.kind, head.flags, head.fields, buffers)

    def close(self) -> None:
        """Closes the socket. A peer that waits hears of it."""
        self.sock.close()

    def _bytes(self, count: int, *, first: bool = False) -> bytes:
        """The next bytes; what comes with them is kept.

        first  a frame begins here, so that the peer may have ended
        """
        if count > AHEAD:
            found = bytearray(count)
            self._fill(memoryview(found))
            return bytes(found)
        if self._last - self._first < count:
            left = self._last - self._first
            self._ahead[:left] = self._ahead[self._first : self._last]
            self._first, self._last = 0, left
            while self._last < count:
                first = first and not self._last
                self._last += self._read(self._ahead[self._last :], first=first)
        self._first += count
        return bytes(self._ahead[self._first - count : self._first])

    def _fill(self, part: memoryview) -> None:
        """Takes bytes until the buffer is full."""
        done = min(self._last - self._first, part.nbytes)
        part[:done] = self._ahead[self._first : self._first + done]
        self._first += done
        while done < part.nbytes:
            done += self._read(part[done:], socket.MSG_WAITALL)

    def _read(self, part: memoryview, flags: int = 0, *, first: bool = False) -> int:
        try:
            count = self.sock.recv_into(part, 0, flags)
        except OSError as error:
            raise self._failed(error, "sent nothing") from None
        if count == 0:
            cut = "" if first else f" in the middle of frame {self.received}"
            raise Gone(f"{self.peer} ended the connection{cut}")
        return count

    def _failed(self, error: OSError, silence: str) -> FrameError:
        if isinstance(error, BlockingIOError):  # the socket's own silence; TCP's is a TimeoutError
            return Silent(f"{self.peer} {silence} for {self._seconds:g} s")
        why = error.strerror or str(error)
        return Gone(f"the connection with {self.peer} ended: {why}")


def after(buffers: Buffers, done: int) -> list[memoryview]:
    """What is left of buffers whose first `done` bytes were sent or received.

    >>> [bytes(part) for part in after([memoryview(b"abc"), memoryview(b"de")], 4)]
    [b'e']
    """
    for number, part in enumerate(buffers):
        if done < part.nbytes:
            return [part[done:], *buffers[number + 1 :]]
        done -= part.nbytes
    return []
