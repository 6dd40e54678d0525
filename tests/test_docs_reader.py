"""The reader of pages: what is compared with what is printed, and how."""

import os

import pytest
from test_docs import PAGES, ROOT, Block, missing, page_name, reader_of


def lost(shown, printed, mark=""):
    """The first line of a block with one command that is not printed; None when all are."""
    pattern = reader_of(Block("console", mark, "\n".join(["$ a", *shown])))
    return missing([(text, pattern(text)) for text in shown], printed)


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step  0.0093 s measured: +0.9%", "step  10.2 s measured: -7.7%"),
        ("loss: 1.5 (2%)", "loss:  0.25 (13%)"),
        ("1.9e-06 what", "   0.0e+00  what"),
        ("mfu: 1.97%  ...", "mfu: 13%  loss: 2"),
        ("tps: 10,046 of 3", "tps: 846 of 3"),
        ("12 Gflop/s on 2 ranks", "1,024 Gflop/s on 2 ranks"),
    ],
)
def test_measured_numbers_are_any_numbers(shown, printed):
    assert lost([shown], [printed], "measured") is None
    assert lost([shown], [printed]) == shown


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("step: 20  loss: 1.5", "step: 21  loss: 1.5"),  # a whole number counts something
        ("1.5 s in 3 steps", "1.5 s in 4 steps"),
        ("1.5 MB", "1.5 GB"),
        ("loss 1.5", "lost 1.5"),
        ("gzip -9 1.233", "gzip 9 1.233"),
        ("1.5%", "nan%"),
        ("a 1.5", "a1.5"),
        ("equal", "equal: NOT"),
    ],
)
def test_what_was_not_measured_differs_by_nothing(shown, printed):
    assert lost([shown], [printed], "measured") == shown


def test_only_the_lines_that_are_named_were_measured():
    shown, mark = ["step: 1.5", "sent 1.5 MB"], "measured: step:"
    assert lost(shown, ["step: 2.5", "sent 1.5 MB"], mark) is None
    assert lost(shown, ["step: 2.5", "sent 2.5 MB"], mark) == "sent 1.5 MB"
    for wrong in ("measured: steps", "exact"):
        with pytest.raises(AssertionError, match="no "):
            lost(shown, shown, wrong)


def test_lines_are_found_in_order_and_with_their_spaces():
    assert lost(["b", "a"], ["a", "b"]) == "a"
    assert lost(["a", "b"], ["a", "x", "b"]) is None
    assert lost(["  a 1 ... c"], ["  a 1 b c"]) is None
    assert lost(["a 1"], ["a 2"]) == "a 1"
    assert lost(["a 1"], [" a 1"]) == "a 1"


def test_pages_were_found():
    assert {"README.md", "docs/tour.md", "docs/forms/data.md"} <= set(map(page_name, PAGES))
    assert os.access(ROOT / "recipes" / "laptop.toml", os.R_OK)
