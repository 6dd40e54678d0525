"""F: training steps at real shapes: tokens per second, shares of the peak, memory, saves.

Random tokens, always the same; a constant batch. Of each row three blocks of steps are timed, and
the median is told. `mfu` is by the dense rate of the data sheet, or else of this card's own product
of random matrices; attention counts as the full square, or as half of it.
"""

import tempfile
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rows import Place, Report
from steps import Stepper, stepper

from howdah.checkpoint.folders import step_folder
from howdah.checkpoint.index import About
from howdah.checkpoint.load import open_checkpoint
from howdah.checkpoint.save import Saver
from howdah.checkpoint.snapshot import snapshots_of
from howdah.comm.transport import SingleRank
from howdah.host.peak import data_sheet, facts_of
from howdah.plan.method import Method
from howdah.shapes.presets import preset
from howdah.shapes.products import train_flops
from howdah.shapes.shape import ModelShape
from howdah.train.report import predicted_memory
from howdah.train.state import entries

ONE, EIGHT = preset("llama3-1b"), preset("llama3-8b")
LENGTH = 4096


@dataclass(frozen=True)
class Run:
    """A row: a model, its micro-batch, and what is done to it."""

    shape: ModelShape
    rows: int
    compiled: bool = True
    words: str = "single"
    documents: int = 1
    precision: str = "bf16"


RUNS = {
    "1b": Run(ONE, 8),
    "1b, eager": Run(ONE, 8, compiled=False),
    "8b of 4 layers": Run(replace(EIGHT, layers=4), 2),
    "1b, 4 rows": Run(ONE, 4),
    "1b, packed documents": Run(ONE, 8, documents=8),
    "1b, fp8": Run(ONE, 8, precision="fp8"),
    "8b of 4 layers, fp8": Run(replace(EIGHT, layers=4), 2, precision="fp8"),
    "1b, recompute=full": Run(ONE, 8, words="recompute=full"),
    "1b, recompute=selective": Run(ONE, 8, words="recompute=selective"),
    "8b of 4 layers, eager": Run(replace(EIGHT, layers=4), 2, compiled=False),
    "1b, 16 rows": Run(ONE, 16),
    "8b of 1 layer": Run(replace(EIGHT, layers=1), 2),
}
SPEED = (
    "tokens/s",
    "mfu full square",
    "mfu causal",
    "step ms",
    "loss",
    "allocated",
    "reserved",
    "planned",
)
SAVES = ("bytes", "step ms", "step beside a copy ms", "written s", "blocking s", "read s")
FIRST = 2  # rows before those of other kinds, which are worth more than the rest
ROWS = {
    **dict.fromkeys(RUNS, SPEED),
    "peak": ("tflops", "source"),
    "kernels": ("busy share", "kernels of a step"),
    "checkpoint": SAVES,
}


def measure(place: Place, report: Report) -> None:
    report.measure("peak", partial(peak, place))
    flops = (report.found["peak"]["tflops"] or 0.0) * 1e12
    for number, (name, run) in enumerate(RUNS.items()):
        if number == FIRST:
            report.measure("checkpoint", partial(checkpoint, place))
            report.measure("kernels", partial(kernels, place))
        report.measure(name, partial(speed, place, run, flops))


def peak(place: Place) -> dict[str, Any]:
    found = data_sheet(facts_of(place.device, torch.bfloat16, 1))
    if found:
        return {"tflops": found.flops / 1e12, "source": found.source}
    size = place.pick(8192, 64)
    left, right = torch.randn(2, size, size, device=place.device).bfloat16()
    seconds = place.seconds(partial(torch.mm, left, right), repeats=5)
    return {"tflops": 2 * size**3 / seconds / 1e12, "source": f"measured {size}³ product"}


def small(shape: ModelShape) -> ModelShape:
    """The same forms in milliseconds on a CPU."""
    return replace(
        shape, layers=1, width=32, heads=4, kv_heads=2, head_size=8, ffn_size=48, vocab=96
    )


def opened(place: Place, run: Run) -> Any:
    """The stepper of a row."""
    return stepper(
        place.pick(run.shape, small(run.shape)),
        run.words,
        SingleRank(),
        device=place.device,
        method=Method(run.precision),  # type: ignore[arg-type]
        rows=place.pick(run.rows, 1),
        length=place.pick(LENGTH, 16),
        documents=run.documents,
        compile_with=place.pick("inductor", "eager") if run.compiled else "",
    )


def speed(place: Place, run: Run, flops: float) -> dict[str, Any]:
    shape, length = place.pick(run.shape, small(run.shape)), place.pick(LENGTH, 16)
    with opened(place, run) as one:
        one()
        if not place.cpu:
            torch.cuda.reset_peak_memory_stats(place.device)
        seconds = place.seconds(one, repeats=place.pick(5, 1), warm=place.pick(4, 1))
        loss, _ = one.untold.loss, place.sync()  # type: ignore[union-attr]
        tokens = place.pick(run.rows, 1) * length / seconds
        square, causal = (
            tokens * train_flops(shape, length, causal=c) / flops if flops else None
            for c in (False, True)
        )
        plan = one.context.placed.plan
        return {
            "tokens/s": tokens,
            "mfu full square": square,
            "mfu causal": causal,
            "step ms": 1e3 * seconds,
            "loss": loss,
            "allocated": None if place.cpu else torch.cuda.max_memory_allocated(place.device),
            "reserved": None if place.cpu else torch.cuda.max_memory_reserved(place.device),
            "planned": sum(predicted_memory(plan, 0, packed=run.documents > 1).values()),
        }


def kernels(place: Place) -> dict[str, Any]:
    """How many kernels a step launches, and what share of its time some kernel runs."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.autograd.DeviceType.CPU if place.cpu else torch.autograd.DeviceType.CUDA
    kind = ProfilerActivity.CPU if place.cpu else ProfilerActivity.CUDA
    with opened(place, RUNS["1b"]) as one:
        for _ in range(4):
            one()
        place.sync()
        with profile(activities=[kind]) as record:
            began = perf_counter()
            one()
            place.sync()
            seconds = perf_counter() - began
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in record.events()
        if event.device_type == device
    )
    busy, end = 0.0, 0.0
    for start, stop in spans:  # streams may overlap
        busy += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    return {"busy share": busy / 1e6 / seconds, "kernels of a step": len(spans)}


def checkpoint(place: Place) -> dict[str, Any]:
    """A save beside training, one that training waits for, and reading it back."""
    run = Run(replace(ONE, layers=4), 8, compiled=False)  # 6 GB on disk, twice
    with opened(place, run) as one, tempfile.TemporaryDirectory() as folder:
        plain = place.seconds(one, repeats=place.pick(3, 1))
        snapshots = snapshots_of(place.device, None)
        object.__setattr__(one.context, "snapshots", snapshots)
        saver = Saver(Path(folder), rank=0, world=1, keep=1, say=print, snapshots=snapshots)
        saver.save(step=1, entries=entries(one.context.placed), about=ABOUT)  # pins its memory
        snapshots.settle()
        saver.wait()
        beside, written = saved_beside(place, one, saver)
        began = perf_counter()
        saver.save(step=3, entries=entries(one.context.placed), about=ABOUT, beside=False)
        blocking = perf_counter() - began
        saver.wait()
        stored = open_checkpoint(step_folder(Path(folder), 3))
        began = perf_counter()
        for kind, piece, tensor in entries(one.context.placed):
            stored.read(kind, piece, tensor)
        return {
            "bytes": sum(tensor.nbytes for _, _, tensor in entries(one.context.placed)),
            "step ms": 1e3 * plain,
            "step beside a copy ms": 1e3 * beside,
            "written s": written,
            "blocking s": blocking,
            "read s": perf_counter() - began,
        }


ABOUT = About("gpu", "single", 0, {})


def saved_beside(place: Place, one: Stepper, saver: Saver) -> tuple[float, float]:
    """Seconds of the step that follows a save, and until the save has ended."""
    place.sync()
    began = perf_counter()
    saver.save(step=2, entries=entries(one.context.placed), about=ABOUT)
    one()
    place.sync()
    beside = perf_counter() - began
    saver.wait()
    return beside, perf_counter() - began
