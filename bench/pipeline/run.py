"""Measured bubbles of pipelines beside those that the simulator has for the same programs.

    python bench/pipeline/run.py          4 ranks, 8 micro-batches: results.md and results.json
    python bench/pipeline/run.py --ranks 3 --micros 6 --traces FOLDER

The real executor runs on RANKS processes: schedules, messages, waits, autograd graphs of a tiny
model. Only the length of an action is made up: whoever computes rests until its time is over, so
that as many ranks as one likes fit on a few cores. What is measured is then what the executor
adds: waiting for messages that could have come earlier, and what it does between two actions.

Times of all ranks are of one clock, that of the machine. The bubble is the share of all ranks'
time, from the first action of a step to the last, in which they do not compute. It is judged
relative to the simulated one: 6.3 % beside 6 % is 5 % more. Exit code 1 where one is further off.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import numpy as np
import quiet
import torch
from machine import machine

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
NEAR = 0.05  # of the simulated bubble: the most that a measured one may differ
HERE = Path(__file__).resolve().parent
HEAD = """# Pipelines beside their simulation: results

Written by `run.py`: {ranks} ranks, {micros} micro-batches, the median of {steps} steps. {about}

{met} of {all} bubbles are within {near:.0%} of the simulated one.
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


def compared(workers: Workers, plan: Plan, unit: float, folder: Path | None) -> dict[str, Any]:
    """What results.json holds of a schedule; writes two traces into the folder."""
    steps = zip(*workers.run(measure, plan, unit), strict=True)
    measured = [timeline_of(plan, list(step)) for step in steps][1:]
    program = lower(schedule_of(plan), tied=tied_stages(plan))
    ideal = simulate(program, partial(seconds_of, plan, unit))
    name = schedule_of(plan).name
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.measured.json").write_text(trace(measured[-1]))
        (folder / f"{name}.simulated.json").write_text(trace(ideal))
    bubbles = [one.bubble for one in measured]
    length = median(one.makespan for one in measured)
    return {
        "schedule": name,
        "seconds of a forward": unit,
        "simulated": ideal.bubble,
        "measured": {"median": median(bubbles), "least": min(bubbles), "most": max(bubbles)},
        "step longer by": length / ideal.makespan - 1,
        **judged(ideal.bubble, median(bubbles)),
    }


def judged(simulated: float, measured: float) -> dict[str, Any]:
    """By which share of the simulated bubble the measured one differs, and whether that is near."""
    apart = measured / simulated - 1
    return {"relative difference": apart, "met": abs(apart) <= NEAR}


# -- what is reported


def markdown(results: dict[str, Any]) -> str:
    """The whole of results.md."""
    rows = results["schedules"]
    about = f"{results['machine']} {quiet.sentence(results.get('noise', []))}"
    counts = {"met": sum(row["met"] for row in rows), "all": len(rows), "near": NEAR}
    shown = {name: results[name] for name in ("ranks", "micros", "steps")}
    lines = [HEAD.format(**shown, **counts, about=about)]
    for unit in dict.fromkeys(row["seconds of a forward"] for row in rows):
        lines += [f"A forward takes {unit * 1e3:.0f} ms, a backward twice that:", "", *TITLES]
        lines += [line(row) for row in rows if row["seconds of a forward"] == unit]
        lines.append("")
    return "\n".join(lines)


TITLES = (
    "| schedule | bubble, simulated | measured (least to most) | difference | | step longer by |",
    "|---|---|---|---|---|---|",
)


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    bubble, met = row["measured"], "met" if row["met"] else "**not met**"
    return (
        f"| `{row['schedule']}` | {row['simulated']:.1%} | {bubble['median']:.1%} "
        f"({bubble['least']:.1%} to {bubble['most']:.1%}) | {row['relative difference']:+.1%} "
        f"| {met} | {row['step longer by']:.1%} |"
    )


def main() -> int:
    """Prints a line for each schedule and length of actions, and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micros", type=int, default=8)
    parser.add_argument("--only", default="", help="schedules with this in them; writes nothing")
    parser.add_argument("--traces", type=Path, help="a folder; nothing else is written then")
    quiet.add_option(parser)
    words = parser.parse_args()
    whole = (words.ranks, words.micros, words.only, words.traces) == (4, 8, "", None)
    watch, rows = quiet.Watch(writes=whole, loaded=words.loaded), []
    print(*TITLES, sep="\n")
    with Workers(words.ranks) as workers:
        for unit in UNITS:
            for schedule in SCHEDULES:
                if words.only in schedule:
                    plan = plan_of(schedule, words.ranks, words.micros)
                    rows.append(compared(workers, plan, unit, words.traces))
                    print(line(rows[-1]), flush=True)
    results = {
        "machine": machine(),
        "noise": watch.end(),
        "ranks": words.ranks,
        "micros": words.micros,
        "steps": STEPS - 1,
        "schedules": rows,
    }
    if whole:
        (HERE / "results.md").write_text(markdown(results), encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row["met"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
