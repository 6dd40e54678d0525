"""A worker's connection to one server, which is made again as often as it ends.

Two threads: one sends from the outbox, one reads, and writes what comes straight into the weights.
A connection that ends is made again, until `patience` is over: the worker joins with its
incarnation, asks again for what has not come, and pushes again what was not acknowledged, which the
server applies once.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from socket import SHUT_RDWR
from threading import Thread
from time import monotonic

from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.frames import FrameError, Frames, Gone, Head
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
from howdah.server.moments import Message, Moments
from howdah.server.outbox import Letter, Outbox
from howdah.server.spares import Spares
from howdah.server.way import ServerGone, Way, reach

LEAVING = (
    10.0  # seconds that a worker that leaves waits for others, to finish its step, or be heard
)


class Link:
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
        self.incarnation, self._told = 0, -1
        self._began: int | None = None  # the clock that was said
        self._failed: Exception | None = None
        self._leaves = self._ends = False
        self._followed = 0
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
        """Leaves: says so until the server has heard it, for LEAVING seconds at most."""
        with self._changed:
            self._leaves = True
            self.outbox.post(_bye())
        self._changed.wait(lambda: self._ends or self._failed, LEAVING)
        self._ends = True
        self.outbox.close()
        self._hang_up()
        if self._thread:
            self._thread.join(2.0)
        if self._frames:
            self._frames.close()

    def _hang_up(self) -> None:
        if self._frames:
            with suppress(OSError):
                self._frames.sock.shutdown(SHUT_RDWR)

    def _follow(self) -> None:
        """Ends a connection whose other end is elsewhere now, and may never say so."""
        times = [*self.way.moved()].count(self._number) if self.way.moved else 0
        if times > self._followed and self._frames:
            self._followed = times
            self._hang_up()

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
                self._hang_up()  # it may wait for the other end to read
                sender.join()
                frames.close()
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
            if self._began is not None:
                self.begin(self._began)
            for clock, pushed in self._unacked.items():
                self.outbox.post(*(self._letter(clock, key, *one) for key, one in pushed.items()))
            self.outbox.post(*(_pull(clock, key) for key, clock in self._wanted.items()))
            if self._leaves:
                self.outbox.post(_bye())

    def _hear(self, frames: Frames) -> None:
        while True:
            frame = frames.receive(self._room)
            if self._leaves and frame.kind in (BYE, REFUSED):  # it has left, now or before
                with self._changed:
                    self._ends = True
                return
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


def _bye() -> Letter:
    return Letter(BYE, Fields().packed, urgency=1 << 40)


def _pull(clock: int, key: int) -> Letter:
    return Letter(PULL, Fields(clock, key).packed, urgency=key)
