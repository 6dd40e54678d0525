"""Fits the profiles of howdah/sim/profiles to published runs.

    python bench/planner/fit.py RUNS.csv                 all profiles, each on its own rows
    python bench/planner/fit.py RUNS.csv --only NAME     one

A profile is fitted on the rows whose framework it is for; `generic` on rows of all. What is made
small is the mean over sources of the mean |ln(predicted / published)|, so that a large source
counts as much as a small one (for `generic`, over publishers: one has nine sources), and a term
that holds values near where they began: with few rows that term decides. The search goes along one
value at a time, up and down by a factor that shrinks.
"""

import argparse
import random
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from math import log
from pathlib import Path
from statistics import mean
from typing import Any

import howdah.sim.part_times as parts_module
import howdah.sim.rank_clock as clock_module
import howdah.sim.step_time as step_module
from howdah.base.errors import UserError
from howdah.sim.profile import FOLDER, Profile, load_profile, profile_of
from howdah.validation.folds import publisher_of
from howdah.validation.judging import seconds_of
from howdah.validation.plans import Answer, answer
from howdah.validation.rows import Row, published_rows

EACH = 10  # rows of a source that are fitted to
LARGEST = 520  # stages times micro-batches of a row that is fitted to: the others take seconds
ROUNDS = 5
PULL = 0.004  # of the squared logarithm of a value beside its beginning
# by profile, the values that are fitted; the others are documented
DENSE = ("stream", "activation", "logits", "forward", "backward", "matmul", "between", "update")
BRIDGE = ("stream", "copies", "quantise", "routed", "counts")
FITTED = {
    "megatron-lm-2021": ("stream", "square", "matmul", "inside", "forward", "backward"),
    "megatron-deepspeed": (*DENSE, "square", "inside", "step"),
    "nemo-2023": ("stream", "matmul", "square"),
    "megatron-core": (*DENSE, "tp", "ep", "copies", "attention"),
    "megatron-bridge": (*BRIDGE, "tp", "ep", "matmul", "between", "activation", "attention"),
    "megatron-bridge-2606": (*BRIDGE, "activation"),
    "fsdp1": (*DENSE, "attention", "slowdown"),
    "torchtitan": ("stream", "matmul", "slowdown"),
    "torchtitan-compile": ("stream", "matmul", "quantise", "attention", "slowdown"),
    "zero-2023": (*DENSE, "inside"),
    "generic": (
        *DENSE,
        "square",
        "slowdown",
        "attention",
        "tp",
        "ep",
        "copies",
        "quantise",
        "routed",
    ),
}
BOUNDS = {
    "stream": (6, 36),
    "activation": (0.5, 10),
    "logits": (2, 30),
    "matmul": (0.7, 1.05),
    "square": (2, 14),
    "inside": (0.4, 1.3),
    "between": (0.2, 1.2),
    "update": (0.6, 3),
    "slowdown": (1, 1.3),
    "tp": (0.02, 1),
    "ep": (0.02, 0.95),
    "attention": (0.6, 1.3),
    "step": (1e-4, 0.05),
}


def remember(module: Any, name: str) -> None:
    """Keeps what a function of a plan returns: it does not depend on the profile."""
    first: Callable[..., Any] = getattr(module, name)
    known: dict[Any, Any] = {}

    def kept(plan: Any, *rest: Any, **words: Any) -> Any:
        key = (
            id(plan),
            *(one if isinstance(one, (int, str)) else id(one) for one in rest),
            *words.values(),
        )
        if key not in known:
            found = first(plan, *rest, **words)
            known[key] = list(found) if hasattr(found, "__next__") else found
        return known[key]

    setattr(module, name, kept)


def speed_up() -> None:
    for name in ("sums_of", "local_buffers", "program_of", "exchanges"):
        remember(step_module, name)
    remember(parts_module, "local_of")
    remember(clock_module, "events_of")


def rows_to_fit(path: Path, each: int = EACH, largest: int = LARGEST) -> list[Answer]:
    """The answered rows of quality A and B, `each` of a source where it has more."""
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in published_rows(path):
        if row["quality"][:1] in ("", "A", "B"):
            by_source[row["source"]].append(row)
    draw, taken = random.Random(1), list[Answer]()
    for rows in by_source.values():
        drawn = (answer(row) for row in draw.sample(rows, len(rows)))
        fit = (
            one
            for one in drawn
            if isinstance(one, Answer) and one.plan.layout.pp * one.plan.micros <= largest
        )
        taken += islice(fit, each)
    return taken


def rows_of(name: str, rows: Sequence[Answer]) -> list[Answer]:
    """The rows that a profile is fitted to; for `generic`, some of each publisher."""
    if name != "generic":
        return [one for one in rows if profile_of(one.framework).name == name]
    found: dict[str, list[Answer]] = defaultdict(list)
    for one in rows:
        if one.plan.layout.pp * one.plan.micros <= LARGEST // 2:
            found[publisher_of(one.row["source"])].append(one)
    return [one for ones in found.values() for one in ones[:: -(-len(ones) // EACH)]]


def error(answers: Sequence[Answer], profile: Profile) -> float:
    """The mean over sources (for `generic`, over publishers) of the mean |ln(predicted /
    published)|.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for one in answers:
        try:
            seconds = seconds_of(one, profile)
        except UserError:
            continue
        source = one.row["source"]
        group = publisher_of(source) if profile.name == "generic" else source
        found[group].append(abs(log(seconds / one.published)))
    return mean(map(mean, found.values()))


def fitted(
    answers: Sequence[Answer], start: Profile, *, rounds: int = ROUNDS, tell: bool = False
) -> Profile:
    """The profile that fits the rows best, searched from `start`."""
    names = FITTED[start.name]

    def cost(profile: Profile) -> float:
        away = (log(getattr(profile, one) / getattr(start, one)) ** 2 for one in names)
        return error(answers, profile) + PULL * sum(away)

    best, least = start, cost(start)
    first, step = error(answers, start), dict.fromkeys(names, 1.45)
    for _ in range(rounds):
        for name in names:
            low, high = BOUNDS.get(name, (0.0, 1e9))
            for factor in (step[name], 1 / step[name]):
                value = min(max(getattr(best, name) * factor, low), high)
                tried = replace(best, **{name: value})
                if (found := cost(tried)) < least - 1e-5:
                    best, least = tried, found
                    break
            else:
                step[name] **= 0.55
    if tell:
        last = error(answers, best)
        print(f"{start.name}: {len(answers)} rows, {first:.1%} -> {last:.1%}", flush=True)
    return best


def beginning(name: str) -> Profile:
    """A profile with the values from which it is fitted: nothing of published runs is in them."""
    said = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    starts = {
        key: row["start"] for key, row in said.items() if "start" in row and isinstance(row, dict)
    }
    return replace(load_profile(name), **starts)


def write(profile: Profile, answers: Sequence[Answer]) -> None:
    """Writes the fitted values, and on which rows, into the profile's file."""
    sources = "; ".join(sorted({one.row["source"].partition(" (")[0] for one in answers}))
    path = FOLDER / f"{profile.name}.toml"
    text = path.read_text(encoding="utf-8")
    for name in FITTED[profile.name]:
        value = float(f"{getattr(profile, name):.3g}")
        start = getattr(beginning(profile.name), name)
        line = f'{name} = {{value = {value}, start = {start}, source = "fitted"}}'
        pattern = rf"^{name} = .*$"
        text = (
            re.sub(pattern, line, text, flags=re.M)
            if re.search(pattern, text, re.M)
            else f"{text}{line}\n"
        )
    text = re.sub(r"^fitted_on = .*\n", "", text, flags=re.M)
    text = re.sub(r"^(summary = .*\n)", rf'\1fitted_on = "{sources}"\n', text, flags=re.M)
    path.write_text(text, encoding="utf-8")


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("runs", type=Path)
    words.add_argument("--only")
    asked = words.parse_args()
    speed_up()
    every = rows_to_fit(asked.runs)
    for name in [asked.only] if asked.only else FITTED:
        own = rows_of(name, every)
        if not own:
            sys.exit(f"no rows for {name}")
        write(fitted(own, beginning(name), tell=True), own)
        load_profile.cache_clear()  # another may be like it


if __name__ == "__main__":
    main()
