"""Is this version of howdah as fast as another? Both run the same steps, in turn.

    git worktree add /tmp/before COMMIT
    python bench/versions/run.py /tmp/before

Each version has processes of its own, which stay alive and wait while those of the other run: so
both meet the same machine, block after block. Equal losses are required to the last bit, or, with
--close, to 1e-6 of their value (--close 1e-4: to that). Nothing else should run on the machine: its
noise is measured first (../quiet.py), and before each case its processors must be idle.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import IO

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = {  # words: rows of a replica, steps in a block
    "dp2 x1": (4, 4),
    "dp2 x4": (4, 4),
    "dp2 zero1 x1": (4, 4),
    "dp2 zero2 x4": (4, 4),
    "dp2 zero3 x4": (4, 3),
    "tp2 sp x1": (4, 4),
    "pp2 1f1b x8": (8, 3),
    "pp2 zb-h1 x8": (8, 3),
    "dp2 tp2 sp zero2 x4": (4, 2),
}


class Version:
    """The processes of one version, on one layout."""

    def __init__(self, checkout: Path, words: str, rows: int, stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = _world(words)
        for rank in range(world):
            for name in ("go", "done"):
                os.mkfifo(folder / f"{name}-{rank}")
        path = f"{checkout}:{checkout / 'bench' / 'data_parallel'}"
        script = Path(__file__).with_name("serve.py")
        command = [sys.executable, str(script), words, str(rows), str(folder)]
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        self.process = subprocess.Popen(command, env=environment, cwd=checkout)
        stack.callback(self.process.wait)
        self.go: list[IO[str]] = []
        self.done: list[IO[str]] = []
        for rank in range(world):
            self.go.append(stack.enter_context((folder / f"go-{rank}").open("w")))
            self.done.append(stack.enter_context((folder / f"done-{rank}").open()))

    def turn(self, steps: int) -> tuple[float, list[list[float]]]:
        """Seconds of the slowest rank, and the losses of every rank."""
        for one in self.go:
            one.write(f"{steps}\n")
            one.flush()
        answers = [json.loads(one.readline()) for one in self.done]
        return max(seconds for seconds, _ in answers), [losses for _, losses in answers]


def _world(words: str) -> int:
    sizes = [int(word[2:]) for word in words.split() if word[:2] in ("dp", "tp", "pp")]
    return sizes[0] if len(sizes) == 1 else sizes[0] * sizes[1]


def compare(old: Path, new: Path, words: str, repeats: int, *, close: float) -> list[float]:
    """The ratios of times, new to old, of each repeat."""
    rows, steps = LAYOUTS[words]
    with ExitStack() as stack:
        versions = [Version(checkout, words, rows, stack) for checkout in (old, new)]
        for version in versions:  # warm-up
            version.turn(2)
        ratios = []
        for repeat in range(repeats):
            found = {}
            for version in versions if repeat % 2 else reversed(versions):
                found[version] = version.turn(steps)
            (old_seconds, old_losses), (new_seconds, new_losses) = (found[v] for v in versions)
            for mine, theirs in zip(new_losses, old_losses, strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    if not abs(one - other) <= close * abs(other):
                        raise SystemExit(f"{words}: losses differ: {other} before, {one} now")
            ratios.append(new_seconds / old_seconds)
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="a checkout of the other version")
    parser.add_argument("--new", type=Path, default=ROOT, help="a checkout, by default this one")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--close", nargs="?", type=float, const=1e-6, default=0.0, help="losses may differ so much"
    )
    quiet.add_option(parser)
    given = parser.parse_args()
    quiet.Watch(writes=True, loaded=given.loaded)
    print("seconds of a step, new / old (median, quarter to three quarters of the repeats)")
    for words in LAYOUTS:
        if given.only not in words:
            continue
        busy = quiet.others(quiet.WINDOW)
        if busy > quiet.MOST.others and not given.loaded:
            print(f"the machine is not quiet: others take {busy:.0%} before {words}")
            sys.exit(2)
        ratios = sorted(compare(given.old, given.new, words, given.repeats, close=given.close))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        print(f"{words:22s} {median(ratios):.3f}  ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
