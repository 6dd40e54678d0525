"""What the training loop costs beside the training: its share of a step, part by part.

    python bench/data_parallel/overhead.py           one process, one thread; writes overhead.md
    python bench/data_parallel/overhead.py --tiny    the same in seconds, writes nothing

`train` itself runs the laptop recipe (micro-batch 8 × 256, bf16, one process, so that nothing is
sent), with a clock around every function that belongs to a part:

    forward    model and loss            norm, clip   of the gradient
    backward                             batches      waiting for the next one
    optimizer  its step                  watch        counting, log lines, files
    zero, publish   of flat buffers      other        Python between them

The first five are the work that is asked for; norm and clip are part of the mathematics too, but
count against the loop here. A *stretch* is ten steps and one log line.
"""

import argparse
import functools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

sys.path.append(str(Path(__file__).resolve().parents[1]))

import quiet
import torch
from machine import machine

import howdah.train.step
from howdah.comm.transport import SingleRank
from howdah.config.recipe import Machine, load_run, resolve_run
from howdah.parallel.executor import StepRun
from howdah.text.prefetch import Prefetch
from howdah.train.loop import train
from howdah.train.monitor import SpeedMonitor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
WORK = ("forward", "backward", "optimizer", "zero", "publish")
LOOP = ("norm", "clip", "batches", "watch", "other")
WARM_UP, STRETCHES = 2, 8
GOAL = 0.03
TINY = (
    *("model.layers=1", "model.width=32", "model.heads=2", "model.ffn_size=32", "model.vocab=300"),
    *("batch.global_batch=2", "data.sequence_length=32", "train.steps=30"),
)

# (part, where, name): the functions of each part.
HOOKS = (
    ("forward", StepRun, "outputs"),
    ("backward", StepRun, "_back"),
    ("optimizer", torch.optim.AdamW, "step"),
    ("zero", torch, "_foreach_zero_"),
    ("publish", howdah.train.step, "publish"),
    ("norm", torch, "_foreach_norm"),
    ("clip", torch, "_foreach_mul_"),
    ("batches", Prefetch, "next"),
    ("watch", SpeedMonitor, "step"),
)


@dataclass
class Clock:
    """Adds up the seconds of each part; one dictionary of parts for every step."""

    steps: list[Counter[str]] = field(default_factory=list)
    now: Counter[str] = field(default_factory=Counter)
    inside: bool = False
    began: float = 0.0

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its time added to `part`, unless another part is being timed."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            if self.inside:
                return function(*arguments, **named)
            self.inside, began = True, perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.now[part] += perf_counter() - began  # type: ignore[assignment]
                self.inside = False
                if part == "watch":
                    self._end_of_step()

        return timed

    def _end_of_step(self) -> None:
        """What the parts do not explain is Python between them.

        The first step gets all that came before it too; it is not counted, being warm-up.
        """
        ended = perf_counter()
        parts = sum(self.now.values())
        self.now["other"] = ended - self.began - parts  # type: ignore[assignment]
        self.steps.append(self.now)
        self.now, self.began = Counter(), ended


@contextmanager
def hooked(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for part, where, name in HOOKS:
            around = clock.around(part, getattr(where, name))
            stack.enter_context(patch.object(where, name, around))
        yield


def steps_of_a_run(folder: Path, *, tiny: bool = False) -> list[Counter[str]]:
    """Trains in `folder` on this repository's own text; the parts of each step."""
    text = ("docs/forms", "docs/how-to") if tiny else ("howdah", "tests")
    run = load_run(
        ROOT / "recipes" / "laptop.toml",
        [
            f"data.sources={[str(ROOT / name) for name in text]}",
            "layout=single",
            "threads=1",
            "device=cpu",
            "batch.global_batch=8",
            f"train.steps={10 * (WARM_UP + STRETCHES)}",
            "train.log_every=10",
            "train.evaluate_every=0",
            "train.save_every=0",
            "train.prompt=''",
            "train.export=false",
            *TINY * tiny,
        ],
    )
    here = Machine(world=None, local_world=None, cores=1, cuda=0, cache=folder / "cache")
    job = resolve_run(replace(run, folder=folder / "run"), here)
    job.folder.mkdir()
    clock = Clock()
    with hooked(clock):
        train(job, SingleRank())
    return clock.steps


def shares(steps: list[Counter[str]]) -> dict[str, float]:
    """The median share of each part, over stretches of ten steps."""
    stretches = [sum(steps[i : i + 10], Counter()) for i in range(0, len(steps), 10)][WARM_UP:]
    return {
        part: median(stretch[part] / stretch.total() for stretch in stretches)
        for part in (*WORK, *LOOP)
    }


def table(parts: dict[str, float], seconds: float, noise: str) -> str:
    """The whole of overhead.md."""
    loop = sum(parts[part] for part in LOOP)
    rows = "".join(f"| {part} | {share:.2%} |\n" for part, share in parts.items())
    return (
        "# The loop's share of a step: results\n\n"
        f"Written by `overhead.py`. {machine()} {noise}\n\n"
        f"Laptop recipe, one process, micro-batch 8 × 256, bf16; median over {STRETCHES} stretches "
        f"of ten steps. A step takes {1000 * seconds:.0f} ms.\n\n"
        f"Outside forward, backward, optimizer, zero and publish: **{loop:.2%}** of a step "
        f"(goal: under {GOAL:.0%}).\n\n"
        f"| part | share of a step |\n|---|---|\n{rows}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it works")
    quiet.add_option(parser)
    words = parser.parse_args()
    watch = quiet.Watch(writes=not words.tiny, loaded=words.loaded)
    with tempfile.TemporaryDirectory() as folder:
        steps = steps_of_a_run(Path(folder), tiny=words.tiny)
    parts = shares(steps)
    assert all(parts[part] > 0 for part in WORK), f"a hook did not fire: {parts}"
    noise = quiet.sentence(watch.end())
    text = table(parts, median(step.total() for step in steps), noise)
    print(text)
    if words.tiny:
        return 0
    (HERE / "overhead.md").write_text(text, encoding="utf-8")
    return 0 if sum(parts[part] for part in LOOP) < GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
