"""Memory of the host in pages of its own.

It begins with a page and shares none with other tensors, so that a driver can lock it and a disk
can be read into it past the page cache. A page takes memory when it is first used. Pages are large
where the kernel has such.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor


def whole_pages(length: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros. Raises MemoryError where there is no room for it."""
    if not length:
        return torch.zeros(0, dtype=dtype)
    try:
        memory = mmap.mmap(-1, length * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{length * dtype.itemsize} bytes: {error.strerror}") from error
    with suppress(OSError, AttributeError):  # a kernel without them, another system
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=length)
