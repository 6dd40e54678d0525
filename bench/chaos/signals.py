"""Every stop signal at every moment of a run's life, to the launcher, its group, or one rank.

A run must end within ten seconds with 128 + the signal and a sentence, having saved where there
was something to save, and nothing of it may be left. One that has finished meanwhile ends with 0.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from family import LIMIT, Family, started
from small import environment, left, train, write_recipe

SIGNALS = ("TERM", "INT", "HUP", "USR1", "QUIT")
MOMENTS = ("loading", "server", "ranks", "step 3", "step 10", "last step", "held out")
TARGETS = ("launcher", "group", "a rank")
WITHIN = 10.0  # seconds
STEPS = 40


@dataclass(frozen=True)
class Stop:
    """One stop: which signal, how often, when and to whom, and what came of it."""

    signal: str
    times: int
    moment: str
    target: str
    layout: str
    code: int | None
    ended: float
    said: str
    left: list[str]

    @property
    def survived(self) -> bool:
        """Whether the run ended as it should."""
        number = getattr(signal, f"SIG{self.signal}")
        # Before its first instruction of Python, a process dies of a signal as any other does.
        codes = (0, 128 + number, -number) if self.moment == "loading" else (0, 128 + number)
        clean = not self.left and "Traceback" not in self.said
        told = self.code in (0, -number) or "stopped" in self.said
        return clean and told and self.code in codes and 0 <= self.ended <= WITHIN


def wait_for(family: Family, moment: str) -> None:
    """Returns when the moment has come."""
    until = time.monotonic() + LIMIT
    while time.monotonic() < until and family.process.poll() is None:
        said = family.said()
        come = {
            "loading": True,
            "server": bool(family.server()),
            "ranks": bool(family.ranks()),
            "step 3": "\nstep:  3" in said,
            "step 10": "\nstep: 10" in said,
            "last step": f"\nstep: {STEPS}" in said,
            "held out": "\nheld-out at" in said,
        }
        if come[moment]:
            return
        time.sleep(0.002)


def target_of(number: int, *, alone: bool) -> str:
    """To whom the stop of this number goes: each in turn, whatever else the number decides."""
    targets = ("launcher", "group") if alone else TARGETS
    return targets[(number // 4 + number) % len(targets)]


def stops(folder: Path, layouts: tuple[str, ...]) -> Iterator[dict]:
    """A row for every stop."""
    recipe = write_recipe(folder)
    cases = product(SIGNALS, MOMENTS, layouts, (1, 5))
    for number, (name, moment, layout, times) in enumerate(cases):
        alone = layout == "single"
        if alone and moment in ("server", "ranks"):
            continue
        target = target_of(number, alone=alone)
        place = folder / f"stop{number}"
        run, before = place / "run", set(os.listdir("/dev/shm"))
        words = train(recipe, run, f"layout={layout}", f"train.steps={STEPS}", "train.export=true")
        with started(words, place, environment=environment(place)) as family:
            time.sleep(0.05 * (number % 5) if moment == "loading" else 0)
            wait_for(family, moment)
            ranks = family.ranks() if target == "a rank" else []
            for _ in range(times):
                with suppress(ProcessLookupError):
                    send(family, ranks[-1] if ranks else 0, target, getattr(signal, f"SIG{name}"))
            ended = family.end(60)
            said = f"{family.said()[-300:]}\n{family.err.read_text(errors='replace')[-300:]}"
            row = Stop(
                name,
                times,
                moment,
                target,
                layout,
                family.process.poll(),
                ended,
                said,
                left(place, run, family, before),
            )
        yield {"kind": "stop", **asdict(row), "survived": row.survived}


def send(family: Family, rank: int, target: str, number: int) -> None:
    """To a rank, where there is one; else to the launcher or its group."""
    if target == "group":
        os.killpg(family.process.pid, number)
    else:
        os.kill(rank or family.process.pid, number)


if __name__ == "__main__":
    for row in stops(Path(sys.argv[1]), ("dp2", "single")):
        if not row["survived"] or len(sys.argv) > 2:
            print(row, flush=True)
