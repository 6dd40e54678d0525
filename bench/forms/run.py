"""Tokens per second of howdah's tensor parallelism, pipelines and ZeRO-3, beside the peers.

    python bench/forms/run.py                     every case, writes results.md and results.json
    python bench/forms/run.py --only pp2          cases whose name holds this; writes nothing
    python bench/forms/run.py --tiny              a tiny model, in seconds; writes nothing

Let nothing else run on the machine: its noise is measured first (../quiet.py). README.md says what
is compared with what. Measuring, the peers of data parallelism and the tables are those of
bench/data_parallel.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "data_parallel"))

import quiet
from contestants import installed
from context_peers import RING
from entrants import entrants
from judged import markdown, problems, section, summary
from layouts import forms
from machine import machine
from measure import measure

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--only", default="", help="cases whose name holds this; writes nothing")
    parser.add_argument("--repeats", type=int, default=3, help="blocks of each contestant")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch = quiet.Watch(writes=not (words.tiny or words.only), loaded=words.loaded)
    summaries, began = [], perf_counter()
    for case in forms(tiny=words.tiny, repeats=words.repeats):
        if words.only in case.name:
            summaries.append(summary(case, measure(case, entrants(case))))
            print(section(summaries[-1]), flush=True)
            told = f"{case.name}: {perf_counter() - began:.0f} s since the start"
            print(told, file=sys.stderr, flush=True)
    wrong = [sentence for one in summaries for sentence in problems(one)]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    rings = ["ring-attention-pytorch"] if RING else []
    noise, about = watch.end(), f"{machine()} {installed(*rings)}"
    if watch.writes:
        results = {"machine": about, "noise": noise, "cases": summaries}
        absent = "" if RING else " ring-attention-pytorch is not installed and took no part."
        text = markdown(f"{about}{absent} {quiet.sentence(noise)}", summaries)
        (HERE / "results.md").write_text(text, encoding="utf-8")
        (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
