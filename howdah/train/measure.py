"""What a machine can do and what a run uses of it: peak flops, memory, model flops."""

import resource
import time
from pathlib import Path

import torch

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
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return held, _host_memory()


def _host_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 1
