"""Homes off the device: what they cost, how much of it is hidden, and how little memory will do.

    python bench/offload/run.py           results.md and results.json
    python bench/offload/run.py --tiny    a small model and one repeat; writes nothing

slowdown   steps of one model with more and more of its states off the device: seconds beside those
           of the run in memory, and the bytes that the device holds
exposed    steps with all states on the host, over a link of limited bandwidth: the seconds in which
           the rank waited for moves, as a share of the seconds that the moves took, by the trace of
           the steps. Wanted: at most 10 %, where computation is longer than the moves. And the
           same with a wider window of weights, over the same link
memory     the same steps in a process whose control group allows it a tenth of what the model takes
           (above what a process without a model has), with states on the disk past the page
           cache: the bits of its masters are those of the run in memory. Needs root
disk       how fast the file of a home is written and read, beside fio where it is installed.
           Wanted: at least 80 %
adam       the update on the host, as a share of the bound: bytes touched at the speed of a copy;
           and DeepSpeed's CPUAdam where it is installed. Wanted: at least 80 %
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
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

from howdah.comm.transport import SingleRank
from howdah.draw.measured_step import exposed as told
from howdah.host.scratch import Pace, Scratch, ended
from howdah.optim.in_turns import InTurns, Turn
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.homes import AXIS
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Optimizer
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
LIMITS = {GROUPS: "memory.max", GROUPS / "memory": "memory.limit_in_bytes"}
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
    """Steps in a control group with a tenth of the memory that the model takes."""
    plan = plan_of("recompute=full", tiny)
    with ready(plan) as context:
        stepped(context, plan, 3)
        wanted = checksum(context)
    takes = peak(memory(plan, 0, kernels_of(plan)))
    idle = run_child(folder, tiny, limit=0, steps=0)["resident"]
    found = run_child(folder, tiny, limit=idle + max(takes // TENTH, 32 << 20), steps=3)
    return {"takes": takes, "allowed": takes // TENTH, "equal": found["crc"] == wanted, **found}


def run_child(folder: str, tiny: bool, *, limit: int, steps: int) -> dict[str, Any]:
    words = [sys.executable, __file__, "--child", folder, "--steps", str(steps)]
    words += ["--limit", str(limit), *(["--tiny"] if tiny else [])]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"crc": 0, "resident": 0, "failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def child(folder: str, tiny: bool, limit: int, steps: int) -> None:
    groups = memory_groups()
    if limit and groups:
        group = groups / f"howdah-offload-{os.getpid()}"
        group.mkdir()
        (group / LIMITS[groups]).write_text(str(limit))
        for swap, most in ("memory.swap.max", 0), ("memory.memsw.limit_in_bytes", limit):
            if (group / swap).exists():
                (group / swap).write_text(str(most))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    crc = 0
    if steps:
        plan = plan_of(AWAY, tiny, folder=folder, direct=True)
        with ready(plan) as context:
            stepped(context, plan, steps)
            crc = checksum(context)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"crc": crc, "resident": resident}))
    if limit and groups:  # a group with a process in it cannot be removed
        (groups / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def memory_groups() -> Path | None:
    """Where groups with a limit of memory can be made; None: nowhere."""
    if os.geteuid():
        return None
    controllers = GROUPS / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        return GROUPS
    first = GROUPS / "memory"
    return first if (first / LIMITS[first]).exists() else None


def disk(tiny: bool, folder: str) -> dict[str, Any]:
    size = (8 if tiny else 1024) << 20
    data = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20)))
    scratch = Scratch(Path(folder), threads=4, direct=not tiny, pace=Pace(0))
    place = scratch.allocate(size)
    times = []
    for move in (scratch.write, scratch.read):
        began = perf_counter()
        ended(move(place, data))
        times.append(size / (perf_counter() - began))
    scratch.close()
    found: dict[str, Any] = {"write": times[0], "read": times[1]}
    if shutil.which("fio") and not tiny:
        for way in ("write", "read"):
            found[f"fio {way}"] = fio(folder, way, size)
    return found


def fio(folder: str, way: str, size: int) -> float:
    """Bytes/s of fio with as many threads and blocks as large."""
    words = ["fio", "--name=home", f"--directory={folder}", f"--rw={way}", "--bs=1M", "--direct=1"]
    words += ["--numjobs=4", f"--size={size // 4}", "--group_reporting", "--output-format=json"]
    told = json.loads(subprocess.run(words, capture_output=True, check=True).stdout)
    return float(told["jobs"][0][way]["bw_bytes"])


def adam(tiny: bool) -> dict[str, Any]:
    """The update of 20 million elements, beside the time in which their bytes are copied."""
    n = 200_000 if tiny else 20_000_000
    master, gradient, first, second = (torch.rand(n) for _ in range(4))
    turns = InTurns(Optimizer())
    turn = Turn(True, master, gradient, {"exp_avg": first, "exp_avg_sq": second})
    copied = torch.empty(n)
    took: dict[str, list[float]] = {"howdah": [], "copy": []}
    for _ in range(3 if tiny else 12):
        for name, work in (
            ("howdah", lambda: turns.step([turn])),
            ("copy", lambda: copied.copy_(first)),
        ):
            began = perf_counter()
            work()
            took[name].append(perf_counter() - began)
    bound = median(took["copy"]) / 2 * 7  # a copy touches 2 arrays, an update reads 4 and writes 3
    found = {"seconds": median(took["howdah"]), "bound": bound}
    found["share"] = bound / found["seconds"]
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
    except ImportError:
        return found
    parameter = torch.nn.Parameter(master)
    parameter.grad = gradient
    peer, times = DeepSpeedCPUAdam([parameter]), []
    for _ in range(3 if tiny else 12):
        began = perf_counter()
        peer.step()
        times.append(perf_counter() - began)
    return {**found, "DeepSpeed": median(times)}


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
    parser.add_argument("--steps", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help="on the disk that is asked about")
    quiet.add_option(parser)
    words = parser.parse_args()
    torch.set_num_threads(1 if words.tiny else len(os.sched_getaffinity(0)))
    if words.child:
        child(words.child, words.tiny, words.limit, words.steps)
        return 0
    watch = quiet.Watch(writes=not words.tiny, loaded=words.loaded)
    with TemporaryDirectory(dir=words.folder or None) as folder:
        results: dict[str, Any] = {"machine": machine(), "slowdown": slowdown(words.tiny, folder)}
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
