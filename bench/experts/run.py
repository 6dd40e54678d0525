"""A mixture of experts beside dense models: is the loss lower for the same work of a token?

    python bench/experts/run.py            some seeds of each model, then times; writes results
    python bench/experts/run.py --losses   the seeds alone, on any machine; they are kept
    python bench/experts/run.py --tiny     a few steps of one seed; writes nothing

    experts       the recipe laptop-moe: each token passes two of eight feed-forwards
    same work     dense, as wide as the two together
    same size     dense, as wide as all eight together

All train on the same text, as many steps, with the same method; a seed draws weights and the order
of the samples, so that two models of one seed see the same text in the same order; the difference
within seeds is given beside. The losses are those of all held-out text behind the last step; runs
that have ended are kept in build/experts (--anew forgets them). Seconds of a step are measured
apart, by short runs that take turns. Exit code 1 unless the experts' mean is lower than that of the
dense model of the same work by over two standard errors of the difference, and no expert had under
20 % of its block's mean in the last logged steps.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from shutil import rmtree
from statistics import fmean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
from machine import machine

HERE = Path(__file__).resolve().parent
STORE = HERE.parents[1] / "build" / "experts"
LAST, LEAST, ERRORS = 10, 0.2, 2.0
SEEDS = {"experts": 6, "same work": 6, "same size": 3}
TURNS, STRETCHES, STRETCH = 5, 6, 5  # runs of each model for times; stretches of so many steps
NARROW = (  # what the recipe of experts has otherwise than `laptop`
    *("model.width=64", "model.head_size=16", "train.steps=1000", "method.lr.warmup_steps=60"),
)
MODELS = {
    "experts": ("laptop-moe",),
    "same work": ("laptop", *NARROW, "model.ffn_size=160"),
    "same size": ("laptop", *NARROW, "model.ffn_size=640"),
}
TINY = ("train.steps=6", "train.evaluate_every=6", "train.save_every=6", "train.log_every=2")
BRIEF = (
    *(f"train.steps={STRETCHES * STRETCH}", f"train.log_every={STRETCH}", "train.prompt="),
    *("train.evaluate_every=0", "train.save_every=0", "data.validation_share=0.002"),
)


def rows_of(name: str, seed: int, folder: Path, more: tuple[str, ...]) -> list[dict[str, Any]]:
    """The metrics of one run."""
    recipe, *words = MODELS[name]
    command = [sys.executable, "-m", "howdah", "train", recipe, *words, *more]
    command += ["train.export=false", f"seed={seed}", f"folder={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def trained(name: str, seed: int, more: tuple[str, ...]) -> dict[str, Any]:
    """One whole run: its last held-out loss, and how busy its experts were."""
    with TemporaryDirectory() as folder:
        rows = rows_of(name, seed, Path(folder) / "run", more)
    held = [row["loss"] for row in rows if row["kind"].startswith("held_out")]
    steps = [row for row in rows if row["kind"] == "train"]
    return {"loss": held[-1], "least busy": _least(steps[-LAST:])}


def kept(name: str, seed: int) -> dict[str, Any]:
    """The same, from the store where it is there."""
    file = STORE / f"{name.replace(' ', '-')}-{seed}.json"
    if not file.is_file():
        found = trained(name, seed, ())
        STORE.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found), "utf-8")
    run: dict[str, Any] = json.loads(file.read_text("utf-8"))
    print(name, seed, run, flush=True)
    return run


def timed() -> dict[str, list[float]]:
    """Seconds of a step by model: the median stretch of each of some short runs, by turns."""
    found: dict[str, list[float]] = {name: [] for name in MODELS}
    for turn in range(TURNS):
        for at in range(len(MODELS)):
            name = list(MODELS)[(turn + at) % len(MODELS)]
            with TemporaryDirectory() as folder:
                rows = rows_of(name, 1, Path(folder) / "run", BRIEF)
            some = [row["seconds"] / STRETCH for row in rows if row["kind"] == "train"]
            found[name].append(median(some[1:]))
    return found


def _least(rows: list[dict[str, Any]]) -> float | None:
    """The tokens of the least busy expert beside its block's mean, over some steps."""
    blocks: dict[str, list[int]] = {}
    for row in rows:
        for block, tokens in (row.get("experts") or {}).items():
            before = blocks.get(block, [0] * len(tokens))
            blocks[block] = [a + b for a, b in zip(before, tokens, strict=True)]
    return min((min(some) * len(some) / sum(some) for some in blocks.values()), default=None)


def judged(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """How much lower the experts' loss is, in standard errors, and whether the goals are met."""
    losses = {name: [run["loss"] for run in some] for name, some in runs.items()}
    mine, other = losses["experts"], losses["same work"]
    error = (sum(stdev(some) ** 2 / len(some) for some in (mine, other))) ** 0.5
    lower = fmean(other) - fmean(mine)
    least = min(run["least busy"] for run in runs["experts"])
    pairs = [theirs - ours for ours, theirs in zip(mine, other, strict=True)]
    within = stdev(pairs) / len(pairs) ** 0.5
    return {
        "lower by": lower,
        "standard errors": lower / error if error else float("inf"),
        "standard errors within seeds": lower / within if within else float("inf"),
        "least busy": least,
        "met": lower > ERRORS * error and least >= LEAST,
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole of results.md."""
    found, lines = results["judged"], ["# Experts beside dense models: results", ""]
    lines += [results["machine"], ""]
    lines += [
        f"The mean loss of the experts is lower than that of the dense model of the same work by "
        f"{found['lower by']:.4f}, {found['standard errors']:.1f} standard errors (goal: over 2; "
        f"{found['standard errors within seeds']:.1f} within seeds, where both see the same text); "
        f"the least busy expert had {found['least busy']:.0%} of the mean (goal: 20 %).",
        "",
        "| model | held-out loss of each seed | mean | seconds per step, median (least to most) | "
        "beside the same work |",
        "|---|---|---|---|---|",
    ]
    same = median(results["seconds"]["same work"])
    for name, runs in results["runs"].items():
        losses, seconds = [run["loss"] for run in runs], results["seconds"][name]
        each, middle = ", ".join(f"{loss:.4f}" for loss in losses), median(seconds)
        took = f"{middle:.3f} ({min(seconds):.3f} to {max(seconds):.3f})"
        times = f"{middle / same:.2f}"
        lines.append(f"| {name} | {each} | {fmean(losses):.4f} | {took} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few steps; writes nothing")
    parser.add_argument("--losses", action="store_true", help="these alone; writes no results")
    parser.add_argument("--anew", action="store_true", help="forget what is kept of earlier calls")
    quiet.add_option(parser)
    words = parser.parse_args()
    if words.tiny:
        for name in MODELS:
            print(name, trained(name, 1, TINY), flush=True)
        return 0
    if words.anew:
        rmtree(STORE, ignore_errors=True)
    runs = {name: [kept(name, seed) for seed in range(1, SEEDS[name] + 1)] for name in MODELS}
    if words.losses:
        return 0
    watch = quiet.Watch(writes=True, loaded=words.loaded)
    seconds, noise = timed(), watch.end()
    results = {"machine": f"{machine()} {quiet.sentence(noise)}", "noise": noise, "runs": runs}
    results |= {"seconds": seconds, "judged": judged(runs)}
    print(results["judged"])
    (HERE / "results.md").write_text(markdown(results), encoding="utf-8")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if results["judged"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
