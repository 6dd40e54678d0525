"""Which tests are run, and that none depends on those before it (selection.py, conftest.py)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from selection import EIGHTHS, eighth_of, eighth_of_commit, is_of_processes

import howdah.shapes.presets  # noqa: F401  a local module full of constants
from howdah.comm.spawn import WorkerError

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"

MADE_UP = """
import pytest

def test_quick():
    pass

@pytest.mark.slow
@pytest.mark.parametrize("n", range(3))
def test_slow(n):
    pass
"""
MOSTLY_SLOW = """
import pytest

@pytest.mark.slow_after(2)
@pytest.mark.parametrize("n", [pytest.param(0, marks=pytest.mark.slow), 1, 2, 3, 4])
def test_cases(n):
    pass

@pytest.mark.slow_after(1)
def test_one():
    pass
"""


# -- eighths of the slow tests -----------------------------------------------------------


SESSIONS = """
import sys, pytest
config, root, *sessions = sys.argv[1:]
for words in sessions:
    given = ["-p", "conftest", "-p", "no:cacheprovider", "-c", config, "--rootdir", root, "-v"]
    print("code", pytest.main([*given, "test_made_up.py", *words.split()]))
"""


def selected(folder, *sessions, source=MADE_UP):
    """Of sessions of pytest with some words each: the tests that were run, then the exit code."""
    (folder / "test_made_up.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", SESSIONS, str(ROOT / "pyproject.toml"), str(folder), *sessions],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ":".join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "PASSED" in line or "code" in line]
    return [line.removeprefix("code ").split()[0] for line in lines]


@pytest.mark.slow
def test_an_eighth_of_the_slow_tests_joins_the_quick_ones(tmp_path):
    slow = [f"test_made_up.py::test_slow[{n}]" for n in range(3)]
    first, chosen, last = map(eighth_of, slow)
    assert chosen not in (first, last)
    empty = min({*range(EIGHTHS)} - {first, chosen, last})
    told = selected(
        tmp_path, f"--slow-eighth {chosen}", f"--slow-eighth {empty} -m slow", "-m slow"
    )
    joined = ["test_made_up.py::test_quick", slow[1], "0"]
    assert told == [*joined, "0", *slow, "0"]  # that none is selected is no failure


def test_of_a_test_s_cases_the_first_are_quick(tmp_path):
    test = "test_made_up.py::test_cases"
    told = selected(tmp_path, "", "-m slow", source=MOSTLY_SLOW)
    quick = [f"{test}[1]", f"{test}[2]", "test_made_up.py::test_one", "0"]
    assert told == [*quick, *(f"{test}[{n}]" for n in (0, 3, 4)), "0"]


def test_the_parts_of_a_long_proof_are_one_in_each_eighth():
    name = "tests/sim/test_predict.py::test_ten_thousand_random_questions_get_a_plan_or_a_sentence"
    assert {eighth_of(f"{name}[{part}]") for part in range(8)} == set(range(EIGHTHS))


def test_the_script_of_a_landing_chooses_the_eighth_of_the_commit(tmp_path):
    """It has the last digit of the hash alone."""
    line = next(
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if "eighth=" in line
    )
    for commit in ("ffd675400000000000000000000000000000000b", "00a5", "9", "0"):
        command = ["bash", "-c", f"hash={commit}\n{line}\necho $eighth"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert int(told) == eighth_of_commit(commit)


# -- tests of processes ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "fixtures", "expected"),
    [
        ("test_selection.py", [], True),  # imports subprocess
        ("train/test_resume.py", [], True),  # by its helper small_runs, which runs the loop
        ("parallel/test_gradient_sums.py", [], True),  # by parallel/sums.py, which reads a clock
        ("checkpoint/test_folders.py", [], True),  # by sample_state.py beside it, and its Saver
        ("plan/test_boxes.py", [], False),
        ("plan/test_boxes.py", ["tmp_path", "workers"], True),
    ],
)
def test_tests_of_processes_are_found_by_what_they_import_and_ask_for(file, fixtures, expected):
    assert is_of_processes(TESTS / file, fixtures) is expected


# -- nothing of other tests --------------------------------------------------------------


@pytest.mark.parametrize("time", ["first", "second"])
def test_random_numbers_are_the_same_in_every_test(time):
    fresh = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=fresh))


def test_cases_of_properties_are_the_same_whatever_is_loaded_and_however_slow():
    used = settings()
    assert used.derandomize and used.deadline is None
    assert HealthCheck.too_slow in used.suppress_health_check
    assert len(providers._get_local_constants()) == 0


def fail(transport):
    raise ZeroDivisionError("on purpose")


def rank(transport):
    return transport.rank


@pytest.mark.slow
def test_workers_of_which_one_failed_are_started_anew(workers):
    """All later tests failed with the first."""
    with pytest.raises(WorkerError, match="on purpose"):
        workers.run(fail, ranks=2)
    assert workers.run(rank, ranks=4) == [0, 1, 2, 3]
