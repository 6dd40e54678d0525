"""Hands thousands of wrong inputs to howdah: each must be answered, or refused in a sentence.

    python bench/chaos/fuzz.py                          10,000 of each kind, and the table
    python bench/chaos/fuzz.py --kind recipe --seed 7   one input again, with its traceback
    python bench/chaos/fuzz.py --write                  fuzz.json beside this file

An input fails where anything but UserError comes out of it, where its sentence has two lines or no
end, after 5 seconds of processor time, and with 1 GiB of memory more than the process began with.
"""

import argparse
import json
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_files import KINDS as FILES
from fuzz_inputs import KINDS as INPUTS

from howdah.base.errors import UserError

KINDS = INPUTS | FILES
HERE = Path(__file__).resolve().parent
SECONDS = 5
MEMORY = 1 << 30
LONGEST = 3000  # characters of a sentence


@dataclass
class Row:
    """What became of the inputs of one kind; `slowest` in seconds of the processor."""

    kind: str
    asked: int = 0
    answered: int = 0
    refused: int = 0
    failed: int = 0
    slowest: float = 0.0
    failures: list[str] = field(default_factory=list)


class TooLong(BaseException):
    """An input took more time than it may; not an Exception, which somebody might catch."""


@contextmanager
def limits() -> Iterator[None]:
    """Memory for the whole block; the clock of each input is set by `ask`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _stop(*_: object) -> None:
    raise TooLong


def ask(kind: str, seed: int, folder: Path) -> str:
    """What became of one input: `answered`, `refused`, or what is wrong."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        KINDS[kind](Random(f"{kind} {seed}"), folder)
        return "answered"
    except UserError as refusal:
        sentence = str(refusal)
        if "\n" in sentence or not 0 < len(sentence) <= LONGEST:
            return f"a sentence of {len(sentence)} characters: {sentence[:100]!r}"
        return "refused"
    except TooLong:
        return f"more than {SECONDS} s"
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:100]} ({Path(place.filename).name})"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def run(kind: str, seeds: range, folder: Path) -> Row:
    """Asks about as many inputs as there are seeds."""
    row = Row(kind)
    for seed in seeds:
        began = time.process_time()
        found = ask(kind, seed, folder)
        row.slowest = max(row.slowest, time.process_time() - began)
        row.asked += 1
        if found in ("answered", "refused"):
            setattr(row, found, getattr(row, found) + 1)
        else:
            row.failed += 1
            row.failures.append(f"--kind {kind} --seed {seed}: {found}")
    return row


def table(rows: list[Row]) -> str:
    """The rows as lines."""
    names = ("kind", "asked", "answered", "refused", "failed", "slowest")
    lines = ["  ".join(f"{name:>9s}" for name in names)]
    for row in rows:
        counts = (row.kind, row.asked, row.answered, row.refused, row.failed)
        lines.append("  ".join(f"{cell:>9}" for cell in counts) + f"  {row.slowest:7.2f} s")
    return "\n".join(lines)


def main() -> int:
    """Asks, prints, and leaves with 1 if any input failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=KINDS, action="append", help="this one alone")
    parser.add_argument("--count", type=int, default=10_000, help="of each kind")
    parser.add_argument("--seed", type=int, help="one input again")
    parser.add_argument("--write", action="store_true", help="fuzz.json beside this file")
    words = parser.parse_args()
    kinds = words.kind or list(KINDS)
    with tempfile.TemporaryDirectory() as name, limits():
        folder = Path(name)
        if words.seed is not None:
            for kind in kinds:
                KINDS[kind](Random(f"{kind} {words.seed}"), folder)
            return 0
        rows = []
        for kind in kinds:
            rows.append(run(kind, range(words.count), folder))
            for failure in rows[-1].failures:
                print(failure, flush=True)
    print(table(rows))
    if words.write:
        content = json.dumps([asdict(row) for row in rows], indent=1) + "\n"
        (HERE / "fuzz.json").write_text(content)
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
