"""Ten minutes of kills: one run on four ranks that starts itself again, struck every few seconds.

When the time is over the run is left alone, and must end with the bits of one that always was.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from family import LIMIT, started
from small import checksums, environment, left, train, undisturbed, write_recipe

WORDS = ("layout=dp2 tp2 zero2", "train.save_every=25")
PAUSE = (2.0, 9.0)  # seconds between kills


def loop(folder: Path, *, seconds: float, steps: int, seed: int) -> Iterator[dict[str, object]]:
    """One row: how often and how long it was struck, and how it ended."""
    recipe, draw = write_recipe(folder), random.Random(seed)
    words = [*WORDS, f"train.steps={steps}"]
    wanted = undisturbed(recipe, folder / "ref", words, steps)
    place, before, struck, starts = folder / "loop", set(os.listdir("/dev/shm")), 0, 0
    run, began, last, finished = place / "run", time.monotonic(), 0.0, False
    until = began + seconds
    given = environment(place)
    while not finished:
        # The launcher and the fork server are struck as well: then the loop starts the run again.
        starts += 1
        command = train(recipe, run, *words)
        command[command.index("train") + 1 : command.index("train") + 1] = ["--restarts", 1000]
        with started(command, place, environment=given) as family:
            while family.process.poll() is None:
                if time.monotonic() > until:
                    family.end(10 * LIMIT)
                    break
                time.sleep(draw.uniform(*PAUSE))
                ranks = family.ranks()
                whom = [*ranks, family.server(), family.process.pid]
                weights = [4] * len(ranks) + [1, 1]
                victim = draw.choices(whom, weights)[0] if time.monotonic() < until else 0
                with suppress(ProcessLookupError):
                    if victim and family.process.poll() is None:
                        os.kill(victim, signal.SIGKILL)
                        struck, last = struck + 1, time.monotonic() - began
            family.end(LIMIT)
            finished = family.process.poll() == 0
            rubbish = left(place, run, family, before)
    yield {
        "kind": "loop",
        "layout": WORDS[0],
        "seconds": round(last),
        "struck": struck,
        "starts": starts,
        "left": rubbish,
        "equal": checksums(run, steps) == wanted,
        "survived": not rubbish and checksums(run, steps) == wanted,
    }


if __name__ == "__main__":
    for row in loop(Path(sys.argv[1]), seconds=float(sys.argv[2]), steps=int(sys.argv[3]), seed=1):
        print(row, flush=True)
