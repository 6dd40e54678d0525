"""What the search for a layout promises: how near its closed form is, and what it says of tp.

    python bench/search/run.py            writes results.md and results.json; about half an hour
    python bench/search/run.py --only rule   one part again: near, first, rule or speed
    python bench/search/run.py --tiny     a few of each, and writes nothing

No accelerator. Only `speed` is a time of this machine, and wants it quiet. README.md says what is
compared with what.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet

from howdah.base.errors import UserError
from howdah.machines.cluster_file import load_cluster
from howdah.plan.method import Method
from howdah.plan.plan import Plan
from howdah.search.closed_form import ClosedForm
from howdah.search.search import REFINED, room, search, taken
from howdah.search.space import Question, layout_of, space
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset
from howdah.sim.measured import profile_for
from howdah.sim.step_time import step_time

HERE = Path(__file__).resolve().parent
BF16 = Method(precision="bf16")
CASES = {  # model, cluster, samples of a step, tokens of a sample
    "8 H100": ("llama3-8b", "h100x8", 64, 4096),
    "64 A100": ("llama3-70b", "a100-80x64", 128, 4096),
    "16 RTX 3090 on 10 Gb/s": ("gpt2-1.5b", "rack-10gbex16", 64, 1024),
    "32 H100, experts": ("mixtral-8x7b", "h100x32", 64, 4096),
}
SMALL = ("laptop", "gpt2-124m", "qwen3-0.6b", "llama3-1b", "gpt2-1.5b")  # of random searches
CLUSTERS = ("h100x8", "a100-80x16", "rack-10gbex8", "rtx-4090x4", "l40sx8", "v100-32x8", "h100x4")
SPACE = 100, 700  # layouts of a random search that fit
RULE = {  # clusters of the rule of thumb, with the models that are tried there
    "a100-80x64": ("llama3-1b", "llama2-7b", "llama2-13b", "qwen3-32b", "llama3-70b"),
    "h100x64": ("llama3-1b", "llama2-7b", "llama2-13b", "qwen3-32b", "llama3-70b"),
    "rack-10gbex16": ("gpt2-124m", "gpt2-1.5b", "llama2-7b", "llama2-13b"),
}
TOKENS = {"rack-10gbex16": 1 << 19}  # of a step; 2 ** 22 elsewhere
SIMULATED = 40  # layouts of each case whose simulation is timed
MANY = "llama3-405b", "h100x16384", 2048, 8192  # a question with over a million layouts


def seconds(plan: Plan, question: Question) -> float:
    """The simulated time of a step."""
    cluster = question.cluster
    return step_time(plan, cluster, profile_for(cluster, question.method)).seconds


def priced(question: Question) -> tuple[Any, Any, Any]:
    """The layouts of a question, and their seconds and bytes by closed form."""
    rows, _ = space(question)
    profile = profile_for(question.cluster, question.method)
    return (rows, *ClosedForm(question, profile).price(rows))


def near(count: int) -> dict[str, Any]:
    """How near the closed form is to the simulation, on random layouts that fit."""
    found = {}
    for name, (model, cluster, batch, sequence) in CASES.items():
        question = Question(preset(model), load_cluster(cluster), BF16, sequence, batch)
        rows, closed, held = priced(question)
        short = rows["pp"] * rows["virtual"] * rows["micros"] < 1000
        fits = np.flatnonzero((held <= room(question.cluster)) & short)
        errors = []
        for index in np.random.default_rng(2).choice(fits, count, replace=False):
            plan = question.plan(layout_of(rows[index]), int(rows[index]["micro_batch"]))
            errors.append(abs(math.log(closed[index] / seconds(plan, question))))
        found[name] = {
            "layouts": count,
            "within 10 %": round(100 * float(np.mean(np.array(errors) < math.log(1.1))), 1),
            "mean, %": round(100 * float(np.mean(errors)), 2),
            "worst, %": round(100 * math.expm1(max(errors)), 1),
        }
        print(name, found[name], flush=True)
    return found


def first_of(count: int) -> dict[str, Any]:
    """In how many random searches the simulation's best is among the closed form's first 50."""
    ranks = [rank for _, rank in zip(range(count), _ranks(), strict=False)]
    return {
        "searches": len(ranks),
        f"among the first {REFINED}, %": round(100 * float(np.mean(np.array(ranks) < REFINED)), 1),
        "median rank": int(np.median(ranks)) + 1,
        "worst rank": max(ranks) + 1,
    }


def _ranks() -> Iterator[int]:
    """The rank by closed form of the simulation's best layout, of one random search after another:
    the first of those within a thousandth of the best.
    """
    draw = random.Random(4)
    while True:
        shape = replace(preset(draw.choice(SMALL)), layers=draw.choice([4, 8, 12, 16]))
        cluster = load_cluster(draw.choice(CLUSTERS))
        sequence, batch = draw.choice([256, 512, 1024]), draw.choice([4, 8, 16, 32])
        micro = draw.choice([1, 2, 4])
        try:
            question = Question(shape, cluster, BF16, sequence, batch, micro)
            rows, closed, held = priced(question)
        except UserError:
            continue
        fits = [
            (closed[index], plan)
            for index in np.flatnonzero(held <= 1.25 * room(cluster))
            if taken(plan := question.plan(layout_of(rows[index]), micro), 0) <= room(cluster)
        ]
        if SPACE[0] <= len(fits) <= SPACE[1]:
            fits.sort(key=lambda one: one[0])
            exact = [seconds(plan, question) for _, plan in fits]
            rank = next(n for n, one in enumerate(exact) if one <= 1.001 * min(exact))
            print(shape.layers, cluster.name, len(fits), "rank", rank + 1, flush=True)
            yield rank


def rule(models: int) -> list[dict[str, Any]]:
    """The best layout without tensor parallelism beside the best of all."""
    found = []
    for cluster, names in RULE.items():
        for name in names[:models]:
            shape = preset(name)
            sequence = min(shape.context, 4096)
            batch = TOKENS.get(cluster, 1 << 22) // sequence
            question = Question(shape, load_cluster(cluster), BF16, sequence, batch)
            rows, closed, held = priced(question)
            alone = _best(question, rows, np.where(rows["tp"] == 1, closed, np.inf), held)
            every = _best(question, rows, closed, held)
            row = {"cluster": cluster, "model": name, "parameters": parameters(shape).total}
            for key, one in (("without tp", alone), ("best", every)):
                row[key] = str(one[1].layout) if one else None
                row[f"{key}, s"] = round(one[0], 3) if one else None
            found.append(row)
            print(row, flush=True)
    return found


def speed(count: int, *, loaded: bool = False) -> dict[str, Any]:
    """Layouts a second of processor time: of all by closed form, and of those that a search would
    simulate first; the seconds of the largest question.
    """
    watch = quiet.Watch(writes=count == SIMULATED, loaded=loaded)
    priced_in, layouts, simulated_in, plans = 0.0, 0, 0.0, 0
    for model, cluster, batch, sequence in CASES.values():
        question = Question(preset(model), load_cluster(cluster), BF16, sequence, batch)
        began = process_time()
        rows, closed, held = priced(question)
        priced_in, layouts = priced_in + process_time() - began, layouts + len(rows)
        order = np.argsort(np.where(held <= room(question.cluster), closed, np.inf), kind="stable")
        for row in rows[order[:count]]:
            plan = question.plan(layout_of(row), int(row["micro_batch"]))
            began = process_time()
            seconds(plan, question)
            simulated_in, plans = simulated_in + process_time() - began, plans + 1
    model, cluster, batch, sequence = MANY
    if count < SIMULATED:
        cluster, batch = "h100x64", 64
    began = perf_counter()
    found = search(Question(preset(model), load_cluster(cluster), BF16, sequence, batch))
    largest = {"question": f"{model} on {cluster}", "layouts": found.priced}
    largest |= {"simulated": found.simulated, "seconds": round(perf_counter() - began, 1)}
    each = {"layouts": round(layouts / priced_in), "simulations": round(plans / simulated_in)}
    print(each, largest, flush=True)
    return {**each, "of": {"layouts": layouts, "simulations": plans}, "largest": largest} | {
        "noise": watch.end()
    }


def _best(
    question: Question, rows: Any, closed: Any, held: Any, tries: int = 10
) -> tuple[float, Plan] | None:
    """The fastest by simulation of the first that fit, in the order of the closed form."""
    capacity, best = room(question.cluster), list[tuple[float, Plan]]()
    order = np.argsort(np.where(held <= 1.05 * capacity, closed, np.inf), kind="stable")
    for index in order[:200]:
        if not np.isfinite(closed[index]) or held[index] > 1.05 * capacity or len(best) == tries:
            break
        plan = question.plan(layout_of(rows[index]), int(rows[index]["micro_batch"]))
        if taken(plan, capacity) <= capacity:
            best.append((seconds(plan, question), plan))
    return min(best, key=lambda one: one[0], default=None)


def within(near: dict[str, Any]) -> float:
    """Of all layouts of `near`, the percent within 10 % of their simulation."""
    every = sum(one["layouts"] for one in near.values())
    return round(sum(one["layouts"] * one["within 10 %"] for one in near.values()) / every, 1)


def page(results: dict[str, Any]) -> str:
    """results.md."""
    lines = ["# Results of bench/search/run.py", "", "## Closed form beside simulation", ""]
    lines += ["| case | layouts | within 10 % | mean error | worst |", "|---|---|---|---|---|"]
    for name, one in results["near"].items():
        mean, worst = one["mean, %"], one["worst, %"]
        cells = (name, one["layouts"], f"{one['within 10 %']} %", f"{mean} %", f"{worst} %")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    every = results["within 10 %"]
    lines += ["", f"Within 10 %: {every} % of all (goal: all)."]
    lines += ["", "## The best of the simulation, by closed form", ""]
    lines += [f"- {key}: {value}" for key, value in results["first"].items()]
    lines += ["", "## The best layout without tensor parallelism", ""]
    lines += ["| cluster | model | without tp | best | it is slower by |", "|---|---|---|---|---|"]
    for row in results["rule"]:
        alone, every = row["without tp, s"], row["best, s"]
        slower = f"{100 * (alone / every - 1):.1f} %" if alone and every else "does not fit"
        size = f"{row['model']} ({row['parameters'] / 1e9:.3g}B)"
        cells = (row["cluster"], size, f"`{row['without tp']}`", f"`{row['best']}`", slower)
        lines.append(f"| {' | '.join(cells)} |")
    if speed := results.get("speed"):
        largest, of = speed["largest"], speed["of"]
        lines += ["", "## Speed", "", quiet.sentence(speed["noise"]), ""]
        rates = ("by closed form", "layouts"), ("by simulation", "simulations")
        for way, key in rates:
            lines.append(f"- {way}: {speed[key]:,} a second of one core, over {of[key]:,} layouts")
        lines.append(
            f"- {largest['question']}: {largest['layouts']:,} layouts priced and "
            f"{largest['simulated']} simulated in {largest['seconds']:.1f} s"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Runs all three, and writes the results."""
    parser = argparse.ArgumentParser()
    quiet.add_option(parser)
    parser.add_argument("--tiny", action="store_true", help="a few of each; writes nothing")
    parser.add_argument(
        "--only", choices=("near", "first", "rule", "speed"), help="this part again"
    )
    asked = parser.parse_args()
    tiny = asked.tiny
    parts: dict[str, Callable[[], Any]] = {
        "near": lambda: near(3 if tiny else 250),
        "first": lambda: first_of(1 if tiny else 60),
        "rule": lambda: rule(1 if tiny else 9),
        "speed": lambda: speed(2 if tiny else SIMULATED, loaded=asked.loaded),
    }
    results = json.loads((HERE / "results.json").read_text()) if asked.only else {}
    results |= {name: part() for name, part in parts.items() if asked.only in (None, name)}
    results["within 10 %"] = within(results["near"])
    if tiny:
        print(page(results))
        return
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (HERE / "results.md").write_text(page(results))


if __name__ == "__main__":
    main()
