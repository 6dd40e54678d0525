"""A worker's end of the connections to its servers: what `parallel/` calls to push and to pull.

    backward     head ── layers.1 ── layers.0        push: a copy of each chunk goes to the outbox,
    outbox       [head][head][layers.1]…             and the most urgent one is sent first
    forward           embedding ── layers.0 ──       waits for its own chunks alone

Each server has a connection with two threads: one sends from the outbox, one reads, and writes what
comes straight into the weights. A connection that ends is made again, until `patience` is over:
the worker joins with its incarnation, asks again for what has not come, and pushes again what was
not acknowledged, which the server applies once.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from socket import SHUT_RDWR
from threading import Thread
from time import monotonic

from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.frames import FrameError, Frames, Gone, Head
from howdah.comm.handle import Handle
from howdah.comm.tls import sealing
from howdah.parallel.flat_params import FlatUnit
from howdah.server.awaited import Awaited
from howdah.server.chunks import Chunk
from howdah.server.messages import (
    ACK,
    BEGIN,
    BYE,
    JOINED,
    PULL,
    PUSH,
    REFUSED,
    TRADE,
    WEIGHTS,
    Fields,
    bytes_of,
    fields_of,
)
from howdah.server.moments import Message, Moments, Record, nobody
from howdah.server.outbox import Letter, Outbox
from howdah.server.pulled import Pulled
from howdah.server.spares import Spares
from howdah.server.way import ServerGone, Way, reach

LEAVING = 10.0  # seconds that a worker that is asked to leave waits for others, to finish its step


class Client:
    """The links of one rank of a worker to all its servers: the `links` of `parallel/served.py`.

    clock   of the step that is computed
    tokens  by which the step's gradients will be divided on the servers
    trades  whether a push asks for the weights of the next clock too, so that they come while other
            units are still pushed. For rules by which they are the same whenever they are answered
            (bsp): under others they would be older than at the next forward pass
    """

    def __init__(
        self,
        way: Way,
        place: int,
        chunks: Sequence[Sequence[Chunk]],
        units: Mapping[str, FlatUnit],
        record: Record = nobody,
        *,
        rank: int = 0,
    ) -> None:
        self.clock, self.tokens, self._units, self._record = 0, 0.0, units, record
        self._rank, self._links, self.trades = rank, list[_Link](), False
        for number, every in enumerate(chunks):
            mine = {key: chunk for key, chunk in enumerate(every) if chunk.rank == rank}
            self._links.append(_Link(way, number, (place, rank), mine, units))
            self._links[-1].moments = Moments(record)

    def join(
        self,
        begins: Callable[[Iterable[int]], int],
        agree: Callable[[list[int]], list[int]] = list,
    ) -> int:
        """Connects to all servers. Returns the clock at which the worker begins. Raises UserError
        for a server that refuses it, ServerGone for one that cannot be reached.

        begins  the clock at which it does, of those that the servers tell (`Sync.begins`)
        agree  tells all ranks of a worker what the first was told: its clock, and by server its
               incarnation, by which the others join
        """
        told = [0] * (1 + len(self._links))
        if self._rank == 0:
            told = [begins([link.join() for link in self._links])]
            told += [link.incarnation for link in self._links]
        self.clock, *incarnations = agree(told)
        for link, incarnation in zip(self._links, incarnations, strict=True):
            if self._rank:
                link.join(incarnation)
            link.begin(self.clock)
        return self.clock

    def push(self, unit: str) -> list[Handle]:
        """Posts the gradients of a unit, as they are now."""
        one = self._units[unit]
        assert one.gradients is not None
        for link in self._links:
            link.push(unit, one.gradients, self.clock, self.tokens, trades=self.trades)
        return []

    def pull(self, unit: str) -> list[Handle]:
        """Asks for the weights of a unit. The handle is done when they are in their places."""
        for link in self._links:
            link.pull(unit, self.clock)
        return [Pulled(self._links, unit, self._record)]

    def drain(self) -> None:
        """Waits until all servers have acknowledged all pushes."""
        for link in self._links:
            link.drain()

    def close(self) -> None:
        """Leaves: the servers no longer wait for this worker."""
        for link in self._links:
            link.close()

    @property
    def deepest(self) -> int:
        """The most chunks that waited to be sent to one server."""
        return max(link.outbox.deepest for link in self._links)

    @property
    def queued(self) -> int:
        """The most chunks that wait now to be sent to one server."""
        return max(link.outbox.waiting for link in self._links)

    @property
    def came_back(self) -> int:
        """How often a connection was made again."""
        return sum(link.came_back for link in self._links)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of gradients that were pushed, and of weights that were pulled, so far."""
        every = [link.moved for link in self._links]
        return sum(pushed for pushed, _ in every), sum(pulled for _, pulled in every)


class _Link:
    """The connection to one server, over all its sockets.

    wanted  by key, the clock of a pull whose weights have not come
    coming  by unit, how many keys of it are wanted
    asked   by unit, the clock for which it was asked last
    unacked by clock and key, the pushes that were not acknowledged, and their tokens
    moved   bytes of pushes that were posted, and of weights that have come
    """

    def __init__(
        self,
        way: Way,
        number: int,
        seat: tuple[int, int],
        chunks: Mapping[int, Chunk],
        units: Mapping[str, FlatUnit],
    ) -> None:
        self.way, self._number, self._seat = way, number, seat
        self._seal = sealing(way.tls, calls=True)
        self._chunks, self._turn = chunks, 1 + max(chunks, default=0)
        self._keys: dict[str, list[int]] = {}
        for key, chunk in chunks.items():
            self._keys.setdefault(chunk.unit, []).append(key)
        self._weights = {
            key: bytes_of(units[c.unit].weights[c.start : c.stop]) for key, c in chunks.items()
        }
        wide = next(iter(units.values())).masters.element_size()
        self._sizes = {key: chunk.length * wide for key, chunk in chunks.items()}  # of pushes
        self._changed = Awaited()
        self._wanted: dict[int, int] = {}
        self._coming: Counter[str] = Counter()
        self._asked: dict[str, int] = {}
        self._unacked: dict[int, dict[int, tuple[Tensor, float]]] = {}
        self._spares = Spares()
        self.incarnation, self._told, self._began = 0, -1, 0
        self._failed: Exception | None = None
        self._ends, self._followed = False, 0
        self.came_back, self.moved = 0, (0, 0)
        self.outbox = Outbox(window=way.window, fifo=way.fifo)
        self.moments, self._name = Moments(), f"server {number}"
        self._frames: Frames | None = None
        self._thread: Thread | None = None

    # -- what the worker asks

    def join(self, incarnation: int = 0) -> int:
        """Connects and joins, by the worker's incarnation if it has one; returns the clock that
        the server tells.
        """
        self.incarnation = incarnation
        self._connect()
        self._thread = Thread(target=self._run, daemon=True, name=f"server {self._number}")
        self._thread.start()
        self._await(lambda: self._told >= 0)
        return self._told

    def begin(self, clock: int) -> None:
        """Says at which clock the worker begins."""
        self._began = clock
        self.outbox.post(Letter(BEGIN, Fields(clock).packed, urgency=-1))

    def push(
        self, unit: str, flat: Tensor, clock: int, tokens: float, *, trades: bool = False
    ) -> None:
        """Posts copies of the server's chunks of a unit; `trades`: asks for its next weights."""
        keys = self._keys.get(unit, ())
        size = sum(self._sizes[key] for key in keys)
        message = Message(self._name, f"push of {unit}", clock)
        self.moments.begin(message, chunks=len(keys), size=size)
        with self._changed:
            self.moved = self.moved[0] + size, self.moved[1]
        if trades:
            with self._changed:
                self._ask(unit, clock + 1)
        for key in keys:
            chunk = self._chunks[key]
            part = flat[chunk.start : chunk.stop]
            copy = self._spares.take(part.numel(), part.dtype).copy_(part)
            with self._changed:
                self._unacked.setdefault(clock, {})[key] = copy, tokens
                if trades:  # with its push: another connection asks for it once
                    self._wanted[key] = clock + 1
                self.outbox.post(self._letter(clock, key, copy, tokens, TRADE if trades else PUSH))

    def _letter(
        self, clock: int, key: int, copy: Tensor, tokens: float, kind: int = PUSH
    ) -> Letter:
        fields = Fields(clock, key, tokens).packed
        urgency = clock * self._turn + key  # or late keys of a step would never be sent
        return Letter(kind, fields, bytes_of(copy), urgency, copy.nbytes)

    def pull(self, unit: str, clock: int) -> None:
        """Asks for the server's chunks of a unit, when it has all pushes but those of the latest
        step: a worker whose network is slower than it computes does not run away from the servers.
        """
        self._await(lambda: min(self._unacked, default=clock) > clock - 2)
        with self._changed:
            if self._asked.get(unit, -1) < clock:
                keys = self._ask(unit, clock)
                self._wanted |= dict.fromkeys(keys, clock)
                self.outbox.post(*(_pull(clock, key) for key in keys))

    def _ask(self, unit: str, clock: int) -> Sequence[int]:
        """Awaits the chunks of a unit, which are not wanted yet; their keys."""
        keys = self._keys.get(unit, ())
        self.moments.begin(Message(self._name, f"pull of {unit}", clock), chunks=len(keys))
        self._asked[unit], self._coming[unit] = clock, len(keys)
        return keys

    def has(self, unit: str) -> bool:
        """Whether the chunks of a unit that were asked for are here."""
        return not self._coming[unit]

    def wait(self, unit: str) -> None:
        """Waits until the chunks of a unit that were asked for are here."""
        self._await(lambda: self.has(unit))

    def drain(self) -> None:
        """Waits until every push was acknowledged."""
        self._await(lambda: not self._unacked)

    def close(self) -> None:
        """Leaves."""
        self._ends = True
        self.outbox.post(Letter(BYE, Fields().packed, urgency=1 << 40))
        if self._thread:
            self._thread.join(2.0)
        self.outbox.close()
        if self._frames:
            self._frames.close()

    def _follow(self) -> None:
        """Ends a connection whose other end is elsewhere now, and may never say so."""
        times = [*self.way.moved()].count(self._number) if self.way.moved else 0
        if times > self._followed and self._frames:
            self._followed = times
            with suppress(OSError):
                self._frames.sock.shutdown(SHUT_RDWR)

    def _await(self, met: Callable[[], bool]) -> None:
        until, moment = monotonic() + LEAVING, min(1.0, LEAVING)
        while not self._changed.wait(lambda: met() or self._failed is not None, moment):
            self._follow()
            if monotonic() >= until and self.way.leave and self.way.leave():
                raise ServerGone("it was asked to leave while it waited for other workers")
        if self._failed and not met():
            raise self._failed

    # -- the connection

    def _connect(self) -> None:
        self._frames = reach(self.way, self._number, self._seat, self.incarnation, self._seal)

    def _run(self) -> None:
        """Sends and reads, and connects again, until the worker leaves."""
        try:
            while not self._ends:
                frames = self._frames
                assert frames is not None
                sender = Thread(target=self.outbox.carry, args=(frames,), daemon=True, name="push")
                sender.start()
                self._listen(frames)
                self.outbox.close()
                frames.close()
                sender.join()
                if not self._ends:
                    self._come_back()
        except Exception as error:
            self._fail(error)
        finally:
            self.outbox.close()
            if self._frames:
                self._frames.close()

    def _listen(self, frames: Frames) -> None:
        """Reads until the connection ends. Raises what cannot be mended by another one."""
        try:
            self._hear(frames)
        except ServerGone:
            raise
        except (FrameError, OSError):
            return

    def _come_back(self) -> None:
        self._connect()
        self.came_back += 1
        with self._changed:  # what is asked meanwhile must not be asked twice
            self.outbox = Outbox(window=self.way.window, fifo=self.way.fifo)
            self.begin(self._began)
            for clock, pushed in self._unacked.items():
                self.outbox.post(*(self._letter(clock, key, *one) for key, one in pushed.items()))
            self.outbox.post(*(_pull(clock, key) for key, clock in self._wanted.items()))

    def _hear(self, frames: Frames) -> None:
        while True:
            frame = frames.receive(self._room)
            if frame.kind == REFUSED:
                why = f"server {self._number} refuses: {frame.fields.decode()}"
                raise ServerGone(why) if self.incarnation else UserError(why)
            clock, key, _ = fields_of(frame.fields)
            with self._changed:
                if frame.kind == JOINED:
                    self._told, self.incarnation = max(self._told, clock), key
                elif frame.kind == ACK:
                    self._acknowledged(clock, key)
                    self.outbox.landed(self._sizes[key])
                elif frame.kind == WEIGHTS and self._wanted.pop(key, None) is not None:
                    self._coming[self._chunks[key].unit] -= 1
                    size = sum(part.nbytes for part in frame.buffers)
                    self.moved = self.moved[0], self.moved[1] + size
                    self._ended("pull", clock, key, size)

    def _acknowledged(self, clock: int, key: int) -> None:
        """Forgets a push; once, for one that was sent again is acknowledged again."""
        pushed = self._unacked.get(clock, {})
        if one := pushed.pop(key, None):
            self._spares.give(one[0])
            self._ended("push", clock, key)
            if not pushed:
                del self._unacked[clock]

    def _ended(self, what: str, clock: int, key: int, size: int = 0) -> None:
        unit = self._chunks[key].unit
        self.moments.end(Message(self._name, f"{what} of {unit}", clock), size=size)

    def _room(self, head: Head) -> list[memoryview]:
        """Where weights land: in their place. Nobody uses them, for they were asked for."""
        if head.kind != WEIGHTS:
            return []
        clock, key, _ = fields_of(head.fields)
        if self._wanted.get(key) != clock:
            raise Gone(f"server {self._number} sends key {key} of clock {clock}, not asked for")
        return self._weights[key]

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._failed = error


def _pull(clock: int, key: int) -> Letter:
    return Letter(PULL, Fields(clock, key).packed, urgency=key)
