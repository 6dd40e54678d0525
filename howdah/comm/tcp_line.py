"""A line: one TCP connection of a rank, what is to be sent on it, and which frames are due.

The first frame of a call goes over line 0 of each peer and has the record of the call
(`signature.py`). Both ends know which frames follow in which order on which line: nothing is taken
that is not expected, and no payload of a call before its records were found equal. A frame that is
damaged, or another one than expected, ends the transport: nothing is sent twice, and no line is
opened again. Sockets do not block.
"""

import errno
import fcntl
import os
import socket
import struct
import termios
from collections import deque
from contextlib import suppress
from itertools import islice
from threading import RLock
from time import monotonic

from howdah.comm import frames
from howdah.comm.frames import HEADER, FrameError, Head
from howdah.comm.segments import BYE, CALL, GAVE_UP, PART, TAG, Segment, spelled
from howdah.comm.signature import RECORD

TOLD = 1000  # bytes of the reason of a rank that gives up
AGAIN = (BlockingIOError, InterruptedError)
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class Lost(Exception):
    """A peer is lost: `rank`, and what happened to it as the end of a sentence.

    relayed  the peer has said so itself: it lives, and another one may be the cause
    """

    def __init__(self, rank: int, why: str, *, relayed: bool = False) -> None:
        super().__init__(f"rank {rank} {why}")
        self.rank, self.relayed = rank, relayed


class Line:
    """One connection: what is still to be sent on it, and what is expected."""

    def __init__(self, sock: socket.socket, peer: int) -> None:
        sock.setblocking(False)
        self.sock, self.peer, self.name = sock, peer, f"rank {peer}"
        self.out: deque[Segment] = deque()
        self.due: deque[Segment] = deque()
        self.failed: OSError | None = None  # of a send: what the peer has sent is read first
        self.left = False  # the peer has ended this connection, with bytes that are not due
        self.ended = 0.0  # when that was noticed
        self._left: list[memoryview] = []  # of the frame that is being sent
        self._now = Segment(BYE, b"")  # that frame
        self._sent = self._received = 0  # frames
        self._head: Head | None = None  # of the frame whose payload is being received
        self._buffer, self._filled = memoryview(bytearray(0)), 0  # header and fields
        self._rest: list[memoryview] = []  # of the payload that is being received
        self.turn = RLock()  # of who writes: another thread may say farewell

    @property
    def sends(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._left or self.out)

    def send(self) -> bool:
        """Sends what the kernel takes; whether that was anything."""
        with self.turn:
            return self._send()

    def _send(self) -> bool:
        some, now = False, self._now
        try:
            while self._left or self.out:
                if not self._left:
                    now = self._now = self.out.popleft()
                    head, _ = frames.pack(now.kind, now.fields, now.buffers, number=self._sent)
                    self._sent += 1
                    self._left = [memoryview(head), *now.buffers]
                sent = self.sock.sendmsg(islice(self._left, frames.VECTOR))
                self._left = frames.after(self._left, sent)
                some = True
                if not self._left:
                    now.done()
        except AGAIN:
            pass
        except OSError as error:
            self.failed, self.ended = error, self.ended or monotonic()
            lost = [now, *self.out]
            self._left, some = [], True
            self.out.clear()
            for segment in lost:  # nobody hears them: who waits for the peer is told
                segment.done()
        return some

    def receive(self) -> bool:
        """Takes what has come of the frames that are due; whether that was anything.

        Raises Lost, FrameError, and what `heard` raises.
        """
        some = False
        try:
            while self.due:
                if self._head is None:
                    some |= self._read_head(self.due[0])
                if self._rest:
                    count = self.sock.recv_into(self._rest[0])
                    self._require(count)
                    self._rest = frames.after(self._rest, count)
                    some = True
                if self._head is not None and not self._rest:
                    whole = self.due.popleft()
                    frames.require_whole(self._head, whole.buffers, self.name)
                    self._head = None
                    self._received += 1
                    whole.done()
        except AGAIN:
            pass
        except OSError as error:
            raise self.lost(error) from None
        return some

    def _read_head(self, due: Segment) -> bool:
        """Reads a header and its fields, as far as they have come, and compares them."""
        if not self._buffer:
            least = RECORD if due.kind == CALL else TAG.size
            self._buffer, self._filled = memoryview(bytearray(HEADER.size + least)), 0
        some = False
        while (before := self._filled) < len(self._buffer):
            count = self.sock.recv_into(self._buffer[before:])
            self._require(count)
            self._filled += count
            some = True
            if before < HEADER.size <= self._filled:  # another frame may have fewer fields
                self._buffer = self._longer(due)
        header, fields = bytes(self._buffer[: HEADER.size]), bytes(self._buffer[HEADER.size :])
        head = frames.unpack(header, fields, self.name, number=self._received)
        if head.kind == BYE:
            raise Lost(self.peer, "left the group")
        if head.kind == GAVE_UP:
            raise self._gave_up(fields)
        if due.heard is not None:
            due.heard(fields)
        size = sum(part.nbytes for part in due.buffers)
        same = due.heard is not None or fields == due.fields
        if not same or (head.kind, head.size) != (due.kind, size):
            raise FrameError(
                f"{self.name} sent frame {head.number} of {head.size} bytes for segment "
                f"{spelled(fields)}; {size} bytes of segment {spelled(due.fields)} were next"
            )
        self._head, self._buffer = head, memoryview(bytearray(0))
        self._rest = [part for part in due.buffers if part.nbytes]
        return some

    def _longer(self, due: Segment) -> memoryview:
        """Room for a header and all of its fields; what was read of them is in it."""
        header = bytes(self._buffer[: HEADER.size])
        kind, length = frames.kind_of(header), frames.fields_bytes(header, self.name)
        least = len(self._buffer) - HEADER.size
        other = kind not in (due.kind, BYE, GAVE_UP)
        if other or length < least or (length > least and kind == PART):
            raise FrameError(
                f"{self.name} sent a frame of kind {kind} with {length} bytes of fields where one "
                f"of kind {due.kind} was next"
            )
        if length == least:
            return self._buffer
        longer = memoryview(bytearray(HEADER.size + length))
        longer[: len(self._buffer)] = self._buffer
        return longer

    def note_end(self) -> None:
        """Notes that the peer has ended the connection, on which nothing is due. With bytes that
        are left to read it has said that it leaves, or what the next call will read.
        """
        self.left, self.ended = True, monotonic()
        try:
            if not self.sock.recv(1, socket.MSG_PEEK):
                self.failed = self.failed or ConnectionResetError()
        except AGAIN:
            return
        except OSError as error:
            self.failed = self.failed or error

    def close_here(self) -> None:
        """Closes the descriptor of this process alone: a child that was forked holds another one,
        by which the connection would outlive the rank.
        """
        if (number := self.sock.detach()) >= 0:
            os.close(number)

    def why_ended(self) -> Lost | None:
        """Why the peer, which has ended the connection, did so, by the last that it has sent; None:
        it has left in good order. What is unread stays.
        """
        try:
            (unread,) = struct.unpack("=i", fcntl.ioctl(self.sock, termios.FIONREAD, bytes(4)))
            last = self.sock.recv(max(unread, 1), socket.MSG_PEEK)[-(HEADER.size + RECORD) :]
            header, fields = last[: HEADER.size], last[HEADER.size :]
            whole = len(fields) == frames.fields_bytes(header, self.name) == RECORD
            if (kind := frames.kind_of(header) if whole else PART) == BYE:
                return None
        except (OSError, FrameError, struct.error):
            kind, fields = PART, b""
        return self._gave_up(fields) if kind == GAVE_UP else self.lost(self.failed)

    def _gave_up(self, fields: bytes) -> Lost:
        told = fields.decode(errors="replace").rstrip()
        return Lost(self.peer, f"gave up: {told}", relayed=True)

    def lost(self, error: OSError | None) -> Lost:
        """What an error of the connection says about the peer; None: it is at its end."""
        if error and error.errno in UNREACHABLE:
            return Lost(self.peer, "does not answer: its link is down, or its machine is")
        return Lost(self.peer, "ended, or its link is down")

    def _require(self, count: int) -> None:
        if count == 0:
            raise self.lost(self.failed)

    def farewell(self, kind: int, said: str = "") -> None:
        """Ends what this end sends with a last frame, if the socket takes it at once."""
        fields = said.encode()[:TOLD].ljust(RECORD)
        with self.turn, suppress(OSError):  # the peer may be gone
            if not self._left:
                head, _ = frames.pack(kind, fields, (), number=self._sent)
                with suppress(AttributeError, OSError):  # Linux and macOS: it may be full by this
                    self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 1 << 30)
                self.sock.send(head)
            self.sock.shutdown(socket.SHUT_WR)
