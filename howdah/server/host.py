"""The host of a server: its desk, behind a door that opens for those who know the run's secret.

    door          one thread: greets all who connect, at once; strangers hear nothing
    each worker   one thread reads its frames and works at the desk, one sends from its outbox

The desk has one lock. A worker that reads slowly, or sends half a frame and no more, keeps its own
two threads busy and nobody else's; who asks for more than it reads is not read either. A frame that
is damaged, too long, or comes twice, and a message that no sound worker sends, end its connection
and are counted; one that is cut ends it. A worker whose connection has ended has `grace` seconds to
come back with its incarnation; then its place is free. An error that none of this explains ends the
server: what was counted as done may not be.

A host with replicas keeps back what it posts until they have done what led to it (`chain.py`).
"""

import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from math import inf
from threading import Lock, Thread
from time import monotonic
from typing import Protocol

import torch
from torch import Tensor

from howdah.base.stopwatch import Interval
from howdah.comm.frames import FrameError, Frames, Head, is_damage
from howdah.comm.handshake import Door
from howdah.plan.recording import Call
from howdah.server.clocks import Refused, Update
from howdah.server.desk import Desk
from howdah.server.guests import Guest, read_hello
from howdah.server.messages import (
    ACK,
    BEGIN,
    BYE,
    JOIN,
    JOINED,
    PING,
    PULL,
    PUSH,
    SILENCE,
    TRADE,
    WEIGHTS,
    Fields,
    bytes_of,
    fields_of,
)
from howdah.server.moments import Message, Moments
from howdah.server.outbox import Letter
from howdah.server.shard import Term
from howdah.server.spares import Spares

GRACE = 2.0  # seconds in which it can come back
RETURN = 15.0  # seconds in which workers find the one that has taken a dead server's place
RECENT = 4096  # pushes and pulls that are kept for a trace
LETTERS = 4  # times as many as chunks may wait for a worker that does not read
GLANCE = 0.05  # seconds between looks at the door


class Copies(Protocol):
    """What replicas have: `Chain`. seq: the last deed; has: the last one that all replicas have."""

    seq: int
    has: int


class Host:
    """One server.

    door    of a listening socket, which the caller closes
    hello   what a worker must say too: the run, as both ends must have it
    dtype   of the weights that are sent
    ranks   of each worker; 0: as many as have chunks
    grace   seconds that a worker has to come back
    copies  what replicas have; None: there are none
    counts  by name: what happened, for metrics
    gone    by place whose worker did not come back, the number of that process
    recent  the latest pushes and pulls, and when they were
    why     of the last connection that was ended: the reason
    broken  an error in one of its threads, which ends the server
    """

    def __init__(
        self,
        desk: Desk,
        door: Door,
        hello: Mapping[str, object],
        *,
        dtype: torch.dtype,
        grace: float = GRACE,
        copies: Copies | None = None,
    ) -> None:
        self.desk, self._door, self._hello, self._dtype = desk, door, hello, dtype
        self.ranks = 0
        self._most_letters = 64 + LETTERS * len(desk.shard.chunks)
        self._grace, self._copies, self._spares = grace, copies, Spares()
        if not copies:  # which keep what they have not copied yet
            desk.applied = lambda term: self._spares.give(term.summed)
        self._held: deque[tuple[int, Guest, Letter]] = deque()
        self._holding, self._deepest = Lock(), 0
        self._lock = Lock()
        self._guests: dict[tuple[int, int], Guest] = {}  # by place, and rank of a worker
        self._open: list[tuple[Thread, Guest]] = []  # who has joined, and who has not yet
        self._lost: dict[tuple[int, int], tuple[int, float]] = {}  # its incarnation, and until when
        self.counts: Counter[str] = Counter()
        self.recent: deque[Call] = deque(maxlen=RECENT)
        self._moments = Moments(self._record)
        self.gone: dict[int, int] = {}
        self._has: dict[int, int] = {}  # by place, the number of the process that has it
        self.why = ""
        self.broken: Exception | None = None

    def heed(self) -> None:
        """Raises the error that has broken this host, if one has."""
        if self.broken:
            raise self.broken

    def look(self, seconds: float = GLANCE) -> None:
        """Lets in who is at the door, and frees the places of those who did not come back."""
        for sock, hello in self._door.look(seconds):
            self._let_in(sock, hello)
        with self._lock:
            for (place, _), (incarnation, until) in [*self._lost.items()]:
                if monotonic() >= until and self._send_off(place):
                    self.counts["left"] += 1
                    self.gone[place] = self._has.get(place, 0)
                    self.desk.leave(place, incarnation)
            self._deliver()
        self._open = [one for one in self._open if one[0].is_alive()]

    @property
    def strangers(self) -> int:
        """Connections that did not prove that they know the secret."""
        return self._door.strangers

    def count(self, name: str, more: int = 1) -> None:
        """Counts what happened, for metrics; from any thread."""
        with self._lock:
            self.counts[name] += more

    def do(self, work: Callable[[Desk], None]) -> None:
        """Works at the desk between two messages, such as to take a snapshot."""
        with self._lock:
            work(self.desk)

    @property
    def queue(self) -> int:
        """The most letters that have waited to be sent to one worker so far."""
        with self._lock:
            self._deepest = max([self._deepest, *(g.outbox.deepest for g in self._guests.values())])
            return self._deepest

    @property
    def queued(self) -> int:
        """The most letters that wait now to be sent to one worker."""
        with self._lock:
            return max((guest.outbox.waiting for guest in self._guests.values()), default=0)

    @property
    def most(self) -> int:
        """Bytes of the largest gradient that can be pushed."""
        return max((one.nbytes for one in self.desk.shard.masters), default=0)

    def take_over(self) -> None:
        """Takes the place of the server whose replica this one was: its workers come back."""
        with self._lock:
            members, until = self.desk.clocks.members, monotonic() + max(self._grace, RETURN)
            ranks = {chunk.rank for chunk in self.desk.shard.chunks}
            for place, rank in product(members, ranks):
                if (one := members[place]).live and one.incarnation:
                    self._lost[place, rank] = one.incarnation, until

    def release(self, number: int) -> None:
        """Posts what was kept back until replicas have the deed `number`."""
        with self._holding:
            while self._held and self._held[0][0] <= number:
                _, guest, letter = self._held.popleft()
                guest.outbox.post(letter)
                guest.held -= 1

    def _post(self, guest: Guest, kind: int, said: Fields, weights: Tensor | None = None) -> None:
        """Posts a letter, when replicas have done all that this server has.

        weights  its payload, which is sent in the order of keys
        """
        letter = Letter(kind, said.packed)
        if weights is not None:
            buffers, sent = bytes_of(weights), partial(self._spares.give, weights)
            letter = Letter(kind, said.packed, buffers, said.key, weights.nbytes, sent)
        with self._holding:
            if self._copies and (self._held or self._copies.has < self._copies.seq):
                self._held.append((self._copies.seq, guest, letter))
                guest.held += 1
            else:
                guest.outbox.post(letter)

    def close(self) -> None:
        """Ends all connections, and waits for their threads."""
        self._door.close()
        for _, guest in self._open:
            guest.outbox.close()
            with suppress(OSError):
                guest.frames.sock.shutdown(socket.SHUT_RDWR)
        for thread, _ in self._open:
            thread.join()

    # -- the threads of one worker

    def _let_in(self, sock: socket.socket, said: bytes) -> None:
        ranks = self.ranks or 1 + max(chunk.rank for chunk in self.desk.shard.chunks)
        hello = read_hello(said, self._hello, ranks)
        frames = Frames(sock, f"worker {hello.place}", seconds=SILENCE, most=self.most)
        guest = Guest(frames, hello, fifo=self.desk.fifo)
        if hello.problem:
            self.count("refused")
            self.why = hello.problem
        turn_away = partial(guest.turn_away, hello.problem)
        run = turn_away if hello.problem else partial(self._hear, guest)
        thread = Thread(target=run, daemon=True, name=f"worker {hello.place}")
        thread.start()
        self._open.append((thread, guest))

    def _hear(self, guest: Guest) -> None:
        guest.sender.start()
        room = partial(self._room, guest)
        try:
            while True:
                guest.wait_for_room(self._most_letters)
                frame = guest.frames.receive(room)
                with self._lock:
                    self._take(guest, frame.kind, fields_of(frame.fields))
                    self._deliver()
        except FrameError as error:
            self.count("refused", is_damage(error))
            self._ended(guest, str(error))
        except (Refused, ValueError) as error:
            self.count("refused")
            guest.last = str(error)
            self._ended(guest, str(error))
        except Exception as error:
            self.broken = error
        finally:
            guest.outbox.close()
            guest.sender.join()
            guest.frames.close()

    def _room(self, guest: Guest, head: Head) -> list[memoryview]:
        """Where the payload of a frame lands. Raises FrameError for one that has none."""
        guest.landing = None
        if head.kind not in (PUSH, TRADE):
            return []
        said, masters = fields_of(head.fields), self.desk.shard.masters
        if not guest.incarnation or not 0 <= said.key < len(masters):
            raise FrameError(f"worker {guest.place} pushes key {said.key}, and has not joined it")
        self._moments.begin(self._message(guest.place, "push", said))
        master = masters[said.key]
        guest.landing = self._spares.take(master.numel(), master.dtype)
        return bytes_of(guest.landing)

    def _take(self, guest: Guest, kind: int, said: Fields) -> None:
        """Does what a message asks."""
        clock, key, value = said
        mine, chunks = (guest.place, guest.incarnation), self.desk.shard.chunks
        if kind == JOIN:
            self._join(guest, key)
        elif kind == PING:
            pass
        elif not guest.incarnation or self._guests.get(guest.seat) is not guest:
            raise Refused(f"worker {guest.place} has not joined")
        elif kind in (PULL, PUSH, TRADE) and {c.rank for c in chunks[key : key + 1]} - {guest.rank}:
            raise Refused(f"key {key} is none of rank {guest.rank} of worker {guest.place}")
        elif kind == BEGIN:
            self.desk.begin(*mine, clock)
        elif kind == PULL:
            self._pull(guest, said)
        elif kind in (PUSH, TRADE) and not 0 <= value < inf:
            raise Refused(f"worker {guest.place} pushes a sum over {value} tokens")
        elif kind in (PUSH, TRADE) and guest.landing is not None:
            term = Term(guest.landing, value)
            new = self.desk.push(Update(*mine, clock, key), term)
            self.counts["pushes" if new else "repeated"] += 1
            self.counts["pushed bytes"] += guest.landing.nbytes
            self._moments.end(self._message(guest.place, "push", said), size=guest.landing.nbytes)
            self._post(guest, ACK, said)
            if kind == TRADE:
                self._pull(guest, said._replace(clock=clock + 1))
        elif kind == BYE:
            self._forget(guest.seat)
            if guest.rank == 0:  # when all of its ranks have pushed everything
                self.counts["finished"] += 1
                self.desk.leave(*mine, finished=True)
            self._post(guest, BYE, said)
        else:
            raise Refused(f"worker {guest.place} sends a message of kind {kind}")

    def _pull(self, guest: Guest, said: Fields) -> None:
        self.desk.pull(guest.place, guest.incarnation, clock=said.clock, key=said.key)
        self._moments.begin(self._message(guest.place, "pull", said))

    def _join(self, guest: Guest, incarnation: int) -> None:
        """Gives a worker its place: again, if it was cut off, or as a new process. The ranks behind
        the first join by the incarnation that it was given.
        """
        member = self.desk.clocks.members.get(guest.place)
        if member and member.live and member.incarnation == incarnation > 0:
            seen = self._lost.pop(guest.seat, None) or guest.seat in self._guests
            self.counts["came back"] += bool(seen)
            self.desk.hang_up(*guest.seat)  # its old connection may not have ended here yet
            clock = member.clock
        elif guest.rank:
            raise Refused(f"incarnation {incarnation} of worker {guest.place} is over")
        else:
            incarnation, clock = self.desk.join(guest.place, incarnation)
            self._send_off(guest.place, but=guest)
            self.counts["joined"] += 1
        guest.incarnation = incarnation
        self._guests[guest.seat], self._has[guest.place] = guest, guest.process
        self.gone.pop(guest.place, None)
        self._post(guest, JOINED, Fields(clock, incarnation))

    def _send_off(self, place: int, but: Guest | None = None) -> bool:
        """Ends connections of a place, and its time to come back; whether there were any."""
        there = {seat for seat in (*self._guests, *self._lost) if seat[0] == place}
        for seat in there:
            self._lost.pop(seat, None)
            if (guest := self._guests.get(seat)) and guest is not but:
                self._forget(seat)
                guest.outbox.close()
        return bool(there)

    def _forget(self, seat: tuple[int, int]) -> None:
        """Forgets who has a seat, but not how many letters have waited for it."""
        self._deepest = max(self._deepest, self._guests.pop(seat).outbox.deepest)

    def _deliver(self) -> None:
        for answer in self.desk.answers():
            rank = self.desk.shard.chunks[answer.key].rank
            guest = self._guests.get((answer.worker, rank))
            if not guest:
                continue  # it asks again when it is back
            copy = self._spares.take(answer.weights.numel(), self._dtype).copy_(answer.weights)
            self.counts["pulls"] += 1
            self.counts["pulled bytes"] += copy.nbytes
            said = Fields(answer.clock, answer.key)
            self._moments.end(self._message(answer.worker, "pull", said), size=copy.nbytes)
            self._post(guest, WEIGHTS, said, copy)

    def _message(self, place: int, what: str, said: Fields) -> Message:
        chunk = self.desk.shard.chunks[said.key]
        where = f"{chunk.unit} {chunk.start}" + f" rank {chunk.rank}" * (chunk.rank > 0)
        return Message(f"worker {place}", f"{what} of {where}", said.clock)

    def _record(self, peer: str, what: str, size: int, took: Interval) -> None:
        self.recent.append(Call(peer, what, size, took.began, took.ended))

    def _ended(self, guest: Guest, why: str) -> None:
        with self._lock:
            self.why = why
            if self._guests.get(guest.seat) is guest:
                self._moments.forget(f"worker {guest.place}")
                self._forget(guest.seat)
                self._lost[guest.seat] = guest.incarnation, monotonic() + self._grace
                self.desk.hang_up(*guest.seat)
