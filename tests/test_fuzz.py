"""The short form of bench/chaos/fuzz.py: a few inputs of each kind, always the same."""

import sys
from pathlib import Path

import pytest

from howdah.base.errors import UserError

sys.path.insert(0, str(Path(__file__).parents[1] / "bench" / "chaos"))

import fuzz

INPUTS = 150


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_every_input_is_answered_or_refused_in_a_sentence(kind, tmp_path):
    with fuzz.limits():
        row = fuzz.run(kind, range(INPUTS), tmp_path)
    assert row.failures == []
    assert (row.asked, row.failed) == (INPUTS, 0)
    assert row.answered and row.refused  # neither all sound nor all refused at the first look


def test_the_same_seed_is_the_same_input(tmp_path):
    first, again = (fuzz.run("layout", range(30), tmp_path) for _ in range(2))
    assert (first.answered, first.refused) == (again.answered, again.refused)


def fail(_, __):
    raise TypeError("one of Python's")


def speak(_, __):
    raise UserError("two\nlines")


def hold(_, __):
    bytearray(fuzz.MEMORY * 2)


def run_on(_, __):
    while True:
        pass


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (fail, "TypeError: one of Python's (test_fuzz.py)"),
        (speak, "a sentence of 9 characters: 'two\\nlines'"),
        (hold, "MemoryError:  (test_fuzz.py)"),
        (run_on, "more than 0.01 s"),
    ],
)
def test_what_fails_is_told_with_its_seed(monkeypatch, tmp_path, ask, why):
    monkeypatch.setitem(fuzz.KINDS, "made up", ask)
    monkeypatch.setattr(fuzz, "SECONDS", 0.01 if ask is run_on else 5)
    with fuzz.limits():
        row = fuzz.run("made up", range(7, 8), tmp_path)
    assert row.failures == [f"--kind made up --seed 7: {why}"]
    assert fuzz.table([row]).splitlines()[1].split()[:6] == ["made", "up", "1", "0", "0", "1"]
