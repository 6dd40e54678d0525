"""Lines: the TCP connections of one rank, over which frames of many peers go at the same time.

    line 0 with rank 1   ── CALL #17, its record, segment 0 ── PART #17 segment 2 ── ...
    line 1 with rank 1   ── PART #17 segment 1 ── PART #17 segment 3 ── ...

The first frame of a call goes over line 0 of each peer and has the record of the call
(`signature.py`). Messages are cut into segments (`segments.py`), dealt to the lines in turn from
line 0 on, so that those of one segment keep their order: two lines are not equally fast, and who
passes pieces on in order would wait for the slower one while its own card has nothing to send. A
short message of the first turn comes along with the CALL (`flow.WITH_CALL`). Both ends know
which frames follow in which order on which line: nothing is taken that is not expected, and no
payload of a call before its records were found equal. A frame that is damaged, or another one than
expected, ends the transport: nothing is sent twice, and no line is opened again.

Sockets do not block. `Lines.pump` sends and receives what it can, and waits for all lines at once.
"""

import errno
import fcntl
import select
import socket
import struct
import termios
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from threading import RLock
from time import monotonic

from howdah.comm import frames
from howdah.comm.frames import HEADER, FrameError, Head
from howdah.comm.segments import BYE, CALL, GAVE_UP, PART, TAG, Segment, spelled
from howdah.comm.signature import RECORD, Disagreement
from howdah.comm.watch import Patience

TOLD = 1000  # bytes of the reason of a rank that gives up
LOOK = 1.0  # seconds between two looks at the time
GRACE = 3.0  # in which a call ends, of which a peer has sent its part before it left
ENDED = getattr(select, "POLLRDHUP", 0)  # on Linux: the peer has ended the connection
HUNG_UP = ENDED | select.POLLHUP | select.POLLERR
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
            self.failed = error
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
        while self._filled < len(self._buffer):
            count = self.sock.recv_into(self._buffer[self._filled :])
            self._require(count)
            self._filled += count
            some = True
            if self._filled == len(self._buffer):
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
        """Room for a header and all of its fields, of which those that were read are in it."""
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


class Lines:
    """All lines of a rank.

    by_peer  the lines with each peer, in the order of their numbers
    seconds  after which a peer counts as lost that sends nothing while it is waited for
    """

    def __init__(self, by_peer: dict[int, list[socket.socket]], *, seconds: float) -> None:
        self.by_peer = {
            peer: [Line(sock, peer) for sock in socks] for peer, socks in by_peer.items()
        }
        self._all = [line for lines in self.by_peer.values() for line in lines]
        self._seconds = seconds
        self._of = {line.sock.fileno(): line for line in self._all}
        self._poll, self._wanted = select.poll(), dict[int, int]()

    def post(self, peer: int, found: Sequence[Segment]) -> None:
        """Sends the frames of a message to a peer, dealt to its lines in turn. `pump` does it."""
        lines = self.by_peer[peer]
        for number, segment in enumerate(found):
            lines[number % len(lines)].out.append(segment)

    def expect(self, peer: int, found: Sequence[Segment], *, first: int = 0) -> None:
        """Expects frames of a peer, dealt alike; `first` is the number of the first of them."""
        lines = self.by_peer[peer]
        for number, segment in enumerate(found, first):
            lines[number % len(lines)].due.append(segment)

    def start(self) -> None:
        """Sends what the kernel takes at once."""
        for line in self._all:
            if line.sends:
                line.send()

    def pump(self, enough: Callable[[], bool] = lambda: False) -> None:
        """Sends and receives until nothing is left of either, or until `enough`.

        Raises Lost, FrameError, TimeoutError with the rank that is waited for, and what the frames'
        `heard` raises.
        """
        patience, ready = Patience(self._seconds, every=LOOK), self._busy()
        while True:
            if self._move(ready):
                patience = Patience(self._seconds, every=LOOK)
            elif (gone := self._gone()) is not None:
                raise gone
            elif not patience.look():
                late = self._busy()
                raise TimeoutError(next((line for line in late if line.due), late[0]).peer)
            if not self._busy() or enough():
                return
            ready = self._wait(patience.left)

    def _busy(self) -> list[Line]:
        return [line for line in self._all if line.sends or line.due]

    def _move(self, lines: Sequence[Line]) -> bool:
        """Sends and receives what can be; whether that was anything. A lost peer is told when all
        that others have sent was read, which may say more.
        """
        some = False
        lost: Lost | None = None
        for line in lines:
            if line.sends:
                some |= line.send()
        for line in lines:
            try:
                if line.due:
                    some |= line.receive()
            except Lost as error:
                lost = error if lost is None or lost.relayed else lost
        if lost is not None:
            raise lost if lost.relayed else self._cause(lost)
        return some

    def _cause(self, lost: Lost) -> Lost:
        """The loss of who has ended first: a rank that has lost another one ends its connections,
        too, and in the middle of a frame it cannot say why.
        """
        others = [line for line in self._all if line.peer != lost.rank and not line.due]
        look = select.poll()
        for line in others:
            if not line.left:
                look.register(line.sock, ENDED)
        for number, _ in look.poll(0):
            self._of[number].note_end()
        ended = sorted((line for line in others if line.left), key=lambda line: line.ended)
        causes = [cause for line in ended if (cause := line.why_ended())]
        said = [cause for cause in causes if cause.relayed]
        return [*said, *causes, lost][0]

    def _gone(self) -> Lost | None:
        """The loss of a peer that has ended its connections a while ago, and owes nothing: others
        may wait for it. A peer that has sent its part of a call, and then failed by itself, ends
        them too, but the call is soon over. Behind what it has sent ahead, and nobody has read yet,
        it may have said that it gave up; if it has said nothing, it may have left in good order.
        """
        for line in self._all:
            mine = self.by_peer[line.peer]
            late = (line.left or line.failed) and monotonic() - line.ended > GRACE
            if late and not any(other.due for other in mine):
                why = line.lost(line.failed) if line.failed else line.why_ended()
                if why and (line.failed or why.relayed):
                    return why
        return None

    def _wait(self, seconds: float) -> list[Line]:
        """Waits for the lines; those where something can be done."""
        for number, line in self._of.items():
            wanted = select.POLLIN * bool(line.due) | select.POLLOUT * line.sends
            if not line.left:
                wanted |= ENDED
            if self._wanted.get(number, 0) != wanted:
                (self._poll.register(number, wanted) if wanted else self._poll.unregister(number))
                self._wanted[number] = wanted
        found = []
        for number, event in self._poll.poll(min(seconds, LOOK) * 1000):
            line = self._of[number]
            found.append(line)
            if event & HUNG_UP and not line.due:
                line.note_end()
        return found

    def hang_up(self) -> None:
        """Ends all connections, also for threads that wait for them."""
        for line in self._all:
            try:
                line.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def last_words(self) -> str:
        """What a peer has said that gave up; empty if none has. For a call that has failed."""
        for line in self._all:
            line.due.append(Segment(BYE, b""))
            try:
                line.receive()
            except Lost as lost:
                if lost.relayed:
                    return str(lost)
            except (FrameError, Disagreement):  # of what the call that has failed was to hear
                continue
        return ""

    def give_up(self, why: str) -> None:
        """Tells all peers, at once, why this rank takes no further part."""
        for line in self._all:
            if not line.failed:
                line.farewell(GAVE_UP, why)

    def close(self, *, farewell: bool) -> None:
        """Closes the sockets.

        farewell  tell the peers that this rank leaves, and is not lost
        """
        for line in self._all:
            if farewell:
                line.farewell(BYE)
            line.sock.close()
