"""How quiet the machine is: looked at before and after a benchmark, and written into its results.

    others     share of all processors' time that others take while this process sleeps
    one core   a fixed piece of work, repeated by one thread: by how much its mean time is longer
               than its least
    all cores  the same, by as many threads at once as there are cores

    python bench/quiet.py      looks five times; exit code 2 where the machine was not quiet

A loaded machine gives numbers that no second run finds again. So on one that is not quiet a
benchmark writes no results, unless it is asked to (--loaded); then they say so.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from statistics import mean
from time import perf_counter, sleep
from typing import Any

import numpy as np

from howdah.host.facts import allowed_cores

WINDOW = 2.0  # seconds in which the others are watched
REPEATS = 60  # of the piece of work, by each thread
HASHED, COPIED = 1 << 20, 1 << 24  # bytes: what a core computes, and what goes through memory
LOOKS, PAUSE = 3, 5.0  # the most looks at a machine that is not quiet, and seconds between them


@dataclass(frozen=True)
class Noise:
    """Shares, as the file's docstring has them."""

    others: float
    one_core: float
    all_cores: float


# Two idle cores had 0 to 0.01, 0.04 to 0.20, and 0.04 to 0.19; beside five busy processes they had
# 0.99 to 1, 1.1 to 9.4, and 2.0 to 4.3.
MOST = Noise(others=0.05, one_core=0.15, all_cores=0.25)


def problems(noise: Noise) -> list[str]:
    """What of a machine is not quiet."""
    names = {"others": "others take", "one_core": "one core varies by", "all_cores": "all vary by"}
    found, most = asdict(noise), asdict(MOST)
    return [
        f"{words} {found[name]:.1%} (at most {most[name]:.0%})"
        for name, words in names.items()
        if not found[name] <= most[name]
    ]


# -- measuring ---------------------------------------------------------------------


def measure() -> Noise:
    """Takes some four seconds."""
    return Noise(others(WINDOW), spread(repeats(1)), spread(repeats(allowed_cores())))


def others(seconds: float) -> float:
    """The share of the processors' time that was not idle while this process slept."""
    before = read_stat()
    sleep(seconds)
    return busy_share(before, read_stat())


def read_stat() -> str:
    return Path("/proc/stat").read_text(encoding="utf-8")


def busy_share(before: str, after: str) -> float:
    """From two texts of /proc/stat. Time that a hypervisor gave to others (steal) is not idle."""
    first, last = (
        [int(word) for word in text.splitlines()[0].split()[1:9]] for text in (before, after)
    )
    passed = [b - a for a, b in zip(first, last, strict=True)]
    return 1 - (passed[3] + passed[4]) / max(sum(passed), 1)  # idle, and waiting for a disk


def repeats(threads: int) -> list[float]:
    """Seconds of each piece of work, of so many threads at once. The work needs no GIL."""
    source, text = np.ones(COPIED, np.uint8), bytes(HASHED)

    def work(_: int) -> list[float]:
        target, seconds = np.empty_like(source), []
        for _ in range(REPEATS + 1):
            began = perf_counter()
            sha256(text).digest()
            np.copyto(target, source)
            seconds.append(perf_counter() - began)
        return seconds[1:]  # the first touches the pages of the target

    with ThreadPoolExecutor(threads) as pool:
        return [seconds for each in pool.map(work, range(threads)) for seconds in each]


def spread(seconds: Sequence[float]) -> float:
    """By how much the mean is longer than the least."""
    return mean(seconds) / min(seconds) - 1


# -- in a benchmark ----------------------------------------------------------------


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--loaded", action="store_true", help="write results on a loaded machine too"
    )


class Watch:
    """Looks at the machine before a benchmark (here) and after it (`end`).

    writes  the benchmark writes results: then the program ends with code 2 on a loaded machine
    loaded  unless it was asked for that
    """

    def __init__(self, *, writes: bool, loaded: bool = False) -> None:
        self.writes, self._refuses = writes, writes and not loaded
        self._looks = [self._look()] if writes else []

    def end(self) -> list[dict[str, Any]]:
        """The looks as results hold them; none of a benchmark that writes nothing."""
        return [*self._looks, self._look()] if self.writes else []

    def _look(self) -> dict[str, Any]:
        for number in range(LOOKS):
            sleep(PAUSE if number else 0.0)
            noise = measure()
            if not (wrong := problems(noise)):
                break
        found = asdict(noise) | {"loaded": bool(wrong)}
        print(sentence([found]), file=sys.stderr, flush=True)
        if wrong and self._refuses:
            told = f"the machine is not quiet: {', '.join(wrong)}; end what else runs on it, or "
            print(f"{told}give --loaded for results that say so", file=sys.stderr)
            sys.exit(2)
        return found


def sentence(looks: Sequence[dict[str, Any]]) -> str:
    """What results.md says of the noise; without a look, as in older results, that there is none.

    >>> sentence([])
    'Noise of the machine: not measured.'
    """
    if not looks:
        return "Noise of the machine: not measured."
    worst = {name: max(one[name] for one in looks) for name in asdict(MOST)}
    state = " **The machine was not quiet.**" if any(one.get("loaded") for one in looks) else ""
    return (
        f"Noise of the machine: other processes took {worst['others']:.1%} of the processors; a "
        f"fixed piece of work took {worst['one_core']:.1%} longer than its least time on one core, "
        f"{worst['all_cores']:.1%} on all at once.{state}"
    )


def main() -> int:
    found = [measure() for _ in range(5)]
    for noise in found:
        print(sentence([asdict(noise)]), *problems(noise), sep="\n    ")
    return 2 if any(map(problems, found)) else 0


if __name__ == "__main__":
    sys.exit(main())
