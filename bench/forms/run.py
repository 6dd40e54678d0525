"""Tokens per second of howdah's tensor parallelism, pipelines and ZeRO-3, beside the peers.

    python bench/forms/run.py                     every case, writes results.md and results.json
    python bench/forms/run.py --minutes 9         no case begins later; the next call goes on
    python bench/forms/run.py --only pp2          cases whose name holds this; writes nothing
    python bench/forms/run.py --tiny              a tiny model, in seconds; writes nothing

Let nothing else run on the machine: its noise is measured first (../quiet.py). What is measured is
kept in build/forms, case by case; --anew forgets it. README.md says what is compared with what.
Measuring, the peers of data parallelism and the tables are those of bench/data_parallel.
"""

import argparse
import json
import sys
from pathlib import Path
from shutil import rmtree
from time import perf_counter
from typing import Any

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
STORE = HERE.parents[1] / "build" / "forms"


def measured(words: argparse.Namespace, *, keeps: bool) -> tuple[list[dict[str, Any]], list[Path]]:
    """Summaries of the cases that are asked for, and the files of those measured now.

    A case with a problem is not kept.
    """
    found, new, began = [], [], perf_counter()
    for case in forms(tiny=words.tiny, repeats=words.repeats):
        file = STORE / f"{case.name.replace(' ', '-')}.json"
        if words.only not in case.name:
            continue
        if keeps and file.is_file():
            found.append(json.loads(file.read_text("utf-8")))
        elif perf_counter() - began < 60 * words.minutes:
            found.append(summary(case, measure(case, entrants(case))))
            print(section(found[-1]), flush=True)
            told = f"{case.name}: {perf_counter() - began:.0f} s since the start"
            print(told, file=sys.stderr, flush=True)
            if keeps and not problems(found[-1]):
                STORE.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found[-1]), "utf-8")
                new.append(file)
    return found, new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it works")
    parser.add_argument("--only", default="", help="cases whose name holds this; writes nothing")
    parser.add_argument("--repeats", type=int, default=3, help="blocks of each contestant")
    parser.add_argument("--minutes", type=float, default=60.0, help="no case begins later")
    parser.add_argument("--anew", action="store_true", help="forget what is kept of earlier calls")
    quiet.add_option(parser)
    words = parser.parse_args()
    if words.anew:
        rmtree(STORE, ignore_errors=True)
    watch = quiet.Watch(writes=not (words.tiny or words.only), loaded=words.loaded)
    summaries, new = measured(words, keeps=watch.writes)
    noise = watch.end()
    for file in new:
        kept = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps({**kept, "noise": noise}), "utf-8")
    if wrong := [sentence for one in summaries for sentence in problems(one)]:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    missing = len([*forms(tiny=words.tiny, repeats=words.repeats)]) - len(summaries)
    if watch.writes and missing:
        print(f"{missing} cases are still to be measured", file=sys.stderr)
    elif watch.writes:
        write([{"noise": noise, **one} for one in summaries])
    return 0


def write(summaries: list[dict[str, Any]]) -> None:
    """The results. Their noise is that of all calls in which a case was measured."""
    noise = [look for one in summaries for look in one["noise"]]
    about = f"{machine()} {installed(*['ring-attention-pytorch'] if RING else [])}"
    absent = "" if RING else " ring-attention-pytorch is not installed and took no part."
    results = {"machine": about, "noise": noise, "cases": summaries}
    text = markdown(f"{about}{absent} {quiet.sentence(noise)}", summaries)
    (HERE / "results.md").write_text(text, encoding="utf-8")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
