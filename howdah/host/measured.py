"""Measured values of this machine and this process: peak flop/s and memory."""

import resource
import time

import torch

from howdah.host.facts import memory, memory_limit

# Dense bf16 peaks in flop/s from the vendors' data sheets (not the doubled figures for sparsity).
DATA_SHEETS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The peak flop/s for utilisation figures, and a text that names the source of the number.

    For a known accelerator and bf16 it is the value of the data sheet. Otherwise it is the best of
    four matrix products timed in this process: no data sheet has the peak of some cores of a CPU.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in DATA_SHEETS.items():
            if known in name and dtype is torch.bfloat16:
                return peak, f"{known} data sheet, dense bf16"
    size = 8192 if device.type == "cuda" else 768
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best = min(_seconds(matrix) for _ in range(4))
    return 2 * size**3 / best, f"measured {size}³ matrix product"


def _seconds(matrix: torch.Tensor) -> float:
    began = time.perf_counter()
    product = matrix @ matrix
    if product.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


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
