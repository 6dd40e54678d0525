"""The small run that is damaged: a recipe, its text, and what must come out of it.

Its text is this project's own documentation; a step takes some milliseconds, so that a moment
chosen by chance falls on every part of a run's life.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from family import HOWDAH, LIMIT, Family, is_locked, started

HERE = Path(__file__).parent
DRAFTS = (".tmp", ".part", ".new")
RECIPE = """
layout = "single"
seed = 1
threads = 1

[model]
layers = 4
width = 32
heads = 2
ffn_size = 64
vocab = 300
context = 32

[data]
sources = ["{text}"]
sequence_length = 32
validation_share = 0.1

[batch]
global_batch = 8

[method.lr]
peak = 3e-3
warmup_steps = 3

[train]
steps = 300
log_every = 1
save_every = 10
keep_last = 3
evaluate_samples = 4
"""


def write_recipe(folder: Path) -> Path:
    """The recipe, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "small.toml"
    path.write_text(RECIPE.format(text=HERE.parents[1] / "docs"))
    return path


def environment(folder: Path) -> dict[str, str]:
    """Temporary files and the cache lie in `folder`, so that what is left there is the run's."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True, exist_ok=True)
    cache = folder / "cache"
    return {"TMPDIR": str(temporary), "HOWDAH_CACHE": str(cache), "OMP_NUM_THREADS": "1"}


def train(recipe: Path, run: Path, *words: object) -> list[object]:
    """The command that trains in the run folder `run`."""
    return [*HOWDAH, "train", recipe, f"folder={run}", *words]


def left(folder: Path, run: Path, family: Family, before: set[str]) -> list[str]:
    """What a run that has ended left behind, in words."""
    found = [f"process {pid}" for pid in family.members()]
    until = time.monotonic() + 2  # threads of a process that is seen to be dead may still be ending
    while is_locked(run) and time.monotonic() < until:
        time.sleep(0.01)
    found += ["its lock"] if is_locked(run) else []
    found += [f"temporary {name}" for name in os.listdir(folder / "tmp")]
    code = family.process.poll()
    if code is not None and code >= 0:  # a launcher that is killed may leave a draft
        found += [f"draft {path}" for path in run.rglob("*") if path.suffix in DRAFTS]
    return found + [f"shared memory {name}" for name in set(os.listdir("/dev/shm")) - before]


def checksums(run: Path, step: int) -> dict[str, int]:
    """The CRC-32 of every piece of a checkpoint, by its entry."""
    index = json.loads((run / "checkpoints" / f"step-{step:08d}" / "index.json").read_text())
    return {f"{row['file']} {row['entry']}": row["crc32"] for row in index["pieces"]}


def undisturbed(recipe: Path, folder: Path, words: Sequence[object], step: int) -> dict[str, int]:
    """The checksums of a run that is left alone."""
    run = folder / "alone"
    with started(train(recipe, run, *words), folder, environment=environment(folder)) as family:
        if family.end(10 * LIMIT) < 0 or family.process.poll():
            raise RuntimeError(f"a run that was left alone failed: {family.err.read_text()}")
    return checksums(run, step)
