"""Times of howdah's collectives on one machine, beside gloo and a bound.

    python bench/collectives/run.py            every case, writes results.md and results.json
    python bench/collectives/run.py --tiny     the same in seconds, writes nothing
    python bench/collectives/run.py --algorithm ring     a chosen algorithm beside; writes nothing

Let nothing else run on the machine: its noise is measured first (../quiet.py). README.md says what
is compared with what.
"""

import argparse
import json
import sys
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
from cases import Case, cases, with_algorithm
from machine import machine
from measure import measure
from tables import markdown, refusals, summary, verdicts

from howdah.comm.chosen import algorithms_of
from howdah.comm.spawn import Workers

HERE = Path(__file__).resolve().parent
BUDGET = 300.0  # seconds for all cases; what a case leaves, the later ones may take


def measured(wanted: list[Case]) -> list[dict[str, Any]]:
    """A summary of each case, told as it is ready."""
    summaries: list[dict[str, Any]] = []
    began = perf_counter()
    for ranks, group in groupby(wanted, key=lambda case: case.ranks):
        with Workers(ranks, threads=1) as workers:
            for case in group:
                left = BUDGET - (perf_counter() - began)
                share = left / (len(wanted) - len(summaries))
                started = perf_counter()
                summaries.append(summary(case, measure(case, workers, seconds=share)))
                took = perf_counter() - started
                print(f"{case.name}: {took:.0f} s", file=sys.stderr, flush=True)
    return summaries


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it works")
    parser.add_argument("--only", default="", help="cases whose name holds this; writes nothing")
    parser.add_argument("--algorithm", default="", help="a chosen algorithm, such as ring")
    quiet.add_option(parser)
    words = parser.parse_args()
    alone = words.tiny or words.only or words.algorithm
    watch = quiet.Watch(writes=not alone, loaded=words.loaded)
    wanted = [case for case in cases(tiny=words.tiny) if words.only in case.name]
    if words.algorithm:
        having = algorithms_of(words.algorithm).by_operation
        wanted = [with_algorithm(case, words.algorithm) for case in wanted if case.op in having]
    summaries = measured(wanted)
    noise = watch.end()
    text = markdown(f"{machine()} {quiet.sentence(noise)}", summaries)
    print(text)
    for one in verdicts(summaries):
        told = "met" if one["met"] else "NOT MET"
        what = f"{one['case']}: {one['contestant']} against {one['peer']}"
        print(f"{told:8s} {what}: {one['found']:.2f}, goal {one['goal']:g}")
    problems = refusals(summaries)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    if watch.writes:
        results = {"machine": machine(), "noise": noise}
        results |= {"goals": verdicts(summaries), "cases": summaries}
        (HERE / "results.md").write_text(text, encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
