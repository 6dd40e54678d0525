"""Lanes of homes: a thread for each direction, which makes its moves in their order.

    MemoryLane   device and host are one memory: a move is a copy
    CardLane     a GPU: the thread drives a stream of its own, beside the one that computes

    compute   ── reads layers.1 ──┬── computes layers.2 ──────────┬── uses layers.3 ──
                                  │ start                         │ result
    lane                          └── weights of layers.3 come ───┘

A move on a GPU begins when the GPU has done what it was given before the move was started, and its
thread ends when the bytes are there. So a handle of a move means the same with either lane: who has
waited for it may read its target and write to its source, on the host and on the device.

A GPU copies by itself only from and to memory that is page-locked (`Locks`). What is not, and what
changes its dtype on its way, goes through two rooms of the lane: the host fills one while the GPU
empties the other.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.base.quantities import spell
from howdah.comm.handle import Handle
from howdah.comm.lane import Streams
from howdah.host.page_memory import whole_pages
from howdah.plan.homes import ROOM, ROOMS, Way

Part = Callable[[Tensor, int, int], object]  # of memory of the host: elements [first, last) of all


class Lane(Protocol):
    """The moves of one direction. All but `called` is for the thread of the lane.

    one_memory  device and host are one
    nbytes      of its rooms
    """

    thread: ThreadPoolExecutor
    one_memory: bool
    nbytes: int

    def called(self) -> Any:
        """Called where a move is started: a mark of what it is behind."""
        ...

    def behind(self, called: Any, after: Handle) -> AbstractContextManager[None]:
        """A block behind the mark and an operation; at its end all of its moves have ended."""
        ...

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Copies between device and host."""
        ...

    def up(self, out: Tensor, fill: Part) -> None:
        """Fills a tensor of the device, part by part along its first dim: `fill` writes a part."""
        ...

    def down(self, source: Tensor, take: Part) -> None:
        """Brings a tensor of the device, part by part along its first dim: `take` reads a part."""
        ...

    def here(self, x: Tensor) -> Tensor:
        """A small tensor of the device in memory of the host."""
        ...


class MemoryLane:
    """Device and host are one memory."""

    one_memory, nbytes = True, 0

    def __init__(self, way: Way) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=way)

    def called(self) -> None:
        """Nothing: what was computed before has ended."""

    @contextmanager
    def behind(self, called: None, after: Handle) -> Iterator[None]:
        """Waits for the operation."""
        after.result()
        yield

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Copies."""
        out.copy_(source)

    def up(self, out: Tensor, fill: Part) -> None:
        """The tensor is its only part."""
        fill(out, 0, len(out))

    def down(self, source: Tensor, take: Part) -> None:
        """The tensor is its only part."""
        take(source, 0, len(source))

    def here(self, x: Tensor) -> Tensor:
        """The tensor."""
        return x


class CardLane:
    """The moves of one direction between a GPU and the host."""

    one_memory = False

    def __init__(self, way: Way, streams: Streams, locks: "Locks") -> None:
        self.thread, self._up = ThreadPoolExecutor(1, thread_name_prefix=way), way == "fetch"
        self._streams, self._stream, self._locks = streams, streams.new(), locks
        self._rooms = [locks.lock(whole_pages(ROOM, torch.uint8)) for _ in range(ROOMS)]
        self.nbytes = ROOM * ROOMS

    def called(self) -> Any:
        """An event behind what the GPU was given so far."""
        event = self._streams.event()
        event.record(self._streams.current())
        return event

    @contextmanager
    def behind(self, called: Any, after: Handle) -> Iterator[None]:
        """The stream waits for what comes before, and the thread for the stream: so the clock of
        the host tells when a move began and ended.
        """
        with self._streams.inside(self._stream):
            self._stream.wait_event(called)
            after.result()  # of an operation on a stream: this one waits, too
            self._stream.synchronize()
            try:
                yield
            finally:  # its tensors are let go, whatever happened
                self._stream.synchronize()

    def copy(self, out: Tensor, source: Tensor) -> None:
        """Copies at once where that is possible, and through the rooms where it is not."""
        if out.dtype == source.dtype and self._locks.has(source if self._up else out):
            out.copy_(source, non_blocking=True)
        elif self._up:
            self.up(out, lambda part, a, b: part.copy_(source[a:b]))
        else:
            self.down(source, lambda part, a, b: out[a:b].copy_(part))

    def up(self, out: Tensor, fill: Part) -> None:
        """A room is filled when the GPU has emptied it."""
        free: list[Any] = [None] * ROOMS
        for number, (first, last) in enumerate(_parts(out)):
            room = number % ROOMS
            if free[room] is not None:
                free[room].synchronize()
            part = self._part(room, out, last - first)
            fill(part, first, last)
            out[first:last].copy_(part, non_blocking=True)
            free[room] = self._mark()

    def down(self, source: Tensor, take: Part) -> None:
        """A room is read while the GPU fills the other."""
        coming: list[tuple[Any, Tensor, int, int]] = []
        for number, (first, last) in enumerate(_parts(source)):
            part = self._part(number % ROOMS, source, last - first)
            part.copy_(source[first:last], non_blocking=True)
            coming.append((self._mark(), part, first, last))
            if len(coming) == ROOMS:
                _taken(*coming.pop(0), take)
        for one in coming:
            _taken(*one, take)

    def here(self, x: Tensor) -> Tensor:
        """A copy, for which the thread waits."""
        return x.cpu()

    def _part(self, room: int, like: Tensor, length: int) -> Tensor:
        """A room as a tensor of the dtype and the rows of another."""
        size = (length, *like.shape[1:])
        bytes_of_all = length * _width(like)
        return self._rooms[room][:bytes_of_all].view(like.dtype).view(size)

    def _mark(self) -> Any:
        event = self._streams.event()
        event.record(self._stream)
        return event


def _taken(event: Any, part: Tensor, first: int, last: int, take: Part) -> None:
    event.synchronize()
    take(part, first, last)


def _width(x: Tensor) -> int:
    """Bytes of an element, or of a row."""
    return x[:1].numel() * x.element_size()


def _parts(x: Tensor) -> Iterator[tuple[int, int]]:
    """The ranges along the first dim of which a room holds one."""
    step = max(ROOM // max(_width(x), 1), 1)
    for first in range(0, len(x), step):
        yield first, min(first + step, len(x))


class Locks:
    """Page-locked memory of the host: that of tensors, which are held until `close`."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def lock(self, x: Tensor) -> Tensor:
        """Locks the memory of a tensor. Returns the tensor. Raises UserError where the driver
        refuses.
        """
        address = x.untyped_storage().data_ptr()
        if address and address not in self._held:
            register(x.untyped_storage())
            self._held[address] = x
        return x

    def has(self, x: Tensor) -> bool:
        """Whether the memory of a tensor is locked."""
        return x.untyped_storage().data_ptr() in self._held

    def close(self) -> None:
        """Unlocks everything."""
        for address in self._held:
            unregister(address)
        self._held.clear()


def register(memory: torch.UntypedStorage) -> None:
    """Has the CUDA driver lock the pages of a storage, so that the GPU copies from and to it by
    itself. Allocators of pinned memory round sizes up to powers of two; this takes what is there.
    """
    error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes(), 1))
    if error:
        raise UserError(
            f"the driver cannot lock {spell(memory.nbytes(), 'bytes')} of the host's memory, from "
            f"which the GPU would copy weights or activations (CUDA error {error}): give "
            "containers the right to lock memory, or keep less at home on the host"
        )


def unregister(address: int) -> None:
    """Unlocks the pages of a storage."""
    torch.cuda.cudart().cudaHostUnregister(address)
