"""io_uring: one thread begins with many reads and writes of a file, and hears which have ended.

    start     | waiting …  → ready → the kernel | → ended     by the thread, a move at a time; the
              kernel is given the next ones before what has ended is looked at
    a wake-up reads an eventfd by the same ring: so the thread waits for new moves and for the
    kernel in one place

`ring.c` makes the system calls, in the library of the engine.
"""

import errno
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from ctypes import (
    CDLL,
    byref,
    c_int,
    c_int32,
    c_uint32,
    c_uint64,
    c_void_p,
    create_string_buffer,
    get_errno,
)
from dataclasses import dataclass, field
from threading import Thread

from howdah.host.block_moves import Move, address, advanced, aligned_block

SETUP = 425  # the number of io_uring_setup, on every processor
WAKE = (1 << 64) - 1  # the tag of the read that hears of new moves


class Requests:
    """The requests of one thread to the kernel, at most so many at a time. Raises OSError where
    there is no io_uring.
    """

    def __init__(self, library: CDLL, most: int) -> None:
        self._calls, error = library, c_int()
        for name, result, arguments in (
            ("open", c_void_p, (c_uint32, c_void_p)),
            (
                "start",
                c_int,
                (*(c_void_p, c_int, c_int), c_void_p, *(c_uint32, c_uint64, c_uint64)),
            ),
            ("wait", c_int, (c_void_p, c_void_p, c_void_p, c_uint32)),
            ("close", None, (c_void_p,)),
        ):
            function = getattr(library, f"howdah_ring_{name}")
            function.restype, function.argtypes = result, arguments
        self._ring = library.howdah_ring_open(most, byref(error))
        _raised(error.value)
        self._tags, self._moved = (c_uint64 * most)(), (c_int32 * most)()

    def start(self, file: int, memory: memoryview, at: int, tag: int, *, write: bool) -> None:
        """Starts to write memory to a file, or to read into it. Raises OSError."""
        where, size = address(memory), len(memory)
        _raised(self._calls.howdah_ring_start(self._ring, write, file, where, size, at, tag))

    def wait(self) -> Iterator[tuple[int, int]]:
        """Waits until some have ended: their tags, and the bytes moved or a negative error number.
        Raises OSError.
        """
        most = len(self._tags)
        count = self._calls.howdah_ring_wait(self._ring, self._tags, self._moved, most)
        _raised(-min(count, 0))
        return zip(self._tags[:count], self._moved[:count], strict=True)

    def close(self) -> None:
        """Ends; none may be under way but those that wait for something that never comes."""
        self._calls.howdah_ring_close(self._ring)


@dataclass
class _UnderWay:
    """A move of which the kernel is or was asked; `done` bytes of its memory were moved."""

    move: Move
    future: Future[None]
    memory: memoryview = field(default_factory=lambda: memoryview(b""))
    done: int = 0


class ByRing:
    """Moves blocks by io_uring, so many at a time. Raises OSError where the kernel has it not, or
    refuses it, as containers often do.

    library  with the functions of `ring.c`
    """

    def __init__(self, file: int, requests: int, library: CDLL) -> None:
        self._ring, self._file = Requests(library, requests + 1), file
        self._broken: Exception | None = None
        self._abandoned: list[memoryview] = []  # held: the kernel may still write there
        self._wake, self._heard = os.eventfd(0), memoryview(bytearray(8))
        self._waiting = deque[tuple[Move, Future[None]]]()
        self._under_way = dict[int, _UnderWay]()  # by the number of the aligned block it has
        self._blocks = [aligned_block() for _ in range(2 * requests)]  # half of them have ended
        self._free, self._open = [*range(2 * requests)], True
        self._asked, self._most = 0, requests  # of the kernel, now and at most
        self._thread = Thread(target=self._run, name="disk", daemon=True)
        self._listen()
        self._thread.start()

    def start(self, move: Move) -> Future[None]:
        """Starts a move."""
        future: Future[None] = Future()
        self._waiting.append((move, future))
        if self._broken:
            self._lose_waiting(self._broken)
        else:
            os.eventfd_write(self._wake, 1)
        return future

    def close(self) -> None:
        """Ends the thread. Moves that have not begun are cancelled."""
        self._open = False
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._ring.close()
        os.close(self._wake)

    def _listen(self) -> None:
        self._ring.start(self._wake, self._heard, 0, WAKE, write=False)

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # of the ring, not of a move: nothing that is asked for will end
            self._broken = error
            self._abandoned = [one.memory for one in self._under_way.values()]
            for number, one in [*self._under_way.items()]:
                self._end(number, _lost(one.move, error))
            self._lose_waiting(error)
        else:
            for _, future in self._waiting:
                future.cancel()

    def _lose_waiting(self, error: Exception) -> None:
        with suppress(IndexError):
            while True:
                move, future = self._waiting.popleft()
                future.set_exception(_lost(move, error))

    def _serve(self) -> None:
        while self._open or self._under_way:
            over = []
            for tag, moved in self._ring.wait():
                if tag == WAKE:
                    if self._open:
                        self._listen()
                elif self._advance(self._under_way[tag], tag, moved):
                    over.append(tag)
            while self._open and self._asked < self._most and self._free and self._waiting:
                self._begin(*self._waiting.popleft(), self._free.pop())
            for tag in over:
                self._look(self._under_way[tag], tag)

    def _begin(self, move: Move, future: Future[None], number: int) -> None:
        one = _UnderWay(move, future)
        self._under_way[number] = one
        try:
            memory = move.ready(self._blocks[number])
        except Exception as error:
            self._end(number, error)
            return
        if memory is None:
            self._end(number)
            return
        one.memory = memory
        self._go_on(one, number)

    def _go_on(self, one: _UnderWay, number: int) -> None:
        """Starts what is left of a move."""
        rest, at = one.memory[one.done :], one.move.at + one.done
        try:
            self._ring.start(self._file, rest, at, number, write=one.move.write)
        except OSError as error:
            self._end(number, one.move.lost(error))
        else:
            self._asked += 1

    def _advance(self, one: _UnderWay, number: int, moved: int) -> bool:
        """Takes what the kernel has said of a move; whether all of its bytes have moved."""
        self._asked -= 1
        try:
            if moved < 0:
                raise OSError(-moved, os.strerror(-moved))
            one.done += advanced(moved)
        except OSError as error:
            self._end(number, one.move.lost(error))
            return False
        if one.done < len(one.memory):
            self._go_on(one, number)
            return False
        return True

    def _look(self, one: _UnderWay, number: int) -> None:
        """Ends a move of which all bytes have moved."""
        try:
            one.move.ended(one.memory)
        except Exception as error:
            self._end(number, error)
        else:
            self._end(number)

    def _end(self, number: int, error: Exception | None = None) -> None:
        one = self._under_way.pop(number)
        self._free.append(number)
        if error is None:
            one.future.set_result(None)
        else:
            one.future.set_exception(error)


def _lost(move: Move, error: Exception) -> Exception:
    """The error of a move that does not end, because of an error of the ring."""
    return move.lost(error) if isinstance(error, OSError) else error


def refused() -> OSError | None:
    """Why the kernel gives this process no ring; None if it does."""
    libc = CDLL(None, use_errno=True)
    if not hasattr(libc, "eventfd"):  # another system than Linux
        return OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    file = libc.syscall(SETUP, 1, create_string_buffer(256))  # struct io_uring_params has 120 bytes
    if file < 0:
        return OSError(get_errno(), os.strerror(get_errno()))
    os.close(file)
    return None


def _raised(number: int) -> None:
    """Raises the OSError with this number; 0: none."""
    if number:
        raise OSError(number, os.strerror(number))
