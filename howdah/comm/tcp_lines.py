"""Lines: the TCP connections of one rank, over which frames of many peers go at the same time.

    line 0 with rank 1   ── CALL #17, its record, segment 0 ── PART #17 segment 2 ── ...
    line 1 with rank 1   ── PART #17 segment 1 ── PART #17 segment 3 ── ...

Messages are cut into segments (`segments.py`), dealt to the lines in turn from line 0 on, so that
those of one segment keep their order: two lines are not equally fast, and who passes pieces on in
order would wait for the slower one while its own card has nothing to send. A short message of the
first turn comes along with the CALL (`flow.WITH_CALL`). `tcp_line.py` says what is taken of a line.

`Lines.pump` sends and receives what it can, and waits for all lines at once.
"""

import os
import select
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic
from weakref import ref

from howdah.comm.frames import FrameError
from howdah.comm.segments import BYE, GAVE_UP, Segment
from howdah.comm.signature import Disagreement
from howdah.comm.slow_links import LONG
from howdah.comm.tcp_line import Line, Lost
from howdah.comm.watch import Patience

LOOK = 1.0  # seconds between two looks at the time
GRACE = 3.0  # in which a call ends, of which a peer has sent its part before it left
ENDED = getattr(select, "POLLRDHUP", 0)  # on Linux: the peer has ended the connection
HUNG_UP = ENDED | select.POLLHUP | select.POLLERR


class Lines:
    """All lines of a rank.

    by_peer  the lines with each peer, in the order of their numbers
    long     bytes of long messages to each peer so far
    seconds  after which a peer counts as lost that sends nothing while it is waited for
    """

    def __init__(self, by_peer: dict[int, list[socket.socket]], *, seconds: float) -> None:
        self.by_peer = {
            peer: [Line(sock, peer) for sock in socks] for peer, socks in by_peer.items()
        }
        self._all = [line for lines in self.by_peer.values() for line in lines]
        self._seconds, self.long = seconds, Counter[int]()
        self._of = {line.sock.fileno(): line for line in self._all}
        self._poll, self._wanted = select.poll(), dict[int, int]()
        os.register_at_fork(after_in_child=partial(_forked, ref(self)))

    def post(self, peer: int, found: Sequence[Segment]) -> None:
        """Sends the frames of a message to a peer, dealt to its lines in turn. `pump` does it."""
        lines = self.by_peer[peer]
        for number, segment in enumerate(found):
            lines[number % len(lines)].out.append(segment)
        size = sum(part.nbytes for segment in found for part in segment.buffers)
        self.long[peer] += size * (size >= LONG)

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
        some, lost = False, dict[int, Lost]()
        for line in lines:
            if line.sends:
                some |= line.send()
        for line in lines:
            try:
                if line.due:
                    some |= line.receive()
            except Lost as error:
                if error.relayed or line.peer not in lost:
                    lost[line.peer] = error
        if lost:
            raise self._cause([*lost.values()])
        return some

    def _cause(self, lost: Sequence[Lost]) -> Lost:
        """The loss of who has ended first: a rank that has lost another one ends its connections,
        too, and in the middle of a frame it cannot say why. On another line it may have.
        """
        ends = [one for one in lost if not one.relayed]
        if not ends:
            return lost[0]
        idle, look, owing = [line for line in self._all if not line.due], select.poll(), set[int]()
        owing.update(one.rank for one in ends)
        for line in idle:
            if not line.left:
                look.register(line.sock, ENDED)
        for number, _ in look.poll(0):
            self._of[number].note_end()
        ended = sorted((line for line in idle if line.left), key=lambda line: line.ended)
        causes = [cause for line in ended if (cause := line.why_ended())]
        said = [cause for cause in causes if cause.relayed]
        return [*said, *(cause for cause in causes if cause.rank not in owing), *ends][0]

    def _gone(self) -> Lost | None:
        """The loss of a peer that has ended its connections a while ago, and owes nothing: others
        may wait for it. A peer that has sent its part of a call, and then failed by itself, ends
        them too, but the call is soon over. Behind what it has sent ahead, and nobody has read yet,
        it may have said that it gave up; if it has said nothing, it may have left in good order.
        """
        over = (line for line in self._all if line.left or line.failed)
        for line in sorted(over, key=lambda line: line.ended):
            mine = self.by_peer[line.peer]
            if monotonic() - line.ended <= GRACE or any(other.due for other in mine):
                continue
            words = (one.why_ended() for one in mine if one.left or one.failed)
            if said := next((why for why in words if why and why.relayed), None):
                return said
            if line.failed:
                return line.lost(line.failed)
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


def _forked(lines: "ref[Lines]") -> None:
    """In a child that was forked, which is no rank."""
    if (there := lines()) is not None:
        for every in there.by_peer.values():
            for line in every:
                line.close_here()
