"""Do runs on this machine take as long as `howdah measure` and `howdah plan` say?

    python bench/measure/run.py                  five pairs of measure and runs: some twelve minutes
    python bench/measure/run.py --tiny FOLDER    two steps of each run, one pair; writes to FOLDER

README.md says what is compared with what. All predictions of a pair are in its file before its
first run starts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from math import log
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
HOWDAH = [sys.executable, "-m", "howdah"]
PAIRS, STEPS, STRETCH = 5, 32, 4
GOAL = 0.15  # |ln(predicted / measured)|
WIDE = ["model.width=384", "model.heads=6", "model.kv_heads=6", "model.ffn_size=1024"]
CASES: dict[str, tuple[int, list[str]]] = {  # ranks, and what is changed of recipes/laptop.toml
    "laptop": (2, []),
    "one rank, float32": (1, ["layout=single", "method.precision=float32"]),
    "tp2 sp": (2, ["layout=tp2 sp"]),
    "pp2 x4": (2, ["layout=pp2 x4"]),
    "zero3 x2, wider": (2, ["layout=dp2 zero3 x2", *WIDE]),
    "dp4 on two cores": (4, ["layout=dp4"]),
}
# Runs that end with their last step: a little text is held out, and nothing else is made of them.
BRIEF = [
    "data.validation_share=0.002",
    "train.export=false",
    "train.prompt=",
    "train.evaluate_every=0",
    "train.save_every=0",
]


def howdah(*words: object) -> str:
    """What a command prints; ends the benchmark where it fails."""
    done = subprocess.run(
        [*HOWDAH, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"howdah {' '.join(map(str, words))}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def predicted(folder: Path) -> dict[str, float]:
    """Seconds of a step of each case, on the machine as it was measured into a folder."""
    found = {}
    for name, (ranks, changes) in CASES.items():
        cluster = folder / f"here-{ranks}.toml"
        told = howdah("plan", "recipes/laptop.toml", *changes, "--cluster", cluster, "--json")
        found[name] = json.loads(told)["step_seconds"]
    return found


def measured(name: str, folder: Path, steps: int) -> float:
    """Seconds of a step of a run: the median of its stretches, without the first."""
    _, changes = CASES[name]
    every = [f"train.steps={steps}", f"train.log_every={min(STRETCH, steps // 2)}"]
    howdah("train", "recipes/laptop.toml", f"folder={folder}", *every, *BRIEF, *changes)
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    stretches = [row["seconds"] for row in rows if row["kind"] == "train"]
    return median(stretches[1:]) / min(STRETCH, steps // 2)


def a_pair(number: int, out: Path, *, tiny: bool) -> list[dict[str, Any]]:
    """Measures, writes what that predicts, and runs."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        howdah("measure", "--quick", "--ranks", 4, "--out", folder)
        told = predicted(folder)
        file = out / "predictions" / f"{number}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(told, indent=1) + "\n")
        rows = []
        for index, (case, seconds) in enumerate(told.items()):
            took = measured(case, folder / f"run-{index}", 4 if tiny else STEPS)
            print(f"{case:20s} {seconds:.4f} predicted, {took:.4f} s measured", flush=True)
            rows.append({"case": case, "pair": number, "predicted": seconds, "measured": took})
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By case the medians of the pairs, and the error of the median pair."""
    found = []
    for case in CASES:
        own = [row for row in rows if row["case"] == case]
        apart = sorted(log(row["predicted"] / row["measured"]) for row in own)
        middle = {name: median(row[name] for row in own) for name in ("predicted", "measured")}
        error = median(apart)
        found.append({"case": case, **middle, "error": error, "from": apart[0], "to": apart[-1]})
        found[-1]["met"] = abs(error) <= GOAL
    return found


def markdown(results: dict[str, Any]) -> str:
    """results.md."""
    lines = ["# Predicted and measured seconds of a step", ""]
    lines += [f"{results['machine']}. {quiet.sentence(results['noise'])}", ""]
    lines += [f"Medians of {results['pairs']} pairs; the error is ln(predicted ÷ measured).", ""]
    lines += ["| run | predicted | measured | error | pairs | within 15 % |", "|---" * 6 + "|"]
    for row in results["cases"]:
        lines.append(
            f"| {row['case']} | {row['predicted']:.4f} | {row['measured']:.4f} | "
            f"{row['error']:+.1%} | {row['from']:+.1%} to {row['to']:+.1%} | "
            f"{'yes' if row['met'] else 'no'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", type=Path, help="a folder for a quick look that judges nothing")
    quiet.add_option(parser)
    given = parser.parse_args()
    watch = quiet.Watch(writes=not given.tiny, loaded=given.loaded)
    out, rows = given.tiny or HERE, []
    for number in range(1 if given.tiny else PAIRS):
        rows += a_pair(number, out, tiny=bool(given.tiny))
    from howdah.host.facts import cpu_model, usable_cores

    results = {
        "machine": f"{cpu_model()}, {usable_cores()} of {os.cpu_count()} cores",
        "pairs": len(rows) // len(CASES),
        "noise": watch.end(),
        "cases": summary(rows),
        "rows": rows,
    }
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "results.md").write_text(markdown(results))
    print(markdown(results))


if __name__ == "__main__":
    main()
