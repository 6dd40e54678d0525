"""Measured bubbles of pipelines beside those that the simulator has for the same programs.

    python bench/pipeline/run.py                  4 ranks, 8 micro-batches: writes results.md
    python bench/pipeline/run.py --ranks 3 --micros 6 --traces FOLDER

The real executor runs on RANKS processes: schedules, messages, waits, autograd graphs of a tiny
model. Only the length of an action is made up: whoever computes rests until its time is over, so
that as many ranks as one likes fit on a few cores. What is measured is then what the executor
adds: waiting for messages that could have come earlier, and what it does between two actions.

Times of all ranks are of one clock, that of the machine. The bubble is the share of all ranks'
time, from the first action of a step to the last, in which they do not compute.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from unittest.mock import patch

import numpy as np
import torch

from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport
from howdah.draw.perfetto import trace
from howdah.parallel.apply import apply
from howdah.parallel.executor import KINDS, StepRun
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import Plan, make_plan
from howdah.plan.program import schedule_of, tied_stages
from howdah.plan.recording import Span
from howdah.plan.schedule.actions import Action, Kind
from howdah.plan.schedule.lowering import lower
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights
from howdah.sim.timeline import Timeline, simulate
from howdah.text.batches import Micro
from howdah.train.step import StepContext, accumulate

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved v2", "zb-h1", "zb-h2", "zb-v")
UNITS = (0.1, 0.04)  # seconds of a rank's forward; its backward takes two
STEPS = 5  # of which the first is not counted
RESULTS = Path(__file__).with_name("results.md")
HEAD = """# Pipelines beside their simulation: results

Written by `run.py`: {ranks} ranks, {micros} micro-batches, the median of {steps} steps.
{met} of {all} bubbles are within 5 % of all time of the simulated one.
"""
Run = Callable[[StepRun, Action], None]


def plan_of(schedule: str, ranks: int, micros: int) -> Plan:
    """A tiny model on two blocks for each rank."""
    shape = ModelShape(layers=2 * ranks, width=16, heads=2, ffn_size=32, vocab=64, context=8)
    layout = resolve(parse_layout(f"pp{ranks} {schedule} x{micros}"), None)
    return make_plan(shape, layout, Batch(micro_batch=1), sequence=8, method=Method())


def seconds_of(plan: Plan, unit: float, action: Action) -> float:
    """How long an action takes."""
    units = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.INPUT: 1, Kind.WEIGHT: 1, Kind.UPDATE: 0}
    return unit * units[action.kind] / plan.layout.virtual


def lasting(run: Run, plan: Plan, unit: float) -> Run:
    """The same action, which takes its time."""

    def last(work: StepRun, action: Action) -> None:
        end = perf_counter() + seconds_of(plan, unit, action)
        run(work, action)
        sleep(max(end - perf_counter(), 0.0))

    return last


def measure(transport: Transport, plan: Plan, unit: float) -> list[list[Span]]:
    """On each rank: what it computed in each step, by the machine's clock."""
    mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(plan.shape), seed=1))
    context = StepContext(placed, mesh, plan.method, seed=1)
    found = []
    with patch.dict(KINDS, {kind: lasting(run, plan, unit) for kind, run in KINDS.items()}):
        for step in range(STEPS):
            mesh.world.barrier()
            with context.recorder.step(step):
                accumulate(context, batch(plan), step=step, tokens=1.0)
            trace = context.recorder.steps[-1]
            computed = (span for span in trace.spans if span.lane == "compute")
            moved = (
                s._replace(start=s.start + trace.began, end=s.end + trace.began) for s in computed
            )
            found.append(list(moved))
    mesh.close()
    return found


def batch(plan: Plan) -> list[Micro]:
    """Micro-batches of one row."""
    row = np.arange(plan.sequence)[None]
    documents = np.zeros_like(row, dtype=np.int32)
    one = Micro(row, row, row, documents, np.zeros(1, dtype=np.int64))
    return [replace(one) for _ in range(plan.micros)]


def timeline_of(plan: Plan, ranks: list[list[Span]]) -> Timeline:
    """One step of all ranks, from its first action on."""
    first = min(span.start for spans in ranks for span in spans)
    moved = (
        tuple(s._replace(start=s.start - first, end=s.end - first) for s in spans)
        for spans in ranks
    )
    return Timeline(schedule_of(plan), tuple(moved))


def row_of(workers: Workers, plan: Plan, unit: float, folder: Path | None) -> tuple[str, bool]:
    """A row of the table, and whether the bubbles are near; writes two traces into the folder."""
    steps = zip(*workers.run(measure, plan, unit), strict=True)
    measured = [timeline_of(plan, list(step)) for step in steps][1:]
    program = lower(schedule_of(plan), tied=tied_stages(plan))
    ideal = simulate(program, partial(seconds_of, plan, unit))
    bubble, length = (
        median(getattr(one, name) for one in measured) for name in ("bubble", "makespan")
    )
    spread = [one.bubble for one in measured]
    name = schedule_of(plan).name
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.measured.json").write_text(trace(measured[-1]))
        (folder / f"{name}.simulated.json").write_text(trace(ideal))
    row = (
        f"| `{name}` | {ideal.bubble:.1%} | {bubble:.1%} ({min(spread):.1%} to {max(spread):.1%}) "
        f"| {length / ideal.makespan - 1:.1%} |"
    )
    return row, abs(bubble - ideal.bubble) <= 0.05


def main() -> None:
    """Prints a table for each length of actions, and writes them down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--traces", type=Path, help="a folder; nothing else is written then")
    words = parser.parse_args()
    lines, near = [], []
    with Workers(words.ranks) as workers:
        for unit in UNITS:
            lines += ["", f"A forward takes {unit * 1e3:.0f} ms, a backward twice that:", ""]
            lines += [
                "| schedule | bubble, simulated | measured (least to most) | step longer by |"
            ]
            lines += ["|---|---|---|---|"]
            print("\n".join(lines[-4:]))
            for schedule in SCHEDULES:
                plan = plan_of(schedule, words.ranks, words.micros)
                row, close = row_of(workers, plan, unit, words.traces)
                lines.append(row)
                near.append(close)
                print(row, flush=True)
    if not words.traces and (words.ranks, words.micros) == (4, 8):
        counts = {"met": sum(near), "all": len(near), "steps": STEPS - 1}
        head = HEAD.format(ranks=words.ranks, micros=words.micros, **counts)
        RESULTS.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
