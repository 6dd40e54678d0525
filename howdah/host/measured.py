"""Measured values of this machine and this process: the memory that was used, and what is left.

Of a card there are two numbers. *Allocated* are the bytes of tensors, which a plan predicts.
*Reserved* is what torch's allocator has taken from the card for them: more, by the gaps in its
blocks. Neither has the context and the communicators.
"""

import resource
from typing import NamedTuple

import torch

from howdah.host.facts import memory, memory_limit, total_memory


class Used(NamedTuple):
    """Peaks of memory, in bytes.

    held      of a card the tensors, since the last `reset_peak`; of a CPU the resident memory of
              this process, since its start
    total     what the card, or the machine, has
    reserved  of a card what torch has taken from it; None on a CPU
    """

    held: int
    total: int
    reserved: int | None = None


def peak_memory(device: torch.device) -> Used:
    """The peaks of this process on `device`."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        held = torch.cuda.max_memory_allocated(device)
        return Used(held, total, torch.cuda.max_memory_reserved(device))
    return Used(most_held(), total_memory() or 1)


class Capacity(NamedTuple):
    """What a device has for the ranks on it.

    name    of the card, or "this machine"
    total   bytes of its memory
    ranks   of a run that share it
    others  bytes of a card that torch does not hold for this process: those of other processes, of
            the driver and of communicators; 0 on a CPU
    """

    name: str
    total: int
    ranks: int = 1
    others: int = 0

    @property
    def each(self) -> int:
        """Bytes for one rank; what other ranks hold is in their own part."""
        return (self.total - self.others * (self.ranks == 1)) // self.ranks


def capacity(device: torch.device, ranks: int) -> Capacity:
    """What `device` has. `ranks` are those of the run on this machine, dealt out to its cards."""
    if device.type != "cuda":
        return Capacity("this machine", total_memory() or 0, ranks)
    free, total = torch.cuda.mem_get_info(device)
    others = max(total - free - torch.cuda.memory_reserved(device), 0)
    sharers = -(-ranks // torch.cuda.device_count())
    return Capacity(torch.cuda.get_device_name(device), total, sharers, others)


def reset_peak(device: torch.device) -> None:
    """Starts the peaks of a card again; a CPU's are those since the start of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def most_held() -> int:
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def left(device: torch.device | None = None) -> int | None:
    """Bytes of memory that this process can still allocate, on a card if `device` is one; None if
    the system does not report it.

    The peak memory of this process is subtracted from the limit of its control group. Of a card,
    what torch has reserved and does not use counts as free.
    """
    if device is not None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    there, limit = memory().get("MemAvailable"), memory_limit()
    sizes = [there, None if limit is None else max(limit - most_held(), 0)]
    return min((size for size in sizes if size is not None), default=None)
