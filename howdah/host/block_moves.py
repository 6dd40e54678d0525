"""Moves of blocks between memory and a file, several at a time: by threads, or by io_uring.

    threads    each waits in the kernel for its own block
    io_uring   one thread begins with all, and hears which have ended (`ring.py`)

Each move may use a block of memory that is aligned to pages, for what goes past the page cache
(O_DIRECT), which takes memory, positions and lengths in whole pages.
"""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import local
from typing import Protocol

import numpy as np

BLOCK, PAGE = 1 << 20, 4096


@dataclass(frozen=True)
class Move:
    """One block.

    write  whether it goes to the file
    at     its position there
    ready  gives the memory from which or to which it goes, perhaps in the aligned block that is
           given; None: nothing is to be moved
    ended  is called with that memory when all of it was moved
    lost   makes an error of what the system said
    """

    write: bool
    at: int
    ready: Callable[[memoryview], memoryview | None]
    ended: Callable[[memoryview], None]
    lost: Callable[[OSError], Exception]


class Mover(Protocol):
    """What moves blocks."""

    def start(self, move: Move) -> Future[None]:
        """Starts a move behind those before, of which several are under way at a time."""
        ...

    def close(self) -> None:
        """Ends when all moves have ended."""
        ...


class ByThreads:
    """Moves by so many threads."""

    def __init__(self, file: int, threads: int) -> None:
        self._file, self._own = file, local()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="disk")

    def start(self, move: Move) -> Future[None]:
        """Starts a move."""
        return self._pool.submit(self._move, move)

    def close(self) -> None:
        """Ends the threads. Moves that have not begun are cancelled."""
        self._pool.shutdown(cancel_futures=True)

    def _move(self, move: Move) -> None:
        if not hasattr(self._own, "block"):
            self._own.block = aligned_block()
        memory, done = move.ready(self._own.block), 0
        if memory is None:
            return
        try:
            while done < len(memory):
                rest, at = memory[done:], move.at + done
                moved = os.pwrite(self._file, rest, at) if move.write else 0
                done += advanced(moved if move.write else os.preadv(self._file, [rest], at))
        except OSError as error:
            raise move.lost(error) from error
        move.ended(memory)


def aligned_block() -> memoryview:
    """Memory of BLOCK bytes that begins with a page, and takes none until it is written."""
    return memoryview(mmap.mmap(-1, BLOCK))


def address(memory: memoryview) -> int:
    """Where memory begins."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def advanced(moved: int) -> int:
    """The bytes of one call. Raises OSError where there were none, so that nobody asks forever."""
    if not moved:
        raise OSError(0, "the file is shorter than it was")
    return moved
