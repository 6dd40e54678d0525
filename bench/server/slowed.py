"""BSP, SSP and ASP with one worker of three that takes three times as long for a step.

A step pulls its weights, pauses, and computes a small model: the pause stands for a device, so that
three workers and their servers find room on a few cores, while others go on and its weights age.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any
from unittest.mock import patch

from howdah.config.recipe import Machine, load_run, resolve_run
from howdah.train import served_worker, serving

PAUSE, SLOWED, WORKERS = 0.08, 3, 3
SEEDS = (1, 2, 3)
RECIPE = """
layout = "server2"
seed = {seed}
threads = 1

[model]
layers = 2
width = 32
heads = 2
ffn_size = 64
vocab = 300
context = 32

[data]
sources = ["{text}"]
sequence_length = 32

[batch]
global_batch = 6

[method]
grad_clip = 0.0
sync = {{kind = "{kind}", bound = {bound}, workers = {workers}}}

[method.lr]
peak = 1e-3

[train]
steps = {steps}
log_every = 1
"""
RULES = {"bsp": ("bsp", 0), "ssp(2)": ("ssp", 2), "asp": ("asp", 0)}
TARGET = 4.0  # loss
accumulate = served_worker.accumulate


def slowed_work(pipe: Any, store: Any, meeting: Any) -> int:
    """A worker's process; the first one is slow."""
    pause = PAUSE * (SLOWED if meeting.number == 0 else 1)

    def slow(context: Any, *what: Any, **how: Any) -> Any:
        context.placed.gatherer.wait()
        sleep(pause)
        return accumulate(context, *what, **how)

    with patch.object(served_worker, "accumulate", slow):
        return serving.work_here(pipe, store, meeting)


def measured(steps: int, seeds: Sequence[int] = SEEDS) -> dict[str, dict[str, Any]]:
    """By rule: steps per second of all workers until the fastest has done its own, the loss then,
    seconds until the mean of five losses was below TARGET (0: it never was), how old weights were
    in versions, each the median over seeds; those of each seed; and the loss over time of one.
    """
    found = {}
    with tempfile.TemporaryDirectory(prefix="howdah-slowed-") as made:
        work = Path(made)
        text = "\n".join(f"{n} follows {n - 1}" for n in range(20_000))
        (work / "text.txt").write_text(text)
        for rule, (kind, bound) in RULES.items():
            every = []
            for seed in seeds:
                recipe = work / f"{kind}-{seed}.toml"
                given = {"kind": kind, "bound": bound, "workers": WORKERS}
                given["steps"] = steps * (WORKERS if kind == "bsp" else 1)  # as many updates
                recipe.write_text(RECIPE.format(text=work / "text.txt", seed=seed, **given))
                every.append(_run(recipe, work))
            curve, *_ = [one.pop("curve") for one in every]
            middle = {name: median(one[name] for one in every) for name in every[0]}
            found[rule] = middle | {"seeds": every, "curve": curve}
    return found


def _run(recipe: Path, work: Path) -> dict[str, Any]:
    machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=work / "cache")
    job = resolve_run(load_run(recipe, [f"folder={work / recipe.stem}"]), machine)
    job.folder.mkdir()
    rows: list[tuple[float, dict[str, Any]]] = []

    def show(line: str) -> None:
        if line.startswith("step:"):
            last = (job.folder / "metrics.jsonl").read_text("utf-8").splitlines()[-1]
            rows.append((perf_counter(), json.loads(last)))

    with patch.object(serving, "work_here", slowed_work):
        serving.train_served(job, show=show)
    return judged(rows)


def judged(rows: list[tuple[float, dict[str, Any]]]) -> dict[str, Any]:
    """What rows with their times say."""
    (began, first), losses, reached, curve = rows[0], [], 0.0, []
    for at, row in rows:
        losses.append(row["loss"])
        if len(losses) < 5:
            continue
        curve.append((at - began, sum(losses[-5:]) / 5))
        if not reached and curve[-1][1] < TARGET:
            reached = at - began
    done = [max(one["step"] for one in row["workers"]) for _, row in rows]
    end = next(n for n, most in enumerate(done) if most == max(done))
    at, row = rows[end]
    made = [sum(one["step"] for one in each["workers"]) for each in (first, row)]
    return {
        "steps_per_s": (made[1] - made[0]) / max(at - began, 1e-9),
        "loss": row["loss"],
        "seconds_to_loss": reached,
        "stale": rows[-1][1]["stale"],
        "curve": curve,
    }
