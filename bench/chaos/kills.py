"""Kills at random moments: ten of one run, one after another, on each of twelve layouts.

Half of the kills come after a step of that start, half at any moment from its first instruction on.
After the tenth the run may finish, and must end with the bits of one that was left alone.
"""

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from family import LIMIT, Family, started
from small import checksums, environment, left, train, undisturbed, write_recipe

LAYOUTS = (
    *("single", "dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2 sp", "pp2 x4"),
    *("dp2 tp2", "pp2 dp2 zero1 x2", "dp2 zero3 tp2 recompute=full"),
    "dp2 zero3 x2 weights=disk gradients=disk optimizer=disk",
    "tp2 weights=host gradients=host optimizer=disk activations=disk",
)
STEPS = 300
WITHIN = 10.0  # seconds
STOPPED = ", stopped"  # by SIGSTOP: it lives, and does nothing
TARGETS = (
    *("a rank", "a rank", "launcher", "fork server", "all"),
    *(f"{who}{STOPPED}" for who in ("a rank", "launcher", "fork server")),
)


@dataclass(frozen=True)
class Kill:
    """One kill: whom, after how many steps of this start, and what came of it.

    ended   seconds until nothing of the run lived; negative: something did to the end
    """

    layout: str
    target: str
    steps: int
    code: int | None
    ended: float
    left: list[str]
    said: str

    @property
    def survived(self) -> bool:
        """Whether the run ended as it should: soon, with a sentence or by the kill itself."""
        clean = not self.left and "Traceback" not in self.said
        told = self.code == 0 or (self.code == 1 and "howdah: " in self.said)
        return clean and (told or self.code == -signal.SIGKILL) and 0 <= self.ended <= WITHIN


def strike(family: Family, target: str, draw: random.Random) -> str:
    """Kills, or stops; the name of whom it was. Who is not there yet is the launcher in its stead,
    which is killed: before it has started the fork server, nobody would notice that it stands.
    """
    ranks, server = family.ranks(), family.server()
    if target == "all":
        victims = list(family.members())
    elif target.startswith("fork server") and server:
        victims = [server]
    elif target.startswith("a rank") and ranks:
        victims = [draw.choice(ranks)]
    else:
        target = "launcher" if not (target.startswith("launcher") and server) else target
        victims = [family.process.pid]
    number = signal.SIGSTOP if target.endswith(STOPPED) else signal.SIGKILL
    for pid in victims:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return target


def kill_once(words: list[object], folder: Path, run: Path, draw: random.Random) -> Kill:
    """Starts a run and strikes it."""
    before, target = set(os.listdir("/dev/shm")), draw.choice(TARGETS)
    late = draw.random() < 0.5
    with started(words, folder, environment=environment(folder)) as family:
        if late:
            family.wait_for("\nstep: ")
        time.sleep(draw.uniform(0, 1.0 if late else 4.0))
        target = strike(family, target, draw)
        ended = family.end(LIMIT)
        said = family.err.read_text(errors="replace")
        steps = family.said().count("\nstep: ")
        return Kill(
            layout=next(str(w) for w in words if str(w).startswith("layout=")).partition("=")[2],
            target=target,
            steps=steps,
            code=family.process.poll(),
            ended=ended,
            left=left(folder, run, family, before),
            said=said.strip()[-400:],
        )


def kills(folder: Path, *, each: int, layouts: tuple[str, ...], seed: int) -> Iterator[dict]:
    """A row for every kill, and one for the end of every layout's run."""
    recipe, draw = write_recipe(folder), random.Random(seed)
    for number, layout in enumerate(layouts):
        place = folder / str(number)
        run = place / "run"
        words = [f"layout={layout}", f"train.steps={STEPS}"]
        wanted = undisturbed(recipe, place, words, STEPS)
        for _ in range(each):
            kill = kill_once(train(recipe, run, *words), place, run, draw)
            yield {"kind": "kill", **asdict(kill), "survived": kill.survived}
        with started(train(recipe, run, *words), place, environment=environment(place)) as family:
            family.end(LIMIT)
            code = family.process.poll()
        equal = code == 0 and checksums(run, STEPS) == wanted
        yield {"kind": "end", "layout": layout, "code": code, "equal": equal}


if __name__ == "__main__":
    for row in kills(Path(sys.argv[1]), each=int(sys.argv[2]), layouts=LAYOUTS, seed=1):
        print(row, flush=True)
