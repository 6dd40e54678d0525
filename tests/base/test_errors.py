"""Sentences stay sentences, whatever they quote."""

import pytest

from howdah.base.errors import brief, named, nearest, several, shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("dp2", "'dp2'"),
        (7, "7"),
        ("x" * 1000, "'" + "x" * 57 + "...'"),
        ("a\nb\x1b", "'a\\nb\\x1b'"),
        ([1, 2], "[1, 2]"),
        ([1] * 1000, "[" + "1, " * 18 + "1,..."),
        ([10**5000], "list that is too long to show"),
    ],
)
def test_a_value_is_shown_on_one_short_line(value, text):
    assert shown(value) == text


def test_what_is_nested_deep_is_shown_too():
    value = []
    for _ in range(100_000):
        value = [value]
    assert shown(value) == "list that is too long to show"


def test_a_path_is_shown_as_it_is_unless_it_breaks_the_sentence():
    assert named("runs/é") == "runs/é"
    assert named("a\nb") == "'a\\nb'"
    assert len(named("x" * 4000)) < 80


def test_of_many_problems_the_first_are_told():
    assert several(["a", "b"]) == "a; b"
    assert several([f"p{n}" for n in range(100)]).endswith("p11; and 88 more")


def test_what_a_library_says_is_cut():
    assert brief(ValueError("no good.\nline two")) == "no good"
    assert len(brief(ValueError("x" * 5000))) < 80


def test_names_of_a_file_are_cut_too():
    assert nearest("a", ["x" * 5000, "b\nc"]) == f"; known are: 'b\\nc', {'x' * 57}..."
    assert nearest("x" * 50_000, ["seed"]) == "; known are: seed"
