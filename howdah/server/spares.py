"""Spare buffers: memory of messages that have been sent or applied, for the next ones.

The kernel gives memory page by page when it is first written, and takes it back when a large array
is freed. For a chunk of 1 MiB that takes longer than to send it.
"""

from collections import defaultdict
from threading import Lock

import torch
from torch import Tensor

MOST = 64 << 20  # bytes that are kept


class Spares:
    """Flat buffers that nobody uses, by length and dtype. For any thread.

    most  bytes that are kept; what is given beyond them is freed
    """

    def __init__(self, most: int = MOST) -> None:
        self._kept: defaultdict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._most, self._bytes, self._lock = most, 0, Lock()

    def take(self, length: int, dtype: torch.dtype) -> Tensor:
        """A buffer, whose content is not defined."""
        with self._lock:
            if kept := self._kept[length, dtype]:
                found = kept.pop()
                self._bytes -= found.nbytes
                return found
        return torch.empty(length, dtype=dtype)

    def give(self, buffer: Tensor) -> None:
        """Takes back a buffer that is not used any more."""
        with self._lock:
            if self._bytes + buffer.nbytes <= self._most:
                self._bytes += buffer.nbytes
                self._kept[buffer.numel(), buffer.dtype].append(buffer)
