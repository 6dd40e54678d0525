"""`make steady`: it names what failed, goes on where it stopped, and leaves nothing running."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "steady" / "run.py"

PROJECT = '[tool.pytest.ini_options]\nmarkers = ["slow: so", "processes: and so"]\n'
TESTS = """
import pytest

@pytest.mark.processes
def test_right():
    pass

@pytest.mark.parametrize("n", [1, 2])
def test_wrong_for_2(n):
    assert n == 1, "two is wrong"
"""


@pytest.fixture
def run(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("steady_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "steady_run", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(run, tmp_path, monkeypatch):
    """A repository with a small suite, in which the script works."""
    root = tmp_path / "checkout"
    (root / "bench").mkdir(parents=True)
    files = {"pyproject.toml": PROJECT, "test_small.py": TESTS, ".gitignore": "build/\n"}
    for name, text in files.items():
        (root / name).write_text(text)
    name = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*name, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which takes a second each time
    monkeypatch.setattr(run, "LOOPS", 1)
    monkeypatch.setattr(run, "ROOT", root)
    monkeypatch.setattr(run, "RESULTS", root / "bench" / "results.md")
    monkeypatch.setattr(run, "KEPT", root / "build" / "steady")
    return root


def test_what_failed_is_named_and_its_output_stays(run, checkout, tmp_path):
    outcome = run.play(run.Round("suite", 1, 3), checkout, tmp_path)
    assert (outcome.tests, outcome.failed) == (3, ["test_small.py::test_wrong_for_2[2]"])
    assert "two is wrong" in (tmp_path / "suite-beside-1-loops-3.txt").read_text()
    outcome = run.play(run.Round("processes", 0, 1), checkout, tmp_path)
    assert (outcome.tests, outcome.wrong) == (1, [])
    assert not (tmp_path / "processes-quiet-1.txt").exists()


def test_a_session_that_breaks_off_is_a_failure(run, checkout, tmp_path):
    (checkout / "test_small.py").write_text("import os\ndef test_end():\n    os._exit(7)\n")
    outcome = run.play(run.Round("suite", 0, 1), checkout, tmp_path)
    assert outcome.tests == 0
    (broke,) = outcome.wrong
    assert broke.startswith("(ended with 7 after test_small.py::test_end")


@pytest.mark.slow
def test_a_run_goes_on_where_it_was_stopped(run, checkout, monkeypatch, capsys):
    def main(*words):
        monkeypatch.setattr(sys, "argv", ["run.py", *words])
        code = run.main()
        return code, [line for line in capsys.readouterr().out.splitlines() if line.endswith("...")]

    quiet, busy = "processes quiet 1 ...", "processes beside 1 loops 1 ..."
    assert main("--rounds", "1", "--suites", "0") == (0, [quiet, busy])
    assert main("--rounds", "1", "--suites", "0") == (0, [])
    results = (checkout / "bench" / "results.md").read_text()
    assert "| processes | quiet | 1 | 1 | 0 |" in results and "Nothing failed." in results

    (checkout / "test_small.py").write_text(TESTS.replace("pass", "assert not 'right'"))
    assert main("--rounds", "1", "--only", "processes") == (0, [])  # at any commit
    assert main("--rounds", "1", "--only", "processes", "--anew") == (1, [quiet, busy])
    results = (checkout / "bench" / "results.md").read_text()
    assert re.search(
        r"- processes quiet 1, \w{12} with changes .*: `test_small.py::test_right`", results
    )
    again = quiet.replace("1 ...", "2 ..."), busy.replace("loops 1 ...", "loops 2 ...")
    assert main("--rounds", "2", "--only", "processes") == (1, [*again])
    results = (checkout / "bench" / "results.md").read_text()
    assert "| processes | quiet | 2 | 2 | 2 |" in results


def test_loops_end_with_what_they_stand_beside(run):
    with run.busy(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert [loop.returncode for loop in loops] == [-9, -9]


def test_loops_end_when_the_script_is_killed(run):
    """Their output is this test's pipe: it ends with the last of them."""
    code = (
        "import os, subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())])\n"
        "os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, run.LOOP]
    assert subprocess.run(command, capture_output=True, check=False).returncode == -9
