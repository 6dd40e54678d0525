"""Does the suite ever flip? Runs it again and again, on a quiet machine and on a busy one.

    python bench/steady/run.py                          all rounds that are not done yet
    python bench/steady/run.py --rounds 2 --suites 1    fewer of them
    python bench/steady/run.py --only suite             or `processes`
    python bench/steady/run.py --anew                   counts no earlier rounds

processes   the tests that start processes or threads, or read a clock (tests/selection.py)
suite       all that `make test` runs

Each runs so many times with nothing beside it that this script started, and as many times beside
four loops that keep the processors busy. Nothing is timed and nothing is tried a second time. What
is done is written down after each round, with the commit that it ran at. All rounds take hours; so
they may be run at several commits, a few at each: every test of the suite then has as many rounds,
but not of the same files. Exit code 1 where anything failed.
"""

import argparse
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("results.md")
KEPT = ROOT / "build" / "steady"  # git ignores it
MARKS = {"processes": "processes and not slow", "suite": "not slow"}
LOOPS = 4
# A loop ends by itself when this script is gone, whichever way it went.
LOOP = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100_000))"
HANGS = 6 * 3600  # seconds after which a session is said to hang, and is ended
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Round:
    """A session of pytest: which tests, beside how many loops, for which time."""

    kind: str
    loops: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {beside(self.loops)} {self.number}"


def beside(loops: int) -> str:
    return f"beside {loops} loops" if loops else "quiet"


@dataclass(frozen=True)
class Outcome:
    """How many tests ran and which failed.

    broke  how a session ended that did not finish
    files  which files were tested
    """

    round: Round
    tests: int
    failed: list[str]
    broke: str = ""
    files: str = ""

    @property
    def wrong(self) -> list[str]:
        return [*self.failed, *([self.broke] if self.broke else [])]


def rounds(only: str, *, processes: int, suites: int) -> list[Round]:
    """All rounds, quiet ones first.

    >>> [str(each) for each in rounds("suite", processes=9, suites=1)]
    ['suite quiet 1', 'suite beside 4 loops 1']
    """
    times = {"processes": processes, "suite": suites}
    kinds = [only] if only else list(times)
    return [
        Round(kind, loops, number)
        for kind in kinds
        for loops in (0, LOOPS)
        for number in range(1, times[kind] + 1)
    ]


# -- what is done --------------------------------------------------------------------


def files_now() -> str:
    """The commit, and a checksum of what is changed beside it, but for this script's results."""
    own = (RESULTS, RESULTS.with_suffix(".json"))
    others = ["--", ".", *(f":!{path.relative_to(ROOT)}" for path in own)]
    changed = git("diff", "HEAD", *others)
    for name in git("ls-files", "--others", "--exclude-standard", "-z", *others).split("\0"):
        changed += f"{name} {(ROOT / name).read_bytes().hex()}" if name else ""
    more = f" with changes {hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else ""
    return git("rev-parse", "HEAD").strip()[:12] + more


def git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def load(path: Path) -> list[Outcome]:
    """What was done, at all commits."""
    told = json.loads(path.read_text("utf-8")) if path.exists() else []
    return [Outcome(**{**each, "round": Round(**each["round"])}) for each in told]


def save(path: Path, done: Sequence[Outcome]) -> None:
    """All of it or nothing, whenever this is killed."""
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps([asdict(each) for each in done], indent=1) + "\n", "utf-8")
    draft.replace(path)


# -- a round -------------------------------------------------------------------------


def play(each: Round, root: Path, kept: Path) -> Outcome:
    """One session of pytest in a checkout; what it printed is kept where anything failed."""
    said, report = kept / f"{each}.txt".replace(" ", "-"), kept / "report.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-v", "-m", MARKS[each.kind]]
    command += [f"--junitxml={report}", "-o", "junit_family=xunit1", "-p", "no:cacheprovider"]
    with busy(each.loops) as loops:
        code = session(command, root, said)
        alive = all(loop.poll() is None for loop in loops)
    tests, failed = read(report) if report.exists() else (0, [])
    broke = "" if code in (0, 1) else f"(ended with {code} after {last_line(said)})"
    broke = broke or ("" if alive else "(a loop beside it ended)")
    broke = broke or ("(no failure is named)" if code and not failed else "")
    outcome = Outcome(each, tests, failed, broke)
    if not outcome.wrong:
        said.unlink()
    return outcome


@contextmanager
def busy(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute and do nothing else."""
    command = [sys.executable, "-c", LOOP, str(os.getpid())]
    loops = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def session(command: Sequence[str], root: Path, said: Path) -> int | str:
    """The exit code of a command whose output goes to a file; it does not outlive this script."""
    with said.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=root,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,  # noqa: PLW1509  no thread is here
        )
        try:
            return process.wait(HANGS)
        except subprocess.TimeoutExpired:
            return "nothing, for it hangs,"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def read(report: Path) -> tuple[int, list[str]]:
    """How many tests ran, and the names of those that failed, of pytest's report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [
        f"{case.get('file')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return len(cases), list(dict.fromkeys(failed))


def last_line(said: Path) -> str:
    return (said.read_text("utf-8").splitlines() or ["no word"])[-1][:200]


# -- what is reported ----------------------------------------------------------------


def page(all_done: Sequence[Outcome]) -> str:
    """results.md."""
    lines = [
        *("# Steady: results", ""),
        f"Written by `make steady`; README.md says what runs. {os.cpu_count()} cores.",
        *("", "| tests | | rounds | tests run | failures |", "|---|---|---|---|---|"),
    ]
    for kind in MARKS:
        for loops in (0, LOOPS):
            done = [o for o in all_done if (o.round.kind, o.round.loops) == (kind, loops)]
            tests, wrong = sum(o.tests for o in done), sum(len(o.wrong) for o in done)
            lines.append(f"| {kind} | {beside(loops)} | {len(done)} | {tests:,} | {wrong} |")
    lines += ["", "Commits, and the rounds at each:", ""]
    for files in dict.fromkeys(outcome.files for outcome in all_done):
        lines.append(f"- {files}: {sum(outcome.files == files for outcome in all_done)}")
    wrong = [f"- {o.round}, {o.files}: `{name}`" for o in all_done for name in o.wrong]
    return "\n".join([*lines, "", *(wrong or ["Nothing failed."])]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="of the tests of processes")
    parser.add_argument("--suites", type=int, default=3, help="rounds of the whole suite")
    parser.add_argument("--only", choices=list(MARKS), default="", help="one of the two")
    parser.add_argument("--anew", action="store_true", help="count no earlier rounds")
    words = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    kept, files, code = RESULTS.with_suffix(".json"), files_now(), 0
    done = [] if words.anew else load(kept)
    before = {outcome.round for outcome in done}
    todo = rounds(words.only, processes=words.rounds, suites=words.suites)
    for each in [each for each in todo if each not in before]:
        print(f"{each} ...", flush=True)
        outcome = replace(play(each, ROOT, KEPT), files=files)
        if files_now() != files:
            print("files were changed meanwhile: this round counts for nothing", file=sys.stderr)
            return 1
        done.append(outcome)
        save(kept, done)
        RESULTS.write_text(page(done), "utf-8")
        code = code or (1 if outcome.wrong else 0)
        print(f"{outcome.tests:,} tests, failed: {', '.join(outcome.wrong) or 'none'}", flush=True)
    print(page(done))
    return code


if __name__ == "__main__":
    sys.exit(main())
