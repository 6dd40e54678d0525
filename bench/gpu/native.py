"""E: NCCL in a world of one: every operation that a run calls, three lanes at once, and the end."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from loop_wire import Pool, connect_alone, looped
from parity import LLAMA
from rows import Place, Report, Unavailable
from steps import stepper
from torch import Tensor

from howdah.comm.native import Native
from howdah.plan.method import Method

COUNT = 1024
Operation = Callable[[Native, Tensor, Tensor], object]  # wire, out, x


def in_a_group(wire: Native, out: Tensor, x: Tensor) -> None:
    """Two operations that are launched together."""
    first, second = out.copy_(x).chunk(2)
    with wire.group():
        wire.all_reduce(first)
        wire.all_reduce(second)


OPERATIONS: dict[str, Operation] = {
    "all_reduce sum": lambda wire, out, x: wire.all_reduce(out.copy_(x)),
    "all_reduce mean": lambda wire, out, x: wire.all_reduce(out.copy_(x), "mean"),
    "all_reduce max": lambda wire, out, x: wire.all_reduce(out.copy_(x), "max"),
    "reduce_scatter": lambda wire, out, x: wire.reduce_scatter(out, x, [COUNT]),
    "reduce_scatter in place": lambda wire, out, x: wire.reduce_scatter(out.copy_(x), out, [COUNT]),
    "all_gather": lambda wire, out, x: wire.all_gather(out, x, [COUNT]),
    "broadcast": lambda wire, out, x: wire.broadcast(out.copy_(x), 0),
    "reduce": lambda wire, out, x: wire.reduce(out.copy_(x), 0),
    "gather": lambda wire, out, x: wire.gather(out, x, 0, [COUNT]),
    "scatter": lambda wire, out, x: wire.scatter(out, x, 0, [COUNT]),
    "all_to_all": lambda wire, out, x: wire.all_to_all(out, x, [COUNT], [COUNT]),
    "two in a group": in_a_group,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
STEPS = ("dp2 x2", "dp2 zero3 x2", "tp2 sp x2")
ROWS = {
    "version": ("nccl", "connected after"),
    **dict.fromkeys(OPERATIONS, ("equal",)),
    "three lanes": ("equal", "bytes of a communicator"),
    **{f"step of {words}": ("equal bits",) for words in STEPS},
    "abort, and connect again": ("aborted after", "equal"),
    "flight record": ("bytes",),
}


def measure(place: Place, report: Report) -> None:
    wires: list[Native] = []
    report.measure("version", partial(version, place, wires))
    for name, operation in OPERATIONS.items():
        report.measure(name, partial(right, place, wires, operation))
    report.measure("three lanes", partial(three_lanes, place))
    with Pool(place.device) as pool:
        for words in STEPS:
            report.measure(f"step of {words}", partial(as_without, place, pool, words))
    report.measure("flight record", partial(flight_record, place))
    report.measure("abort, and connect again", partial(abort, place, wires))


def version(place: Place, wires: list[Native]) -> dict[str, Any]:
    began = time.perf_counter()
    wires.append(connect_alone(place.device))
    seconds = time.perf_counter() - began
    number = "" if place.cpu else ".".join(map(str, torch.cuda.nccl.version()))
    return {"nccl": number, "connected after": seconds}


def right(place: Place, wires: list[Native], operation: Operation) -> dict[str, Any]:
    """Whether the operation leaves what one rank has, in every dtype, on its lane."""
    if not wires:
        raise Unavailable("there is no communicator")
    return {"equal": all(is_right(place, wires[0], operation, dtype) for dtype in DTYPES)}


def is_right(place: Place, wire: Native, operation: Operation, dtype: torch.dtype) -> bool:
    x = torch.randn(COUNT, device=place.device).to(dtype)
    out = torch.zeros_like(x)
    if wire.lane is None:
        operation(wire, out, x)
    else:
        wire.lane.start(lambda: operation(wire, out, x), [out, x]).result()
    return torch.equal(out, x)


def three_lanes(place: Place) -> dict[str, Any]:
    """Three communicators at once, and the memory of the card that each takes."""
    free = partial(torch.cuda.mem_get_info, place.device)
    before = 0 if place.cpu else free()[0]
    wires = [connect_alone(place.device) for _ in range(3)]
    all_right = [is_right(place, w, OPERATIONS["all_reduce sum"], torch.float32) for w in wires]
    place.sync()
    taken = None if place.cpu else (before - free()[0]) // 3
    for wire in wires:
        wire.close()
    return {"equal": all(all_right), "bytes of a communicator": taken}


def as_without(place: Place, pool: Pool, words: str) -> dict[str, Any]:
    """Two training steps whose operations are NCCL's, and by copies on the compute stream."""
    found = []
    for carried in (pool, None):
        with (
            looped(carried) as loops,
            stepper(
                LLAMA,
                words,
                loops.of(2),
                device=place.device,
                method=Method("float32"),
                rows=2,
                length=16,
            ) as one,
        ):
            one()
            one()
            found.append(one.signature())
    return {"equal bits": found[0] == found[1]}


def flight_record(place: Place) -> dict[str, Any]:
    """The size of torch's record of the operations so far."""
    if place.cpu:
        raise Unavailable("gloo keeps no record")
    from torch._C import _distributed_c10d

    return {"bytes": len(_distributed_c10d._dump_nccl_trace())}


def abort(place: Place, wires: list[Native]) -> dict[str, Any]:
    """Ends a communicator while the lane is busy, and connects another."""
    wire = connect_alone(place.device)
    if wire.lane is not None:
        wire.lane.start(lambda: torch.cuda._sleep(20_000_000), [])
    began = time.perf_counter()
    wire.lose("ended on purpose")
    seconds = time.perf_counter() - began
    wire.close()
    new = connect_alone(place.device)
    equal = is_right(place, new, OPERATIONS["all_reduce sum"], torch.float32)
    new.close()
    for other in wires:
        other.close()
    return {"aborted after": seconds, "equal": equal}
