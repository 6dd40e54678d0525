"""Disks that are full, read-only or gone, for each kind of write of a run.

A kind of write gets a small file system of its own, mounted over the place it goes to, or, where
that is one file, a link to /dev/full. Needs root for the mounts.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from family import LIMIT, started
from small import environment, left, train, write_recipe

STEPS = 40
PLACES = (
    "checkpoints",
    "trace",
    "tensorboard",
    "export",
    "metrics.jsonl",
    "log.txt",
    "cache",
    "run",
)
STATES = ("full", "read-only", "gone")


@contextmanager
def damaged(place: Path, state: str) -> Iterator[None]:
    """A place that cannot be written; `gone` is done by whoever runs."""
    if state == "gone":
        yield
        return
    if place.suffix:
        if state == "read-only":
            place.mkdir()  # a folder where the file should be
        else:
            place.symlink_to("/dev/full")
        yield
        return
    place.mkdir(parents=True, exist_ok=True)
    options = "size=16k" if state == "full" else "size=1m,ro"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], check=True)
    if state == "full":
        _fill(place / "filler")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def _fill(path: Path) -> None:
    """Writes until nothing more goes in, not even a byte."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    for size in (4096, 1):
        with suppress(OSError):
            while True:
                os.write(file, b"\0" * size)
    os.close(file)


def disks(folder: Path) -> Iterator[dict[str, object]]:
    """A row for each place and state, on two ranks."""
    recipe = write_recipe(folder)
    for number, (name, state) in enumerate((p, s) for p in PLACES for s in STATES):
        if name == "cache" and state == "gone":
            continue  # nothing of it is needed any more
        place = folder / f"disk{number}"
        run, before = place / "run", set(os.listdir("/dev/shm"))
        given = environment(place)
        target = {"run": run, "cache": Path(given["HOWDAH_CACHE"])}.get(name, run / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        words = train(recipe, run, "layout=dp2", f"train.steps={STEPS}", "train.export=true")
        with damaged(target, state), started(words, place, environment=given) as family:
            if state == "gone":
                family.wait_for("\nstep: 12")
                if target.is_dir():  # what the run makes anew meanwhile may stay
                    shutil.rmtree(target, ignore_errors=True)
                else:
                    target.unlink(missing_ok=True)
            ended = family.end(LIMIT)
            code = family.process.poll()
            said = family.err.read_text(errors="replace")
            steps = family.said().count("\nstep: ")
            rubbish = left(place, run, family, before)
        early = name in ("run", "cache") and state != "gone"  # refused before the first step
        saves = name == "checkpoints" and state != "gone"
        wanted = {2} if early else {1} if saves else {0, 1} if name == "run" else {0}
        clean = "Traceback" not in said and not rubbish and ended >= 0
        yield {
            "kind": "disk",
            "place": name,
            "state": state,
            "code": code,
            "steps": steps,
            "said": said.strip()[-300:],
            "left": rubbish,
            "survived": clean and code in wanted and (early or steps == STEPS),
        }


if __name__ == "__main__":
    for row in disks(Path(sys.argv[1])):
        print(row, flush=True)
