"""The scripts of bench/backend: what they make of times and of torch's tests."""

import json
import sys
import unittest
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "bench" / "backend"


@pytest.fixture
def scripts(monkeypatch):
    """Imports modules of the folder, whose names others have too."""
    before = set(sys.modules)

    def load(*names):
        for path in (FOLDER.parent, FOLDER):
            monkeypatch.syspath_prepend(str(path))
        return [__import__(name) for name in names]

    yield load
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(FOLDER.parent):
            del sys.modules[name]


def test_times_are_judged_by_medians(scripts):
    (run,) = scripts("run")
    seconds = {"howdah": [0.002, 0.001, 0.009], "gloo": [0.006, 0.004, 0.008]}
    told = {"fsdp2 shared": {"seconds": seconds, "equal": True, "apart": 0.0}}
    rows = run.summary(told, run.GOALS)
    assert rows["fsdp2 shared"]["times"] == pytest.approx(3)
    (line,) = run.table(rows).splitlines()[2:]
    assert line == "| fsdp2 shared | 6 (4 to 8) | 2 (1 to 9) | 0 | 3.00 |  | 2.5 | met | yes |"


def test_a_goal_is_higher_where_gloo_is_bound_by_communication(scripts):
    (run,) = scripts("run")
    seconds = {"howdah": [0.005] * 3, "gloo": [0.006] * 3}
    for alone, link, goal, most in ((0.004, 0.0, 1.0, "1.50"), (0.003, 0.0045, 1.5, "1.33")):
        one = {
            "seconds": {**seconds, "alone": [alone] * 3},
            "equal": True,
            "apart": 0.0,
            "link": link,
        }
        rows = run.summary({"ddp": one}, run.GOALS)
        assert rows["ddp"]["goal"] == goal
        word = "met" if goal == 1 else "**missed**"
        assert (
            run.table(rows).splitlines()[-1].endswith(f"| 1.20 | {most} | {goal} | {word} | yes |")
        )


def test_outcomes_are_one_line_each(scripts, tmp_path):
    (script,) = scripts("distributed_test")

    class Made(unittest.TestCase):
        def test_a(self):
            pass

        def test_b(self):
            self.skipTest("no card")

        def test_c(self):
            raise ValueError("three")

    found = {name: script.outcome_of(Made(name)) for name in ("test_a", "test_b", "test_c")}
    assert list(found.values()) == ["passed", "skipped: no card", "failed: ValueError: three"]
    said = script.write(tmp_path / "results" / "a.json", "made", found)
    assert said == "made: 1 failed, 1 passed, 1 skipped"
    kept = json.loads((tmp_path / "results" / "a.json").read_text())
    assert (kept["counts"]["passed"], kept["outcomes"]) == (1, found)


@pytest.mark.parametrize("backend", ["howdah", "gloo"])
def test_the_page_has_the_counts_of_the_results(backend):
    kept = json.loads((FOLDER / "results" / f"distributed_test-{backend}.json").read_text())
    counts = [str(kept["counts"][word]) for word in ("passed", "failed", "skipped")]
    assert f"| {backend} | {' | '.join(counts)} |" in (FOLDER / "README.md").read_text("utf-8")
