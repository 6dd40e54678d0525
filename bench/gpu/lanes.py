"""C: streams. Delays on either side must not change a bit, and a wait that is left out must.

One process plays rank 0 of a layout of two (`loop_wire.py`): what it launches on its lanes, and the
order that events make, are those of a run.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from loop_wire import Loops, Pool, looped
from parity import LLAMA
from rows import Place, Report, Unavailable, first_line
from steps import Stepper, stepper

from howdah.comm.handle import OnThread
from howdah.comm.lane import Landing, Lane
from howdah.plan.method import Method

LAYOUTS = ("dp2 x2", "dp2 zero1 x2", "dp2 zero2 x2", "dp2 zero3 x2", "tp2 x2", "tp2 sp x2")
STEPS = 2
CYCLES, NAP = 2_000_000, 0.0005  # a delay of some milliseconds on a GPU; seconds on the CPU
MUTATIONS = ("no result", "no start")
ROWS = {
    **{f"{words}, delays": ("equal bits", "operations") for words in LAYOUTS},
    **{f"mutation: {name}": ("noticed",) for name in MUTATIONS},
    "synchronisations": ("steps", "found"),
    "sanitizer": ("found",),
}


def measure(place: Place, report: Report) -> None:
    with Pool(place.device) as pool:
        for words in LAYOUTS:
            report.measure(f"{words}, delays", partial(delays, place, pool, words))
        report.measure("synchronisations", partial(synchronisations, place, pool))
        for name in MUTATIONS:
            report.measure(f"mutation: {name}", partial(mutation, place, pool, name))
        report.measure("sanitizer", partial(sanitizer, place, pool))


class Delay:
    """Keeps the current stream busy for a while, and counts how often."""

    def __init__(self, place: Place) -> None:
        self._place, self.on, self.count = place, False, 0

    def __call__(self, *_: object) -> None:
        self.count += 1
        if not self.on:
            return
        if self._place.cpu:
            time.sleep(NAP)
        else:
            torch.cuda._sleep(CYCLES)


def signature(
    place: Place, pool: Pool, words: str, late: str = ""
) -> tuple[tuple[float, int], int]:
    """The signature of a run, and how many operations it called.

    late  what is delayed: lanes, compute, or nothing
    """
    lanes, compute = Delay(place), Delay(place)
    lanes.on, compute.on = late == "lanes", late == "compute"
    with (
        looped(pool, lanes) as loops,
        two(place, words, loops, Method("float32")) as one,
    ):
        for block in one.context.placed.model.layers.values():
            block.register_forward_pre_hook(compute)
        for _ in range(STEPS):
            one()
        place.sync()
        return one.signature(), lanes.count


def two(place: Place, words: str, loops: Loops, method: Method) -> AbstractContextManager[Stepper]:
    """Rank 0 of two, with packed documents."""
    return stepper(
        LLAMA,
        words,
        loops.of(2),
        device=place.device,
        method=method,
        rows=2,
        length=16,
        documents=2,
    )


def delays(place: Place, pool: Pool, words: str) -> dict[str, Any]:
    quick, count = signature(place, pool, words)
    late = [signature(place, pool, words, what)[0] for what in ("lanes", "compute")]
    return {"equal bits": late == [quick, quick], "operations": count}


def mutation(place: Place, pool: Pool, name: str) -> dict[str, Any]:
    """The bits with one of the two edges left out, beside delays: they have to change."""
    right, _ = signature(place, pool, "dp2 zero1 x2")
    late = "lanes" if name == "no result" else "compute"
    with left_out(name, place):
        try:
            wrong, _ = signature(place, pool, "dp2 zero1 x2", late)
        except RuntimeError:  # autograd has seen that a tensor changed
            return {"noticed": True}
    return {"noticed": wrong != right}


@contextmanager
def left_out(name: str, place: Place) -> Iterator[None]:
    if place.cpu and name == "no start":
        raise Unavailable("a thread cannot start before it is called")
    if place.cpu:
        with patch.object(OnThread, "result", lambda self: None):
            yield
    elif name == "no result":
        with patch.object(Landing, "behind", lambda self, stream: None):
            yield
    else:
        init: Callable[..., None] = Lane.__init__

        def deaf(self: Lane, *args: Any, **rest: Any) -> None:
            init(self, *args, **rest)
            self._stream = _Deaf(self._stream)

        with patch.object(Lane, "__init__", deaf):
            yield


class _Deaf(torch.cuda.Stream):
    """A stream that does not wait for the compute stream."""

    def __new__(cls, stream: torch.cuda.Stream) -> "_Deaf":
        return super().__new__(
            cls,
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    def wait_stream(self, stream: object) -> None:
        """Does not."""


def synchronisations(place: Place, pool: Pool) -> dict[str, Any]:
    """Three steps in which torch raises an error where the host waits for the GPU."""
    if place.cpu:
        raise Unavailable("the host is the device")
    with (
        looped(pool) as loops,
        two(place, "dp2 zero1 x2", loops, Method("bf16")) as one,
    ):
        one()
        place.sync()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                one()
        except RuntimeError as error:
            return {"steps": 3, "found": first_line(error)}
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return {"steps": 3, "found": ""}


def sanitizer(place: Place, pool: Pool) -> dict[str, Any]:
    """A step under torch's checker of streams, which sees what its own operators touch. It is the
    last row: what it hooks stays hooked.
    """
    if place.cpu:
        raise Unavailable("torch's sanitizer is for CUDA")
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    try:
        signature(place, pool, "dp2 zero1 x2")
    except _sanitizer.CUDASanitizerErrors as errors:
        return {"found": len(errors.errors)}
    return {"found": 0}
