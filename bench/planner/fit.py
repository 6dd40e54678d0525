"""Fits the profiles of howdah/sim/profiles to published runs.

    python bench/planner/fit.py RUNS.csv                 all profiles, each on its own rows
    python bench/planner/fit.py RUNS.csv --only NAME     one

A profile is fitted on the rows whose framework it is for; `generic` on rows of all. What is made
small is the mean over sources of the mean |ln(predicted / published)|, so that a large source
counts as much as a small one (for `generic`, over publishers: one has nine sources), and a term
that holds values near where they began: with few rows that term decides. Each round of the search
looks how the errors change with each value, and goes where they would be least if they went on so.
"""

import argparse
import random
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import log
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import howdah.sim.part_times as parts_module
import howdah.sim.rank_clock as clock_module
import howdah.sim.step_time as step_module
from howdah.base.errors import UserError
from howdah.sim.profile import FOLDER, Profile, load_profile, profile_of
from howdah.validation.folds import publisher_of
from howdah.validation.judging import seconds_of
from howdah.validation.plans import Answer, answer
from howdah.validation.rows import Row, published_rows
from howdah.validation.words import framework_of

Vector = NDArray[np.float64]
EACH = 10  # rows of a source that are fitted to
LARGEST = 520  # stages times micro-batches of a row that is fitted to: the others take seconds
ROUNDS = 4
PULL = 0.01  # of the squared logarithm of a value beside its beginning
NUDGE, FAR = 0.05, 0.5  # by how much the logarithm of a value is tried, and changed in a round
# by profile, the values that are fitted; the others are documented
DENSE = ("stream", "activation", "logits", "forward", "backward", "matmul", "between", "update")
BRIDGE = ("stream", "copies", "quantise", "routed", "counts")
FITTED = {
    "megatron-lm-2021": ("stream", "square", "matmul", "inside", "forward", "backward"),
    "megatron-deepspeed": (*DENSE, "square", "inside", "step"),
    "nemo-2023": ("stream", "matmul", "square"),
    "megatron-core": (*DENSE, "tp", "ep", "copies", "attention"),
    "megatron-bridge": (*BRIDGE, "tp", "ep", "matmul", "between", "activation", "attention"),
    "megatron-bridge-2606": ("copies", "quantise", "ep"),
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
    "update": (0.6, 2),
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


def speed_up() -> Callable[[], None]:
    """Remembers what does not depend on the profile, of plans that live as long; what undoes it."""
    modules = (step_module, parts_module, clock_module)
    before = [(module, {**vars(module)}) for module in modules]
    for name in ("sums_of", "local_buffers", "program_of", "exchanges"):
        remember(step_module, name)
    remember(parts_module, "local_of")
    remember(clock_module, "events_of")

    def undo() -> None:
        for module, names in before:
            vars(module).update(names)

    return undo


def rows_to_fit(path: Path, only: str = "generic") -> list[Answer]:
    """The answered rows of quality A and B, `EACH` of a source where it has more; of the sources
    that `only` is fitted to.
    """
    by_source: dict[str, list[Row]] = defaultdict(list)
    for row in published_rows(path):
        if row["quality"][:1] in ("", "A", "B"):
            by_source[row["source"]].append(row)
    taken = list[Answer]()
    for source, rows in by_source.items():
        if only not in ("generic", *(profile_of(framework_of(row)).name for row in rows)):
            continue
        drawn = (answer(row) for row in random.Random(source).sample(rows, len(rows)))
        fit = (
            one
            for one in drawn
            if isinstance(one, Answer) and one.plan.layout.pp * one.plan.micros <= LARGEST
        )
        taken += islice(fit, EACH)
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


def off(answers: Sequence[Answer], profile: Profile) -> Vector:
    """ln(predicted / published) of each row; 0 of one that is refused."""
    found = []
    for one in answers:
        with suppress(UserError):
            found.append(log(seconds_of(one, profile) / one.published))
            continue
        found.append(0.0)
    return np.array(found)


def weights(answers: Sequence[Answer], name: str) -> Vector:
    """What each row counts: sources alike; for `generic`, publishers."""
    groups = [one.row["source"] for one in answers]
    if name == "generic":
        groups = [publisher_of(source) for source in groups]
    often = Counter(groups)
    return np.array([1 / often[group] / len(often) for group in groups])


def fitted(
    answers: Sequence[Answer], start: Profile, *, rounds: int = ROUNDS, tell: bool = False
) -> Profile:
    """The profile that fits the rows best, searched from `start`."""
    names = FITTED[start.name]
    first = np.log([getattr(start, name) for name in names])
    low, high = np.log([BOUNDS.get(name, (1e-9, 1e9)) for name in names]).T
    counts = weights(answers, start.name)

    def told(values: Vector) -> Vector:
        changes = dict(zip(names, map(float, np.exp(values)), strict=True))
        return off(answers, replace(start, **changes))

    def cost(values: Vector, errors: Vector) -> float:
        return float(counts @ abs(errors) + PULL * ((values - first) ** 2).sum())

    best = np.clip(first, low, high)
    errors = told(best)
    least, before = cost(best, errors), counts @ abs(errors)
    for _ in range(rounds):
        slopes = np.stack(
            [(told(best + NUDGE * one) - errors) / NUDGE for one in np.eye(len(best))]
        )
        step = np.clip(best + _step(slopes.T, errors, counts, first - best), low, high) - best
        for part in (1.0, 0.4, 0.15):
            tried = best + part * step
            now = told(tried)
            if cost(tried, now) < least - 1e-5:
                best, errors, least = tried, now, cost(tried, now)
                break
        else:
            break
    if tell:
        print(f"{start.name}: {len(answers)} rows, {before:.1%} -> {counts @ abs(errors):.1%}")
    return replace(start, **dict(zip(names, map(float, np.exp(best)), strict=True)))


def _step(slopes: Vector, errors: Vector, counts: Vector, pull: Vector) -> Vector:
    """The change of values that makes the sum of |errors| least if all were straight lines: least
    squares, again and again, in which a row counts less the larger its error is.
    """
    step = np.zeros(len(pull))
    for _ in range(30):
        left = counts / np.maximum(abs(errors + slopes @ step), 0.01) / 2
        square = slopes.T @ (left[:, None] * slopes) + PULL * np.eye(len(pull))
        step = np.linalg.solve(square, PULL * pull - slopes.T @ (left * errors))
        step = np.clip(step, -FAR, FAR)
    return step


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
    every = rows_to_fit(asked.runs, asked.only or "generic")
    for name in [asked.only] if asked.only else FITTED:
        own = rows_of(name, every)
        if not own:
            sys.exit(f"no rows for {name}")
        write(fitted(own, beginning(name), tell=True), own)
        load_profile.cache_clear()  # another may be like it


if __name__ == "__main__":
    main()
