"""What a machine can do and what a run uses of it: peak flops, memory, model flops."""

import resource
import time

import torch

from howdah.host.facts import memory, memory_limit

# Dense bf16 peaks in flop/s from the vendors' data sheets (not the doubled, sparse figures).
DATA_SHEETS = {
    "A100": 312e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Flop/s that utilisation is measured against, and where the number is from.

    A known accelerator's data sheet; otherwise the best of a few matrix products of this very
    process, because a CPU's share of its cores stands in no data sheet.
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
    """Most bytes this process has held, and all there are: device memory, or resident memory."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return torch.cuda.max_memory_reserved(device), total
    return most_held(), memory().get("MemTotal", 1)


def most_held() -> int:
    """The most bytes of resident memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def left() -> int | None:
    """Bytes of memory that this process can still get; None where the system does not say.

    Of what its control group grants, what it has held itself is gone.
    """
    there, limit = memory().get("MemAvailable"), memory_limit()
    sizes = [there, None if limit is None else max(limit - most_held(), 0)]
    return min((size for size in sizes if size is not None), default=None)
