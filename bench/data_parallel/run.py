"""Tokens per second of howdah's data parallelism and ZeRO, beside its peers and the bound.

    python bench/data_parallel/run.py            every case, writes results.md and results.json
    python bench/data_parallel/run.py --tiny     the same in seconds, writes nothing

Let nothing else run on the machine: its noise is measured first (../quiet.py). README.md says what
is compared with what.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
from cases import cases
from contestants import contestants, installed
from machine import machine
from measure import measure
from summary import refusals, summary
from tables import markdown

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="tiny models, to see that it works")
    parser.add_argument("--only", default="", help="cases whose name holds this; writes nothing")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch = quiet.Watch(writes=not (words.tiny or words.only), loaded=words.loaded)
    summaries = []
    for case in cases(tiny=words.tiny):
        if words.only not in case.name:
            continue
        began = perf_counter()
        summaries.append(summary(case, measure(case, contestants(case))))
        print(f"{case.name}: {perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    problems, noise = refusals(summaries), watch.end()
    about = f"{machine()} {installed('accelerate')}"
    text = markdown(f"{about} {quiet.sentence(noise)}", summaries)
    print(text)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 1
    if watch.writes:
        results = {"machine": about, "noise": noise, "cases": summaries}
        (HERE / "results.md").write_text(text, encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
