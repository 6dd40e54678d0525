"""Disks that are full, read-only or gone, for each kind of write of a run.

A kind of write gets a small file system of its own, mounted over the place it goes to, or, where
that is one file, a link to /dev/full. Needs root for the mounts. Two are struck otherwise:

    best.json   is written under another name first, which is linked to /dev/full in the middle of
                the run (its start removes what lies there)
    sample      goes to standard output: to /dev/full, to a descriptor that may only be read, or to
                a pipe whose reader leaves after some lines; the sample must then be in log.txt
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from family import LIMIT, started
from small import environment, left, train, write_recipe

STEPS = 40
PLACES = (
    "checkpoints",
    "trace",
    "tensorboard",
    "export",
    "sample",
    "best.json",
    "metrics.jsonl",
    "log.txt",
    "cache",
    "run",
)
STATES = ("full", "read-only", "gone")
PROMPT = "A run"
WORDS = ("layout=dp2", f"train.steps={STEPS}", "train.evaluate_every=10", "train.export=true")
OUTPUTS = {  # where a shell sends standard output
    "full": 'exec "$@" >/dev/full',
    "read-only": 'exec "$@" 1</dev/null',
    "gone": 'mkfifo "$0"; head -n 12 <"$0" & exec "$@" >"$0"',
}


@contextmanager
def damaged(place: Path, state: str) -> Iterator[None]:
    """A place that cannot be written from the start; what is struck later, `strike` does."""
    if state == "gone" or (place.name, state) == ("best.json", "full"):
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


def strike(place: Path, state: str) -> None:
    """What happens to a place in the middle of a run."""
    if state == "full":
        place.with_name(f"{place.name}.part").symlink_to("/dev/full")
    elif place.is_dir():  # what the run makes anew meanwhile may stay
        shutil.rmtree(place, ignore_errors=True)
    else:
        place.unlink(missing_ok=True)


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
        if (name, state) != ("cache", "gone"):  # nothing of it is needed any more by then
            yield one(folder / f"disk{number}", recipe, name, state)


def one(place: Path, recipe: Path, name: str, state: str) -> dict[str, object]:
    """One run whose writes of one kind are struck."""
    run, before = place / "run", set(os.listdir("/dev/shm"))
    given = environment(place)
    words = train(recipe, run, *WORDS, f"train.prompt={PROMPT}")
    targets = {
        "run": run,
        "cache": Path(given["HOWDAH_CACHE"]),
        "best.json": run / "checkpoints" / name,
    }
    if name == "sample":
        words = ["sh", "-c", OUTPUTS[state], place / "pipe", *words]
        damage: AbstractContextManager[None] = nullcontext()
    else:
        target = targets.get(name, run / name)
        target.parent.mkdir(parents=True, exist_ok=True)
        damage = damaged(target, state)
    with damage, started(words, place, environment=given) as family:
        if name != "sample" and (state == "gone" or (name, state) == ("best.json", "full")):
            family.wait_for("\nstep: 12")
            strike(target, state)
        ended = family.end(LIMIT)
        code = family.process.poll()
        said = family.err.read_text(errors="replace")
        told = (run / "log.txt").read_text() if name == "sample" else family.said()
        rubbish = left(place, run, family, before)
    early = name in ("run", "cache") and state != "gone"  # refused before the first step
    saves = name == "checkpoints" and state != "gone"
    wanted = {2} if early else {1} if saves else {0, 1} if name == "run" else {0}
    steps = told.count("\nstep: ")
    clean = "Traceback" not in said and not rubbish and ended >= 0
    whole = early or (steps == STEPS and (name != "sample" or f"\n{PROMPT}" in told))
    return {
        "kind": "disk",
        "place": name,
        "state": state,
        "code": code,
        "steps": steps,
        "said": said.strip()[-300:],
        "left": rubbish,
        "survived": clean and code in wanted and whole,
    }


if __name__ == "__main__":
    for row in disks(Path(sys.argv[1])):
        print(row, flush=True)
