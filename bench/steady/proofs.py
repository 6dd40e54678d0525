"""Names the slow tests that no landing has run for a while: `make proofs`.

A landing runs the eighth of the slow tests that its commit's hash names (`.ci/run`). Which commits
were landed is not written in git: of several that were pushed at once, the last alone was run. So
every commit of the first line of parents counts as a landing here. That errs on both sides: what
is named may have run in a landing before these eight commits, and what is not named may have been
due in a commit that was pushed together with a later one.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from selection import eighth_of, eighth_of_commit  # noqa: E402  it lies in tests/

LANDINGS = 8


def late(tests: Mapping[str, int], chosen: Sequence[int]) -> list[str]:
    """The tests whose eighth was not chosen.

    >>> late({"a": 1, "b": 2, "c": 3}, chosen=[2, 2, 7])
    ['a', 'c']
    """
    return [test for test, eighth in tests.items() if eighth not in chosen]


def lines_of(*words: str) -> list[str]:
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def slow_tests() -> dict[str, int]:
    """Each with its eighth."""
    told = lines_of(sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow")
    return {line: eighth_of(line) for line in told if "::" in line}


def main() -> None:
    commits = lines_of("git", "log", "--first-parent", f"-{LANDINGS}", "--format=%H %s")
    chosen = [eighth_of_commit(line.split()[0]) for line in commits]
    tests = slow_tests()
    print(f"{len(tests)} slow tests; what the last {len(commits)} commits chose:")
    for line, eighth in zip(commits, chosen, strict=True):
        commit, _, subject = line.partition(" ")
        print(f"  {commit[:7]}  eighth {eighth}  {subject[:80]}")
    missed = late(tests, chosen)
    print(f"{len(missed)} were chosen by none; `make slow` runs all, --slow-eighth N some:")
    for test in missed:
        print(f"  eighth {tests[test]}  {test}")


if __name__ == "__main__":
    main()
