"""bench/server: its parts run, and its page says what was measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/server"


def run(*words):
    """The lines of the benchmark, whose exit code is 0."""
    command = [sys.executable, str(BENCH / "run.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_is_of_the_results(monkeypatch):
    before = {*sys.modules}
    for path in (BENCH.parent, BENCH):
        monkeypatch.syspath_prepend(str(path))
    try:
        text = __import__("run").text_of(json.loads((BENCH / "results.json").read_text())["rows"])
    finally:
        for name in {*sys.modules} - before:
            if str(BENCH.parent) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
    assert (BENCH / "results.md").read_text().endswith(text + "\n")
    assert "| 8 B |" in text and "| asp |" in text


@pytest.mark.slow
@pytest.mark.parametrize("part", ["wire", "rules", "orders", "links"])
def test_each_part_runs_short_and_writes_nothing(part):
    before = (BENCH / "results.json").read_bytes()
    last = run("--tiny", "--only", part).splitlines()[-1]
    assert last.startswith(part)
    assert (BENCH / "results.json").read_bytes() == before
