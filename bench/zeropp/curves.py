"""Held-out losses of runs with the parts of ZeRO++, beside plain zero3.

    python bench/zeropp/curves.py          curves.md, curves.json
    python bench/zeropp/curves.py --tiny   a few steps of one seed; writes nothing

Every form trains recipes/laptop.toml with a smaller model from the same start on the same samples,
for three seeds, on four processes of this machine; seeds are compared one by one. No time is
measured, and the same runs on any machine give the same numbers, so it need not be quiet. Exit code
1 where a second copy changes a loss.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from forms import COPIED, FED_BACK, FORMS, PLAIN, RANKS, Form
from machine import machine

from howdah.cli.environment import cache_folder
from howdah.comm.spawn import Workers
from howdah.comm.transport import Transport
from howdah.config.recipe import Machine, load_run, resolve_run
from howdah.train.job import Job
from howdah.train.loop import train

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parents[1] / "recipes" / "laptop.toml"
SEEDS, STEPS, EVERY = (1, 2, 3), 250, 50
# 0.95 million parameters, of which the embedding has half.
CHANGES = [
    *("model.layers=2", "model.width=128", "model.heads=4", "model.kv_heads=4"),
    *("model.ffn_size=384", "data.sequence_length=128"),
    *("train.export=false", "train.prompt=", "train.save_every=0", "train.evaluate_samples=64"),
    *("train.log_every=10", "train.tracker=[]"),
]
Curve = dict[int, float]


def job_of(form: Form, seed: int, steps: int, folder: Path) -> Job:
    every = min(EVERY, steps)
    length = [f"train.steps={steps}", f"train.evaluate_every={every}"]
    words = [f"folder={folder}", f"seed={seed}", *CHANGES, *length, *form.keys]
    here = Machine(None, None, cores=1, cuda=0, cache=cache_folder())
    return resolve_run(load_run(RECIPE, words), here)


def trained(transport: Transport, job: Job) -> None:
    """For workers, whose log is in the run's folder."""
    with redirect_stdout(StringIO()):
        train(job, transport)


def read(folder: Path) -> tuple[Curve, float]:
    """Held-out losses by step, of 64 samples, at the end of all; and the last."""
    rows = [*map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines())]
    (last,) = [row["loss"] for row in rows if row["kind"] == "held_out_all"]
    return {row["step"]: row["loss"] for row in rows if row["kind"] == "held_out"}, last


def measured(seeds: Sequence[int], steps: int) -> list[dict[str, Any]]:
    """A row for each run."""
    rows, every = [], {**FORMS, **FED_BACK}
    with TemporaryDirectory() as name, Workers(RANKS) as workers:
        for seed in seeds:
            forms = {name: form for name, form in every.items() if once(name, seed, seeds)}
            for number, (form, what) in enumerate(forms.items()):
                folder, began = Path(name) / f"{seed}-{number}", perf_counter()
                workers.run(trained, job_of(what, seed, steps, folder))
                curve, last = read(folder)
                rows.append({"form": form, "seed": seed, "curve": curve, "loss": last})
                told = f"{form}, seed {seed}: {last:.4f}, {perf_counter() - began:.1f} s"
                print(told, file=sys.stderr, flush=True)
    return rows


def once(form: str, seed: int, seeds: Sequence[int]) -> bool:
    """Whether a form is trained with a seed: a second copy changes no bit, and has the first."""
    return form != COPIED or seed == seeds[0]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each form: its mean losses, and by how much those at the end differ from plain zero3's of
    the same seed.
    """
    plain, found = {row["seed"]: row for row in rows if row["form"] == PLAIN}, []
    for form in dict.fromkeys(row["form"] for row in rows):
        own = [row for row in rows if row["form"] == form]
        apart = [row["loss"] - plain[row["seed"]]["loss"] for row in own]
        curve = {step: mean(row["curve"][step] for row in own) for step in own[0]["curve"]}
        losses = {str(row["seed"]): row["loss"] for row in own}
        same = all(row["curve"] == plain[row["seed"]]["curve"] for row in own) and not any(apart)
        one = {"form": form, "curve": curve, "losses": losses, "apart": apart, "same": same}
        one["spread"] = stdev(losses.values()) if len(own) > 1 else 0.0
        found.append({**one, "loss": mean(losses.values()), "more": mean(apart)})
    return found


def faults(found: Sequence[dict[str, Any]]) -> list[str]:
    """A second copy must not change a loss."""
    copied = (row for row in found if row["form"] == COPIED)
    return [f"{row['form']}: other losses than {PLAIN}" for row in copied if not row["same"]]


def table(found: Sequence[dict[str, Any]]) -> str:
    steps = [*found[0]["curve"]][:-1]
    head = ["form", *(f"step {step}" for step in steps), "at the end"]
    head += ["between seeds", "more than zero3", "least to most"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found:
        cells = [row["form"], *(f"{row['curve'][step]:.4f}" for step in steps)]
        seeds = [*row["losses"]]
        apart = f"± {row['spread']:.4f}" if len(seeds) > 1 else f"seed {seeds[0]} alone"
        cells += [f"{row['loss']:.4f}", apart]
        low, high = min(row["apart"]), max(row["apart"])
        told = [f"{row['more']:+.4f}", f"{low:+.4f} to {high:+.4f}"]
        cells += ["equal, step by step", ""] if row["same"] else told
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    """curves.md."""
    rows, lines = results["rows"], ["# Held-out losses with the parts of ZeRO++", ""]
    seeds = sorted({row["seed"] for row in results["runs"]})
    about = f"{results['steps']} steps, bf16, means over seeds {', '.join(map(str, seeds))}."
    lines += [f"{results['machine']} {about}", "", table(rows), ""]
    return "\n".join([*lines, *(f"- {one}" for one in results["faults"])]).rstrip() + "\n"


def main() -> int:
    """Trains, and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="few steps, and writes nothing")
    options = parser.parse_args()
    seeds, steps = (SEEDS[:1], 4) if options.tiny else (SEEDS, STEPS)
    runs = measured(seeds, steps)
    found = summary(runs)
    results = {"machine": machine(), "steps": steps, "changes": CHANGES, "rows": found}
    results |= {"runs": runs, "faults": faults(found)}
    print(report(results))
    if not options.tiny:
        (HERE / "curves.json").write_text(json.dumps(results, indent=1) + "\n")
        (HERE / "curves.md").write_text(report(results))
    return 1 if results["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
