"""A: what this GPU can do at all: products, copies, launches, torch's kernels of attention."""

from functools import partial
from typing import Any

import torch
from rows import Place, Report, Unavailable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
COPIES = ("on the device", "host to device, pinned", "host to device", "device to host, pinned")
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
HEADS = (64, 128)
ROWS = {
    **{f"product {name}": ("size", "tflops") for name in (*DTYPES, "fp8")},
    **{f"copy {name}": ("bytes", "gb/s") for name in COPIES},
    "launch": ("microseconds",),
    **{
        f"attention {name} d={size}": ("forward tflops", "both tflops")
        for size in HEADS
        for name in BACKENDS
    },
}


def measure(place: Place, report: Report) -> None:
    for name in (*DTYPES, "fp8"):
        report.measure(f"product {name}", partial(product, place, name))
    for name in COPIES:
        report.measure(f"copy {name}", partial(copy, place, name))
    report.measure("launch", partial(launch, place))
    for size in HEADS:
        for name in BACKENDS:
            report.measure(f"attention {name} d={size}", partial(attention, place, name, size))


def product(place: Place, name: str) -> dict[str, Any]:
    """Of random square matrices: of ones a card draws less power."""
    size = place.pick(8192, 64)
    draw = torch.randn(2, size, size, device=place.device)
    if name == "fp8":
        if not hasattr(torch, "float8_e4m3fn") or place.cpu:
            raise Unavailable("no product of fp8 here")
        left, right = (x.to(torch.float8_e4m3fn) for x in draw)
        one = torch.ones((), device=place.device)
        work = partial(torch._scaled_mm, left, right.t(), one, one, out_dtype=torch.bfloat16)
    else:
        left, right = draw.to(DTYPES[name])
        work = partial(torch.mm, left, right)
    return {"size": size, "tflops": 2 * size**3 / place.seconds(work, repeats=10) / 1e12}


def copy(place: Place, name: str) -> dict[str, Any]:
    count = place.pick(1 << 30, 1 << 16)
    there = torch.empty(count, dtype=torch.uint8, device=place.device)
    pin = name.endswith("pinned") and not place.cpu
    here = torch.empty(count, dtype=torch.uint8, pin_memory=pin)
    if name == "on the device":
        work = partial(there.copy_, torch.empty_like(there))
    elif name.startswith("host"):
        work = partial(there.copy_, here, non_blocking=pin)
    else:
        work = partial(here.copy_, there, non_blocking=pin)
    moved = 2 * count if name == "on the device" else count  # read and written
    return {"bytes": count, "gb/s": moved / place.seconds(work, repeats=3) / 1e9}


def launch(place: Place) -> dict[str, Any]:
    x = torch.zeros(1, device=place.device)
    return {"microseconds": 1e6 * place.seconds(partial(x.add_, 1), repeats=place.pick(3000, 30))}


def attention(place: Place, name: str, size: int) -> dict[str, Any]:
    rows, heads, length = place.pick((2, 2048 // size, 4096), (1, 2, 32))
    q, k, v = (
        torch.randn(
            rows, heads, length, size, device=place.device, dtype=torch.bfloat16
        ).requires_grad_()
        for _ in range(3)
    )
    flops = 2 * rows * heads * length**2 * size  # causal: half of two products

    def forward() -> torch.Tensor:
        with sdpa_kernel([BACKENDS[name]]):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        x = forward()
        torch.autograd.grad(x, (q, k, v), x)

    with torch.no_grad():
        first = place.seconds(forward, repeats=place.pick(10, 1))
    second = place.seconds(both, repeats=place.pick(5, 1))
    return {"forward tflops": flops / first / 1e12, "both tflops": 3.5 * flops / second / 1e12}
