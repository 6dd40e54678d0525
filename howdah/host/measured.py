"""Measured values of this machine and this process: the memory that was used, and what is left."""

import resource

import torch

from howdah.host.facts import memory, memory_limit


def peak_memory(device: torch.device) -> tuple[int, int]:
    """Peak bytes that this process has held, and total bytes: of device memory on CUDA, otherwise
    of resident memory and the machine's memory.
    """
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_reserved(device), total
    return most_held(), memory().get("MemTotal", 1)


def most_held() -> int:
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def left() -> int | None:
    """Bytes of memory that this process can still allocate; None if the system does not report it.

    The peak memory of this process is subtracted from the limit of its control group.
    """
    there, limit = memory().get("MemAvailable"), memory_limit()
    sizes = [there, None if limit is None else max(limit - most_held(), 0)]
    return min((size for size in sizes if size is not None), default=None)
