"""The spelling of layouts: parsing reverses printing, and what is misspelt is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.plan.layout import WORDS, Layout, parse_layout, resolve
from howdah.plan.problems import BadInput

numbers = st.none() | st.integers(1, 100_000)
layouts = st.builds(Layout, dp=numbers, micros=numbers)


@given(layouts)
def test_parsing_reverses_printing(layout):
    assert parse_layout(str(layout)) == layout


@given(layouts)
def test_the_order_of_words_and_the_spaces_do_not_matter(layout):
    backwards = "   ".join(reversed(str(layout).split()))
    assert parse_layout(f" {backwards}\n") == layout


@pytest.mark.parametrize(
    ("text", "layout", "printed"),
    [
        ("single", Layout(), "single"),
        ("dp1", Layout(), "single"),
        ("", Layout(), "single"),
        ("dp2 x4", Layout(2, 4), "dp2 x4"),
        ("x4 dp2", Layout(2, 4), "dp2 x4"),
        ("dp*", Layout(None), "dp*"),
        ("dp* x1", Layout(None, 1), "dp* x1"),
        ("dp02", Layout(2), "dp2"),
    ],
)
def test_spellings(text, layout, printed):
    assert parse_layout(text) == layout
    assert str(layout) == printed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("elephant7", "layout 'elephant7': unknown word 'elephant7'; known are: dp, single, x"),
        ("ddp2", "layout 'ddp2': unknown word 'ddp2'; did you mean 'dp'?"),
        ("singel x2", "layout 'singel x2': unknown word 'singel'; did you mean 'single'?"),
        ("dp", "layout 'dp': 'dp' needs a number: replicas (dp2, or dp* for the rest)"),
        ("x dp2", "layout 'x dp2': 'x' needs a number: micro-batches per step (x4)"),
        ("dp2 dp2", "layout 'dp2 dp2': 'dp2' says dp a second time; say it once"),
        ("single dp2", "layout 'single dp2': 'dp2' says dp a second time; say it once"),
        ("x*", "layout 'x*': only dp can be '*'; give x a number"),
        ("dp0", "layout: dp0 must be at least dp1"),
        ("dp2 x0", "layout: x0 must be at least x1"),
    ],
)
def test_a_misspelt_layout_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(BadInput) as caught:
        parse_layout(text)
    assert str(caught.value) == sentence


@given(st.text(max_size=12))
def test_no_text_at_all_gives_a_traceback(text):
    try:
        layout = parse_layout(text)
    except BadInput as problem:
        assert "\n" not in str(problem)
    else:
        assert parse_layout(str(layout)) == layout


def test_every_word_is_explained():
    assert all(WORDS.values())
    assert all(f"{word}3" in str(parse_layout(f"{word}3")) for word in WORDS)


# -- resolving -----------------------------------------------------------------


def test_the_world_fills_in_the_star():
    assert resolve(parse_layout("dp* x4"), 6) == Layout(6, 4)
    assert resolve(parse_layout("dp*"), 1) == Layout(1)


def test_a_layout_that_fits_the_world_is_kept():
    assert resolve(Layout(3, 2), 3) == Layout(3, 2)
    assert resolve(Layout(3, 2), None) == Layout(3, 2)


def test_a_layout_that_does_not_fit_is_refused_with_both_numbers():
    with pytest.raises(BadInput) as caught:
        resolve(Layout(3), 4)
    assert str(caught.value) == (
        "layout 'dp3' needs 3 processes but there are 4; use dp4 or dp*, or start 3 processes"
    )


def test_a_star_without_a_world_is_refused():
    with pytest.raises(BadInput, match=r"'dp\*' takes the number of processes from torchrun"):
        resolve(Layout(None), None)
    with pytest.raises(ValueError, match="until it is resolved"):
        _ = Layout(None).world


def test_the_world_of_a_layout_is_its_number_of_ranks():
    assert Layout(4, 2).world == 4
