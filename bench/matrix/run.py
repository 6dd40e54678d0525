"""Runs the parity matrix and writes docs/matrix.md from what ran; results.json has every cell.

    python bench/matrix/run.py                 every pair, also of each family of models, every
                                               triple, and layouts drawn at random
    python bench/matrix/run.py --only tensor   cells with this form; writes nothing
    python bench/matrix/run.py --family t5     pairs of forms with this family; writes nothing
    python bench/matrix/run.py --part 2/6      a sixth of the cells; the last of them writes all
    python bench/matrix/run.py --draw 60       so many cells at random; writes nothing
    python bench/matrix/run.py --to FOLDER     writes matrix.md and the results there
    python bench/matrix/run.py --flight        asks whether every wait is there; writes nothing
    python bench/matrix/run.py --shadow        asks whether sums are as listed; writes nothing

Every cell is a layout in float64, held against plain PyTorch on one device by `verify`: losses,
norms, every gradient and parameter, bits of all replicas, bytes predicted and counted. With
`--flight`, each is trained under the flight checker and under the late double instead
(`tests/in_flight.py`). With `--shadow`, the calls of each rank are recorded, and held against the
plan's list of sums (`tests/shadow.py`). Exit code 1 where one neither works nor is refused.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from howdah.base.errors import UserError
from howdah.comm.spawn import WorkerError, Workers
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus
from howdah.verify.case import Case
from howdah.verify.matrix import (
    FAMILIES,
    FORMS,
    MODELS,
    PIPES,
    Cell,
    case_of,
    drawn_triples,
    families,
    pairs,
    split_model,
    triples,
)
from howdah.verify.verify import verify

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tests"))
from in_flight import both, message_for_each_unit  # noqa: E402  these are files of tests/
from shadow import differences  # noqa: E402

ABOUT = """\
Written by `make matrix` from what ran. Each cell is the smallest layout with both forms, in
float64 on a small model whose sizes do not divide, held against plain PyTorch on one device:
losses, gradient norms, every gradient and parameter, equal bits on all replicas, and bytes
predicted equal to bytes counted. A combination works or is refused with a sentence; there is no
third case. A dot: two choices of one kind."""
OF_FAMILIES = """\
Each pair of forms of a layout once more, with each of these models. Where a family is not named in
the second table, it does what the pair above does."""
RANKS = 16
AT_HOME = ("host", "disk", "activations")
DRAWN, TRIPLES = 60, 60
SEED = 20


class Result(NamedTuple):
    """result: works, refused or fails; why: the sentence of the last two."""

    result: str
    why: str = ""


class Bench:
    """Workers that are started again after a failure, for they may wait for each other."""

    processes = RANKS

    def __init__(self) -> None:
        self._workers: Workers | None = None

    def run(self, words: str) -> Result:
        try:
            case = case_of(words)
        except UserError as sentence:
            return Result("refused", str(sentence))
        if self._workers is None and self.processes:
            self._workers = Workers(self.processes)
        try:
            problems = self.ask(case, self._workers)
        except WorkerError as error:
            self._workers = None
            return Result("fails", str(error).strip().splitlines()[-1])
        return Result("fails", "; ".join(problems)) if problems else Result("works")

    def ask(self, case: Case, workers: Workers | None) -> list[str]:
        """What is wrong with a case."""
        assert workers
        return verify(case, workers, controls=False).problems

    def close(self) -> None:
        if self._workers is not None:
            self._workers.close()


class Flights(Bench):
    """Asks whether something in flight is touched, and whether late results change a bit."""

    def ask(self, case: Case, workers: Workers | None) -> list[str]:
        assert workers
        seen = workers.run(both, case, ranks=case.layout.world)
        return [f"rank {number}: {line}" for number, one in enumerate(seen) for line in one.differ]


class Shadows(Bench):
    """Asks whether the sums that ranks make are those of the list, with a message for each unit."""

    processes = 0

    def run(self, words: str) -> Result:
        if split_model(words)[1] != "dense":
            return Result("refused", "what goes to experts follows from data, and there are none")
        return super().run(words)

    def ask(self, case: Case, workers: Workers | None) -> list[str]:
        with message_for_each_unit():
            return list(differences(for_gpus(replace(case, method=Method()).plan)))


def drawn() -> Iterable[Cell]:
    """Layouts at random, of at most eight ranks."""
    draw, home, found = random.Random(SEED), random.Random(SEED + 1), set()
    while len(found) < DRAWN:
        axes = {name: draw.choice([1, 1, 2, 2, 3, 4]) for name in ("dp", "tp", "pp", "cp")}
        ep = draw.choice([1, 1, 2, 3, 4])
        if prod(axes.values()) > 8 or axes["dp"] * axes["cp"] % ep:
            continue
        model = draw.choice(["experts", "capacity"] if ep > 1 else ["dense", "dense", "experts"])
        words = [f"model={model}"] * (model != "dense")
        words += [f"{name}{size}" for name, size in {**axes, "ep": ep}.items() if size > 1]
        words += [draw.choice(["", "zero1", "zero2", "zero2 accumulate=whole", "zero3"])]
        words += [draw.choice(["", "sp"])] if axes["tp"] > 1 else []
        words += [draw.choice(["", "context=all-to-all"])] if axes["cp"] > 1 else []
        if axes["pp"] > 1:
            words += [draw.choice([FORMS[pipe].removeprefix("pp2 ") for pipe in PIPES])]
        words += [draw.choice(["", "recompute=full", "recompute=selective"])]
        words += [f"x{draw.choice([1, 2, 3, 4, 5, 6])}"]
        words += [home.choice(["", FORMS[home.choice(AT_HOME)]])]
        found.add(" ".join(word for word in words if word))
    return [Cell((), words) for words in sorted(found)]


def page(results: dict[Cell, Result]) -> str:
    """docs/matrix.md."""
    reasons: dict[str, int] = {}

    def short(result: Result) -> str:
        if result.result == "works":
            return "works"
        return f"{result.result} {reasons.setdefault(result.why, len(reasons) + 1)}"

    names = list(FORMS)
    of = {frozenset(cell.forms): result for cell, result in results.items() if cell.forms}
    lines = [
        "# The parity matrix",
        "",
        *ABOUT.splitlines(),
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for one in names:
        row = [of.get(frozenset({one, other})) for other in names]
        lines.append(f"| **{one}** | " + " | ".join(short(r) if r else "·" for r in row) + " |")
    lines += ["", "The forms' words:", ""]
    lines += ["| form | words |", "|---|---|"]
    lines += [f"| {name} | `{words}` |" for name, words in FORMS.items()]
    lines += by_family(results, of, short)
    for title, chosen in (
        ("Triples", [cell for cell in results if len(cell.forms) == 3 and not family_of(cell)]),
        ("Drawn at random", [cell for cell in results if not cell.forms]),
    ):
        lines += ["", f"## {title}", "", "| layout | |", "|---|---|"]
        lines += [f"| `{cell.words}` | {short(results[cell])} |" for cell in chosen]
    lines += ["", "## Why", ""]
    lines += [f"{number}. {why}" for why, number in reasons.items()] or ["Nothing is refused."]
    return "\n".join(lines) + "\n"


def by_family(
    results: dict[Cell, Result],
    of: dict[frozenset[str], Result],
    short: Callable[[Result], str],
) -> list[str]:
    """What becomes of each pair of forms with a family, where it is not what became of the pair."""
    lines = ["", "## Families", "", *OF_FAMILIES.splitlines(), ""]
    lines += [
        "| family | pairs | work | refused as above | refused beside |",
        "|---|---|---|---|---|",
    ]
    beside: dict[tuple[str, str], list[str]] = {}
    for family in FAMILIES:
        cells = [cell for cell in results if family_of(cell) == family]
        works = sum(results[cell].result == "works" for cell in cells)
        other = [c for c in cells if results[c].result != of[frozenset(c.forms[:2])].result]
        counts = len(cells), works, len(cells) - works - len(other), len(other)
        lines.append(f"| {family} | {' | '.join(map(str, counts))} |")
        for cell in other:
            pair = " + ".join(cell.forms[:2])
            beside.setdefault((family, short(results[cell])), []).append(pair)
    lines += ["", "| family | | pairs |", "|---|---|---|"]
    lines += [f"| {one} | {why} | {', '.join(pairs)} |" for (one, why), pairs in beside.items()]
    return lines


def family_of(cell: Cell) -> str:
    """The family with which a cell has a pair of forms; empty for other cells."""
    with_one = len(cell.forms) == 3 and cell.forms[2] in FAMILIES
    return cell.forms[2] if with_one and not {*cell.forms[:2]} & {*MODELS} else ""


def commit() -> str:
    """The commit that ran, and whether files differ from it."""
    git = ["git", "-C", str(HERE)]
    said = [
        subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    ]
    return said[0][:12] + (" and changes" if said[1] else "")


def kind_of(cell: Cell) -> str:
    if family := family_of(cell):
        return f"pair with {family}"
    return {1: "alone", 2: "pair", 3: "triple"}.get(len(set(cell.forms)), "drawn at random")


def summary(results: dict[Cell, Result], where: str) -> dict[str, Any]:
    """What results.json holds. `where` is the commit."""
    cells = [
        {"kind": kind_of(cell), "forms": cell.forms, "layout": cell.words, **result._asdict()}
        for cell, result in results.items()
    ]
    counts = {
        kind: dict(Counter(one["result"] for one in cells if one["kind"] == kind))
        for kind in dict.fromkeys(one["kind"] for one in cells)
    }
    return {"commit": where, "all": len(cells), "counts": counts, "cells": cells}


def markdown(found: dict[str, Any]) -> str:
    """The whole of results.md."""
    kinds = ("works", "refused", "fails")
    lines = [
        "# Parity matrix: results",
        "",
        f"Written by `run.py` at {found['commit']}: {found['all']} cells, also in "
        "[the matrix](../../docs/matrix.md).",
        "",
        "| cells | works | refused | fails |",
        "|---|---|---|---|",
    ]
    for kind, counts in found["counts"].items():
        lines.append(f"| {kind} | {' | '.join(str(counts.get(name, 0)) for name in kinds)} |")
    others = [one for one in found["cells"] if one["result"] != "works"]
    if others:
        lines += ["", "## What does not work", "", "| layout | | sentence |", "|---|---|---|"]
    lines += [f"| `{one['layout']}` | {one['result']} | {one['why']} |" for one in others]
    return "\n".join(lines) + "\n"


def chosen(cells: list[Cell], words: argparse.Namespace) -> list[Cell]:
    """The cells that are asked for."""
    for form in filter(None, (words.only, words.family)):
        cells = [cell for cell in cells if form in cell.forms]
    if words.draw:
        cells = random.Random(words.seed).sample(cells, min(words.draw, len(cells)))
    if words.part:
        number, parts = map(int, words.part.split("/"))
        cells = cells[number - 1 :: parts]
    return cells


def joined(part: str, cells: list[Cell], here: dict[Cell, Result]) -> dict[Cell, Result]:
    """Keeps the results of a part; those of all cells where no other part is missing, else none."""
    number, parts = map(int, part.split("/"))
    folder = ROOT / "build" / "matrix" / commit().split()[0]
    folder.mkdir(parents=True, exist_ok=True)
    kept = {cell.words: result for cell, result in here.items()}
    files = [folder / f"{one}-of-{parts}.json" for one in range(1, parts + 1)]
    files[number - 1].write_text(json.dumps(kept), encoding="utf-8")
    every: dict[str, list[str]] = {}
    for file in files:
        if not file.exists():
            print(f"{file.name} is missing: nothing is written yet")
            return {}
        every |= json.loads(file.read_text(encoding="utf-8"))
    return {cell: Result(*every[cell.words]) for cell in cells}


def write(results: dict[Cell, Result], to: Path | None) -> None:
    """The page, and the results, of all cells."""
    found, here = summary(results, commit()), to or HERE
    (to or DOCS).joinpath("matrix.md").write_text(page(results), encoding="utf-8")
    (here / "results.md").write_text(markdown(found), encoding="utf-8")
    (here / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cells with this form; writes nothing")
    parser.add_argument(
        "--family", choices=FAMILIES, default="", help="cells with this family; writes nothing"
    )
    parser.add_argument("--part", default="", help="such as 2/6: every sixth, from the second on")
    parser.add_argument("--draw", type=int, default=0, help="so many cells; writes nothing")
    parser.add_argument("--seed", type=int, default=SEED, help="of --draw")
    parser.add_argument("--to", type=Path, help="a folder for all that is written")
    parser.add_argument("--flight", action="store_true", help="asks for waits; writes nothing")
    parser.add_argument("--shadow", action="store_true", help="asks for sums; writes nothing")
    words = parser.parse_args()
    torch.set_num_threads(1)  # two would spin while they wait for each other beside other load
    asks = {"--flight": (words.flight, Flights), "--shadow": (words.shadow, Shadows)}
    asked = [name for name, (given, _) in asks.items() if given]
    if asked and (words.to or len(asked) > 1):
        parser.error(f"{asked[0]} writes nothing: leave --to out, and ask one thing at a time")
    parts = pairs(), triples(), families(), drawn_triples(TRIPLES, seed=SEED), drawn()
    every = [*dict.fromkeys(cell for part in parts for cell in part)]
    cells, results = chosen(every, words), dict[Cell, Result]()
    bench = asks[asked[0]][1]() if asked else Bench()
    for number, cell in enumerate(cells, 1):
        results[cell] = bench.run(cell.words)
        result, why = results[cell]
        print(f"{number}/{len(cells)} {cell.words}: {result} {why[:160]}", flush=True)
    bench.close()
    print(summary(results, "")["counts"])
    failed = any(result.result == "fails" for result in results.values())
    some = words.only or words.family or words.draw
    if words.part and not (asked or some):
        results = joined(words.part, every, results)
    if results and not asked and (words.to or not some):
        write(results, words.to)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
