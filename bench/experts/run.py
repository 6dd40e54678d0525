"""A mixture of experts beside dense models: is the loss lower for the same work of a token?

    python bench/experts/run.py            three seeds of each model; results.md and results.json
    python bench/experts/run.py --tiny     a few steps of one seed; writes nothing

    experts       the recipe laptop-moe: each token passes two of eight feed-forwards
    same work     dense, as wide as the two together
    same size     dense, as wide as all eight together

All train on the same text, as many steps, with the same method; a seed draws weights and the order
of the samples. The losses are those of all held-out text behind the last step. Exit code 1 unless
the experts' mean is lower than that of the dense model of the same work by over two standard errors
of the difference, and no expert had under 20 % of its block's mean in the last logged steps.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
from machine import machine

HERE = Path(__file__).resolve().parent
SEEDS, LAST, LEAST, ERRORS = 3, 10, 0.2, 2.0
MODELS = {
    "experts": ("laptop-moe",),
    "same work": ("laptop",),
    "same size": ("laptop", "model.ffn_size=2560"),
}
TINY = ("train.steps=6", "train.evaluate_every=6", "train.save_every=6", "train.log_every=2")


def trained(name: str, seed: int, folder: Path, more: tuple[str, ...]) -> dict[str, Any]:
    """One run: its last held-out loss, seconds of a step, and how busy its experts were."""
    recipe, *words = MODELS[name]
    command = [sys.executable, "-m", "howdah", "train", recipe, *words, *more]
    command += ["train.export=false", f"seed={seed}", f"folder={folder}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    held = [row["loss"] for row in rows if row["kind"].startswith("held_out")]
    steps = [row for row in rows if row["kind"] == "train"]
    return {
        "loss": held[-1],
        "seconds per step": sum(row["seconds"] for row in steps) / steps[-1]["step"],
        "least busy": _least(steps[-LAST:]),
    }


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
    return {
        "lower by": lower,
        "standard errors": lower / error if error else float("inf"),
        "least busy": least,
        "met": lower > ERRORS * error and least >= LEAST,
    }


def markdown(results: dict[str, Any]) -> str:
    """The whole of results.md."""
    found, lines = results["judged"], ["# Experts beside dense models: results", ""]
    lines += [results["machine"], ""]
    lines += [
        f"The mean loss of the experts is lower than that of the dense model of the same work by "
        f"{found['lower by']:.4f}, {found['standard errors']:.1f} standard errors (goal: over 2); "
        f"the least busy expert had {found['least busy']:.0%} of the mean (goal: 20 %).",
        "",
        "| model | held-out loss of each seed | mean | seconds per step |",
        "|---|---|---|---|",
    ]
    for name, runs in results["runs"].items():
        losses = [run["loss"] for run in runs]
        seconds = fmean(run["seconds per step"] for run in runs)
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        lines.append(f"| {name} | {each} | {fmean(losses):.4f} | {seconds:.3f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a few steps; writes nothing")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch = quiet.Watch(writes=not words.tiny, loaded=words.loaded)
    seeds, more = (1, TINY) if words.tiny else (SEEDS, ())
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in MODELS}
    with TemporaryDirectory() as folder:
        for seed in range(1, seeds + 1):
            for name in MODELS:
                place = Path(folder) / f"{name.replace(' ', '-')}-{seed}"
                runs[name].append(trained(name, seed, place, more))
                print(name, seed, runs[name][-1], flush=True)
    if words.tiny:
        return 0
    noise = watch.end()
    results = {"machine": f"{machine()} {quiet.sentence(noise)}", "noise": noise, "runs": runs}
    results["judged"] = judged(runs)
    print(results["judged"])
    (HERE / "results.md").write_text(markdown(results), encoding="utf-8")
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if results["judged"]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
