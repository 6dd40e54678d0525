"""Homes off the device: what they cost, how much of it is hidden, and how little memory will do.

    python bench/offload/run.py           results.md and results.json
    python bench/offload/run.py --tiny    a small model and one repeat; writes nothing

slowdown   steps of one model with more and more of its states off the device: seconds beside those
           of the run in memory, and the bytes that the device holds
exposed    steps with all states on the host, over a link of limited bandwidth: the seconds in which
           the rank waited for moves, as a share of the seconds that the moves took, by the trace of
           the steps. Wanted: at most 10 %, where computation is longer than the moves. And the
           same with a wider window of weights, over the same link
memory     the same steps of a model of many small units in a process whose control group allows it
           a tenth of what the model takes (above what a process with a model of two small layers
           has used), with states on the disk, past the page cache and through it: the bits of its
           masters are those of the run in memory. Needs root
disk       how fast the file of a home is written and read, by io_uring and by threads, beside the
           better of two fios where it is installed. Wanted: at least 80 %
adam       the update on the host, as a share of the bound: bytes touched at the speed of memory
           (DeepSpeed's CPUAdam: beside_deepspeed.py). Wanted: at least 80 %
"""

import argparse
import json
import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from zlib import crc32

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import quiet
import torch
from machine import machine
from updates import ARRAYS, ELEMENTS, TIMES, TINY, howdah_update, in_place, seconds_of

from howdah.base.errors import UserError
from howdah.base.processes import keep_freed_memory
from howdah.comm.transport import SingleRank
from howdah.draw.measured_step import exposed as told
from howdah.host.block_moves import BLOCK
from howdah.host.scratch import Range, Scratch, ended
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.homes import open_scratch
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.homes import AXIS
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.plan.storage import Storage
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.text.batches import Micro
from howdah.train.step import StepContext, train_step

HERE = Path(__file__).resolve().parent
HOMES = (
    "",
    "optimizer=host",
    "gradients=host optimizer=host",
    "weights=host gradients=host optimizer=host",
    "optimizer=disk",
    "weights=disk gradients=disk optimizer=disk",
    "weights=disk gradients=disk optimizer=disk activations=disk",
)
AWAY = "weights=disk gradients=disk optimizer=disk activations=disk recompute=full"
ON_HOST = "weights=host gradients=host optimizer=host"
GROUPS = Path("/sys/fs/cgroup")  # of cgroup 2; those of cgroup 1 have the memory's in a folder
LIMITS = {  # the files with the limit, and with the most that was used
    GROUPS: ("memory.max", "memory.peak"),
    GROUPS / "memory": ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
}
IOS = ("io_uring", "threads")
FIO = {
    "of threads": "--ioengine=psync --numjobs=4 --size={part} --offset_increment={part}",
    "of io_uring": "--ioengine=io_uring --iodepth=4 --size={size}",
}
TENTH, STEPS, MICROS = 10, 3, 2
WIDER = 4  # units of a wider window of weights
SAME = "recompute=full"  # with which all of them use the operations of parallel/ops.py


def plan_of(words: str, tiny: bool, micros: int = 1, **storage: Any) -> Plan:
    """One rank of a model of blocks that are alike."""
    shape = ModelShape(
        layers=2 if tiny else 12,
        width=64 if tiny else 768,
        heads=4,
        ffn_size=128 if tiny else 2048,
        vocab=256 if tiny else 8192,
        context=512,
        tie_embeddings=True,
    )
    layout, sequence = parse_layout(f"single x{micros} {words}"), 64 if tiny else 512
    batch, method = Batch(2 * micros, 2), Method("float32")
    plan = make_plan(shape, layout, batch, sequence=sequence, method=method)
    return replace(plan, storage=Storage(**storage))


@contextmanager
def ready(plan: Plan) -> Any:
    mesh = connect_mesh(plan.layout, SingleRank(), torch.device("cpu"))
    with mesh:
        placed = apply(plan, mesh=mesh, fill=random_init(weights(plan.shape), 1))
        yield StepContext(placed, mesh, plan.method, seed=1)


def stepped(context: StepContext, plan: Plan, steps: int) -> list[float]:
    """Seconds of each step but the first."""
    at = np.tile(np.arange(plan.sequence), (2, 1))
    tokens = at * 7919 % plan.shape.vocab
    micro = Micro(tokens, tokens.copy(), at, np.zeros(at.shape, np.int32), np.arange(2))
    seconds = []
    for step in range(steps):
        began = perf_counter()
        train_step(context, [micro] * plan.micros, step=step, rate=1e-4)
        seconds.append(perf_counter() - began)
    return seconds[1:]


def checksum(context: StepContext) -> int:
    """That of all masters."""
    found = 0
    for unit in context.placed.units.values():
        found = crc32(context.placed.own(unit, "masters").numpy().tobytes(), found)
    return found


# -- the questions


def slowdown(tiny: bool, folder: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for words in HOMES:
        plan = plan_of(f"{words} {SAME}", tiny, folder=folder)
        with ready(plan) as context:
            took = median(stepped(context, plan, 1 + STEPS))
            sum_ = checksum(context)
        held = memory(plan, 0, kernels_of(plan))
        rows.append(
            {"homes": words or "device", "device": peak(held), "seconds": took, "crc": sum_}
        )
        rows[-1]["slowdown"] = took / rows[0]["seconds"]
        assert sum_ == rows[0]["crc"], f"{words}: other bits than in memory"
        print(rows[-1], flush=True)
    return rows


def exposed(tiny: bool) -> dict[str, Any]:
    plan = plan_of(ON_HOST, tiny, MICROS)
    with ready(plan) as context:
        computes = median(stepped(context, plan, STEPS))
        moved = sum(n for row, n in context.mesh.counters.sent().items() if row.axis == AXIS)
        moved /= STEPS
    bandwidth = moved / (computes / 2)  # both directions together take half of the computation
    moves, waited = _waits(plan_of(ON_HOST, tiny, MICROS, host_bandwidth=bandwidth))
    found = {"bandwidth": bandwidth, "moves": moves, "waited": waited, "exposed": waited / moves}
    plan = plan_of(ON_HOST, tiny, MICROS, host_bandwidth=bandwidth, window=WIDER)
    fewer, waited = _waits(plan)
    return {**found, f"moves, window of {WIDER}": fewer, f"waited, window of {WIDER}": waited}


def _waits(plan: Plan) -> tuple[float, float]:
    """Seconds of the moves of some steps, and those in which the rank waited for them."""
    with ready(plan) as context:
        stepped(context, plan, 1 + STEPS)  # the first learns the order
        steps = context.recorder.steps[-STEPS:]
        waited, moves = map(sum, zip(*(told(step.calls) for step in steps), strict=True))
    return moves, waited


def limited(tiny: bool, folder: str) -> dict[str, Any]:
    """Steps in a control group with a tenth of the memory that the model takes, beside what an idle
    rank holds: one that has trained a model of two small layers. Once past the page cache, and once
    through it, which the group counts, too, and takes back when it wants memory.
    """
    plan = deep_plan("recompute=full", tiny)
    with ready(plan) as context:
        stepped(context, plan, 3)
        wanted = checksum(context)
    takes = peak(memory(plan, 0, kernels_of(plan)))
    idle = run_child(folder, tiny=True, limit=1 << 40)
    if "failed" in idle:
        return {"skipped": f"no group could be made: {idle['failed']}"}
    allowed = takes // TENTH if not tiny else 32 << 20
    found = run_child(folder, tiny=tiny, limit=idle["used"] + allowed)
    if "failed" in found:
        return {"takes": takes, "allowed": allowed, **found}
    used = found["used"] - idle["used"]
    told = {"takes": takes, "allowed": allowed, "used": used, "equal": found["crc"] == wanted}
    cached = run_child(folder, tiny=tiny, limit=idle["used"] + allowed, cached=True)
    same = "crc" in cached and cached["crc"] == wanted
    return told | {"through the page cache": cached.get("failed", f"equal {same}")}


def deep_plan(words: str, tiny: bool, **storage: Any) -> Plan:
    """A model of many small units, two of which are small beside all of it."""
    plan = plan_of(words, tiny, **storage)
    sizes = {"layers": 72, "width": 384, "ffn_size": 1024, "vocab": 2048}
    shape = replace(plan.shape, **sizes) if not tiny else plan.shape
    made = make_plan(shape, plan.layout, plan.batch, sequence=plan.sequence, method=plan.method)
    return replace(made, storage=plan.storage)


def run_child(folder: str, *, tiny: bool, limit: int, cached: bool = False) -> dict[str, Any]:
    """What a process of its own says that takes the steps in a group with this limit."""
    words = [sys.executable, __file__, "--child", folder, "--limit", str(limit)]
    words += ["--tiny"] * tiny + ["--cached"] * cached
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or "it was ended by the system").splitlines()[-1]
        return {"failed": f"code {done.returncode}: {last}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(folder: str, *, tiny: bool, limit: int, cached: bool) -> None:
    groups = memory_groups()
    assert groups is not None
    group = groups / f"howdah-offload-{os.getpid()}"
    group.mkdir()
    most, peaks = LIMITS[groups]
    (group / most).write_text(str(limit))
    for swap, size in ("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit):
        if (group / swap).exists():
            (group / swap).write_text(str(size))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    plan = deep_plan(AWAY, tiny, folder=folder, direct=not (tiny or cached))
    keep_freed_memory(False)  # as training does with a home on the disk
    with ready(plan) as context:
        stepped(context, plan, 3)
        crc = checksum(context)
    print(json.dumps({"crc": crc, "used": int((group / peaks).read_text())}))
    (groups / "cgroup.procs").write_text(str(os.getpid()))  # one with a process in it stays
    group.rmdir()


def memory_groups() -> Path | None:
    """Where groups with a limit of memory can be made; None: nowhere."""
    if os.geteuid():
        return None
    controllers = GROUPS / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return GROUPS
    first = GROUPS / "memory"
    return first if (first / LIMITS[first][0]).exists() else None


def disk(tiny: bool, folder: str) -> dict[str, Any]:
    """Bytes/s of the file of a home past the page cache by what moves it, beside the better of two
    fios: with as many threads, and with as many requests of io_uring. They take turns; the first
    turn, in which the file system finds room for the bytes, does not count.
    """
    size, told = (8 if tiny else 512) << 20, dict[str, Any]()
    memory = memoryview(mmap.mmap(-1, size))
    for at in range(0, size, BLOCK):
        memory[at : at + BLOCK] = os.urandom(BLOCK)
    with ExitStack() as stack:
        ways: dict[str, Callable[[str], float]] = {}
        for io in IOS:
            try:
                scratch, _ = open_scratch(Storage(folder=folder, io=io, direct=not tiny))
            except UserError as refused:
                told[io] = f"skipped: {refused}"
                continue
            stack.callback(scratch.close)
            ways[io] = partial(pass_over, scratch, scratch.allocate(size), memory)
        engines: dict[str, str] = FIO if shutil.which("fio") else {}
        ways |= {
            f"fio {name}": partial(fio, folder, size, words, direct=not tiny)
            for name, words in engines.items()
        }
        took: dict[str, list[float]] = {}
        for _ in range(2 if tiny else 8):
            for name, way in ways.items():
                for verb in ("write", "read"):
                    took.setdefault(f"{name} {verb}", []).append(way(verb))
    told |= {name: median(rates[1:]) for name, rates in took.items()}
    if not engines:
        return {**told, "fio": "skipped: it is not installed"}
    for verb in ("write", "read"):
        best = max(told[f"fio {name} {verb}"] for name in engines)
        shares = {
            f"{io} {verb} beside fio": told[f"{io} {verb}"] / best for io in ways if io in IOS
        }
        told |= shares
    return told


def pass_over(scratch: Scratch, place: Range, memory: memoryview, verb: str) -> float:
    """Bytes/s of one pass over a range."""
    began = perf_counter()
    ended((scratch.write if verb == "write" else scratch.read)(place, memory))
    return len(memory) / (perf_counter() - began)


def fio(folder: str, size: int, engine: str, verb: str, *, direct: bool) -> float:
    """Bytes/s of fio with blocks as large, on one file, which stays."""
    words = ["fio", "--name=home", f"--filename={folder}/fio", f"--rw={verb}", "--bs=1M"]
    words += [f"--direct={int(direct)}", "--group_reporting", "--output-format=json"]
    words += engine.format(part=size // 4, size=size).split()
    done = subprocess.run(words, capture_output=True, check=True)
    return float(json.loads(done.stdout)["jobs"][0][verb]["bw_bytes"])


def adam(tiny: bool) -> dict[str, Any]:
    """The update of many elements, beside the time in which their bytes are read and written."""
    n, times = (TINY, 3) if tiny else (ELEMENTS, TIMES)
    took, passed = seconds_of(howdah_update(n), in_place(n), times=times)
    bound = passed / 2 * ARRAYS  # an array is read and written
    return {"seconds": took, "bound": bound, "share": bound / took}


def markdown(results: dict[str, Any]) -> str:
    lines = ["# Homes off the device: results", "", f"{results['machine']} "]
    lines[-1] += quiet.sentence(results.get("noise", []))
    lines += ["", "| homes | device, MB | seconds | slowdown |", "|---|---|---|---|"]
    lines += [
        f"| {row['homes']} | {row['device'] / 1e6:,.0f} | {row['seconds']:.3f} "
        f"| {row['slowdown']:.2f} |"
        for row in results["slowdown"]
    ]
    for name in ("exposed", "memory", "disk", "adam"):
        told = ", ".join(
            f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in results[name].items()
        )
        lines += ["", f"{name}: {told}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a small model; writes nothing")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cached", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help="on the disk that is asked about")
    quiet.add_option(parser)
    words = parser.parse_args()
    torch.set_num_threads(1 if words.tiny else len(os.sched_getaffinity(0)))
    if words.child:
        child(words.child, tiny=words.tiny, limit=words.limit, cached=words.cached)
        return 0
    watch = quiet.Watch(writes=not words.tiny, loaded=words.loaded)
    with TemporaryDirectory(dir=words.folder or None) as folder:
        results: dict[str, Any] = {"machine": machine(torch.get_num_threads())}
        results["slowdown"] = slowdown(words.tiny, folder)
        results["exposed"] = exposed(words.tiny)
        results["memory"] = (
            limited(words.tiny, folder)
            if memory_groups()
            else {"skipped": "needs root, and a memory controller of cgroups"}
        )
        results["disk"] = disk(words.tiny, folder)
        results["adam"] = adam(words.tiny)
    results["noise"] = watch.end()
    print(markdown(results))
    if not words.tiny:
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "results.md").write_text(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
