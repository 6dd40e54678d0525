"""Replicas of a server, as a chain: each copies what the one before it has done.

    workers ── server 1 ── deeds 7 8 9 ──> replica on server 2's process ──> replica on server 3's
                  │  <──── has 7 ──────────────┘  <──── has 7 ────────────────────┘
                  └── answers that follow from deed 7 leave now; those of 8 and 9 wait

A server that has replicas keeps back everything that a worker could see of a deed, its
acknowledgement or weights that contain it, until the last replica of the chain has done it, too
(van Renesse and Schneider 2004, https://www.usenix.org/legacy/event/osdi04/tech/renesse.html). So
when a server dies, the next of its chain has all that was acknowledged, and takes its place; what
it lacks, workers push again. When a replica dies, the one before it goes on with the next, or
alone.

Who is dead, somebody else decides (`roll.py`). A server that is only cut off cannot answer workers
beside its successor: the successor hears it no more, so its deeds are never confirmed.

    DEED   what was done, in order; payload: the gradient of a push        down the chain
    HAS    key: the number of the last deed that was done from here on     up the chain
"""

import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from threading import Condition, Event, Thread

import torch
from torch import Tensor

from howdah.comm.frames import FrameError, Frames, Head, is_damage
from howdah.comm.handshake import CALLER, Door, Stranger, greet
from howdah.comm.tls import sealing
from howdah.comm.watch import Patience
from howdah.plan.comm import Tls
from howdah.server.addresses import Address, connected
from howdah.server.clocks import Refused
from howdah.server.desk import Deed, Desk
from howdah.server.host import Host
from howdah.server.messages import DEED, HAS, SILENCE, Fields, bytes_of, fields_of
from howdah.server.outbox import Letter, Outbox
from howdah.server.shard import Term

ENTRY = struct.Struct("<qqqqqqd")  # its number, a Deed, and the tokens of a push
AGAIN = 0.05  # seconds between attempts, and between looks
UNREACHED = 3 * SILENCE  # seconds in which a replica confirms nothing: then it is told of


class Chain:
    """What a server or a replica has done, and its next replica may not have yet.

    seq    the number of its last deed
    has    the number of the last deed that every replica behind it has done
    told   is called when `has` has grown
    lost   is called when the next replica has confirmed nothing for UNREACHED seconds
    """

    def __init__(self, secret: bytes, hello: Mapping[str, object], tls: Tls | None = None) -> None:
        self.tls, self._seal = tls, sealing(tls, calls=True)
        self._secret, self._hello = secret, json.dumps({**hello, "place": -1}).encode()
        self._behind: list[Address] = []
        self._kept: deque[tuple[int, Deed, Term | None]] = deque()
        self._changed = Condition()
        self._outbox: Outbox | None = None
        self._frames: Frames | None = None
        self._closed = self._follows = False
        self._thread: Thread | None = None
        self.seq = self.has = 0
        self.told: Callable[[int], None] = lambda number: None
        self.lost: Callable[[], None] = lambda: None
        self._patience = _patience()  # from the first deed that it lacks on, or from the last seen

    def follow(self, behind: Sequence[Address]) -> None:
        """Begins to copy to the replicas behind, the next one first. What was recorded before is
        copied, too, or confirmed where there are none.
        """
        with self._changed:
            self._behind, self._follows = [*behind], True
            if not behind:
                self._kept.clear()
                self.has = self.seq
        if behind:
            self._thread = Thread(target=self._run, daemon=True, name="chain")
            self._thread.start()
        elif self.has:
            self.told(self.has)

    def record(self, deed: Deed, term: Term | None) -> None:
        """Takes a deed. Its gradient must not be changed any more."""
        with self._changed:
            self.seq += 1
            if self._behind or not self._follows:
                self._patience = self._patience if self._kept else _patience()
                self._kept.append((self.seq, deed, term))
                self._post(self.seq, deed, term)
                return
            self.has = self.seq
        self.told(self.has)

    def drop(self, dead: Address) -> None:
        """A replica behind is dead. If it was the next one, the one behind it is; or none."""
        with self._changed:
            is_next = self._behind[:1] == [dead]
            self._behind = [one for one in self._behind if one != dead]
            if self._frames and is_next:
                with suppress(OSError):
                    self._frames.sock.shutdown(socket.SHUT_RDWR)
            if self._behind:
                return
            self._kept.clear()
            self.has = self.seq
            self._changed.notify_all()
        self.told(self.has)

    def close(self) -> None:
        """Ends the link."""
        with self._changed:
            self._closed = True
            if self._frames:
                with suppress(OSError):
                    self._frames.sock.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()
        if self._thread:
            self._thread.join()

    def _post(self, number: int, deed: Deed, term: Term | None) -> None:
        if self._outbox is not None:
            payload, tokens = (bytes_of(term.summed), term.tokens) if term else ([], 0.0)
            self._outbox.post(Letter(DEED, ENTRY.pack(number, *deed, tokens), payload))

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed or not self._behind:
                    return
                address = self._behind[0]
            try:
                self._copy(address)
            except (OSError, Stranger, FrameError, ValueError):
                if self._is_late():
                    self.lost()
                    self._patience = _patience()
                with self._changed:
                    self._changed.wait(AGAIN)

    def _is_late(self) -> bool:
        """Whether the next replica lacks deeds, and has confirmed none for too long."""
        with self._changed:
            return bool(self._kept) and not self._patience.look()

    def _copy(self, address: Address) -> None:
        """Copies to one replica until the connection ends, with an exception."""
        sock = connected(address, self._seal)
        try:
            greet(sock, self._secret, self._hello, role=CALLER)
        except BaseException:
            sock.close()
            raise
        frames, outbox = Frames(sock, "a replica", seconds=SILENCE), Outbox(fifo=True)
        sender = Thread(target=outbox.carry, args=(frames,), daemon=True, name="deeds")
        try:
            self._heard(fields_of(frames.receive().fields).key)
            with self._changed:
                if self._closed or self._behind[:1] != [address]:
                    return
                self._frames, self._outbox = frames, outbox
                for kept in self._kept:
                    self._post(*kept)
            sender.start()
            while True:
                frame = frames.receive()
                if frame.kind == HAS:
                    self._heard(fields_of(frame.fields).key)
                elif self._is_late():
                    raise FrameError("a replica confirms nothing")
        finally:
            with self._changed:
                self._frames = self._outbox = None
            outbox.close()
            if sender.is_alive():
                sender.join()
            frames.close()

    def _heard(self, number: int) -> None:
        with self._changed:
            while self._kept and self._kept[0][0] <= number:
                self._kept.popleft()
                self._patience = _patience()
            if not self._behind or number <= self.has:
                return
            self.has = min(number, self.seq)
        self.told(self.has)


def _patience() -> Patience:
    """With a replica; time in which this process was stopped does not count."""
    return Patience(UNREACHED, every=SILENCE / 4)


class Follower:
    """The end of a chain's link at a replica: does what the one before it has done.

    host      of the replica, which nobody asks for weights yet
    chain     of the replica
    listener  the socket at which the one before it arrives; it is closed with the follower
    hello     what that one must say, too

    Strangers and damaged frames are counted at the host.
    """

    def __init__(
        self,
        host: Host,
        chain: Chain,
        listener: socket.socket,
        secret: bytes,
        hello: Mapping[str, object],
    ) -> None:
        self._host, self._chain, self._listener = host, chain, listener
        self._hello = {**hello, "place": -1}
        seal = sealing(chain.tls, calls=False)
        self._door = Door(listener, secret, json.dumps(dict(hello)).encode(), seal=seal)
        self._over = Event()
        self._frames: Frames | None = None
        self._outbox: Outbox | None = None
        self._landing: Tensor | None = None
        self._reader: Thread | None = None
        self.why, self._strangers = "", 0
        chain.told = self._tell
        self._thread = Thread(target=self._run, daemon=True, name="follower")
        self._thread.start()

    def close(self) -> None:
        """Hears nobody any more. After that the chain's deeds are the replica's own."""
        self._over.set()
        self._thread.join()
        self._end()
        self._door.close()
        self._listener.close()

    def _end(self) -> None:
        if self._frames and self._reader:
            with suppress(OSError):
                self._frames.sock.shutdown(socket.SHUT_RDWR)
            self._reader.join()

    def _run(self) -> None:
        while not self._over.is_set():
            found = self._door.look(AGAIN)
            self._host.count("strangers", self._door.strangers - self._strangers)
            self._strangers = self._door.strangers
            for sock, said in found:
                frames = Frames(sock, "the one before", seconds=SILENCE, most=self._host.most)
                if not self._is_awaited(said):
                    self._host.count("refused")
                    frames.close()
                    continue
                self._end()  # it comes again, or another one has its place
                self._frames, self._outbox = frames, Outbox(fifo=True)
                self._reader = Thread(target=self._hear, args=(frames, self._outbox), daemon=True)
                self._reader.start()

    def _is_awaited(self, said: bytes) -> bool:
        try:
            return bool(json.loads(said) == self._hello)
        except (ValueError, RecursionError):
            return False

    def _hear(self, frames: Frames, outbox: Outbox) -> None:
        sender = Thread(target=outbox.carry, args=(frames,), daemon=True, name="has")
        sender.start()
        self._host.do(lambda desk: self._tell(self._chain.has))
        try:
            while True:
                frame = frames.receive(self._room)
                if frame.kind == DEED:
                    number, *deed, tokens = ENTRY.unpack(frame.fields)
                    landed = self._landing
                    term = None if landed is None else Term(landed, tokens)
                    self._host.do(partial(self._redo, number, Deed(*deed), term))
        except (FrameError, Refused, ValueError, struct.error) as error:
            self.why = str(error)
            self._host.count("refused", is_damage(error))
        except Exception as error:  # a deed that was begun may not be done
            self._host.broken = error
        finally:
            outbox.close()
            sender.join()
            frames.close()

    def _redo(self, number: int, deed: Deed, term: Term | None, desk: Desk) -> None:
        if number > self._chain.seq + 1:
            raise Refused(f"deed {number} comes after {self._chain.seq}")
        if number == self._chain.seq + 1:
            desk.redo(deed, term)

    def _room(self, head: Head) -> list[memoryview]:
        self._landing = None
        if head.kind != DEED or not head.size:
            return []
        key, masters = ENTRY.unpack(head.fields)[5], self._host.desk.shard.masters
        if not 0 <= key < len(masters):
            raise FrameError(f"a deed of key {key}, of which there are {len(masters)}")
        self._landing = torch.empty_like(masters[key])
        return bytes_of(self._landing)

    def _tell(self, number: int) -> None:
        if (outbox := self._outbox) is not None:
            outbox.post(Letter(HAS, Fields(key=number).packed))
