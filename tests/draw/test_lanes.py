"""Lanes of boxes: round numbers on the axis, and everything to scale and in its place."""

import pytest
from drawn_svg import numbers, outside, read
from hypothesis import given
from hypothesis import strategies as st

from howdah.draw.lanes import Box, Chart, Drawing, Lane, Note, draw_lanes, ticks


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (80, [0, 10, 20, 30, 40, 50, 60, 70, 80]),
        (38.5, [0, 5, 10, 15, 20, 25, 30, 35]),
        (0.6, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_round_numbers(most, expected):
    assert ticks(most) == pytest.approx(expected)


@given(st.floats(1e-6, 1e18))
def test_a_handful_of_even_steps(most):
    found = ticks(most)
    assert 7 <= len(found) <= 16
    assert found[0] == 0 and most * 0.85 < found[-1] <= most * (1 + 1e-6)


# -- drawings ----------------------------------------------------------------------

FIRST = [Box(0, 4, "#111111", "a", "12"), Box(4, 5, "#222222", "b", "3")]
LANES = [
    Lane("one", FIRST, [Box(1, 3, "#333333", "c")], [Note(40, "beside")], group="x"),
    Lane("two", [Box(0, 0, "#444444", "d")]),
    Lane("three", [Box(0, 10, "#555555", "e", "4")], group="y"),
]
CHART = Chart(LANES, 10, "seconds", headers=[Note(40, "above")], mark=8)
DRAWING = Drawing("title", "figures", [CHART], [("ab", ["#111111", "#222222"])], "note")


def draw(*drawings):
    return draw_lanes(*drawings, width=1000, right=100)


def test_boxes_are_to_scale_with_a_gap_behind():
    boxes = read(draw(DRAWING)).boxes
    ((left, width),) = (numbers(boxes[hint], "x", "width") for hint in "a")
    assert width == 400 - 1
    assert numbers(boxes["b"], "x", "width") == [left + 400, 100 - 1]
    assert numbers(boxes["c"], "x", "width") == [left + 100, 200 - 1]
    assert numbers(boxes["d"], "width") == [0.5]  # nothing is invisible


def test_a_strip_is_below_the_boxes_of_its_lane():
    boxes = read(draw(DRAWING)).boxes
    above, strip, below = (numbers(boxes[hint], "y", "height") for hint in "acd")
    assert sum(above) < strip[0] < sum(strip) < below[0]
    assert strip[1] < above[1] / 4


def test_groups_are_apart_and_named_once():
    drawn = read(draw(DRAWING))
    (one, two, three) = (numbers(drawn.boxes[hint], "y")[0] for hint in "ade")
    assert three - two > two - one
    assert [text for text in drawn.texts if text in ("x", "y")] == ["x", "y"]


def test_everything_beside_the_boxes():
    drawn = read(draw(DRAWING))
    assert {"title", "figures", "above", "beside", "8 s", "ab", "note"} <= set(drawn.texts)
    assert {"0", "1 s", "9 s", "10 s"} <= set(drawn.texts)
    (left,) = numbers(drawn.boxes["a"], "x")
    (mark,) = (line for line in drawn.all("line") if line.get("stroke-width") == "2")
    assert numbers(mark, "x1") == [left + 800]
    swatches = [rect.get("fill") for rect in drawn.all("rect") if rect.get("width") == "14"]
    assert swatches == ["#111111", "#222222"]


def test_a_label_is_as_small_as_the_longest_needs_or_left_out():
    def size_of(label, width):
        boxes = [Box(0, width, "#111111", "a", label), Box(width, width, "#111111", "b", "1234")]
        drawn = read(draw(DRAWING._replace(charts=[Chart([Lane("one", boxes)], 1000, "bytes")])))
        return [numbers(text, "font-size")[0] for text in drawn.all("text") if text.text == label]

    assert size_of("1", 100) == [12]
    assert size_of("1", 22) == [pytest.approx((22 - 2) / 4 / 0.62, abs=0.01)]
    assert size_of("1", 12) == []


def test_drawings_are_one_below_the_other():
    longer = Chart([Lane("a longer name", [Box(0, 10, "#666666", "f")])], 10, "seconds")
    both = read(draw(DRAWING, DRAWING._replace(charts=[longer, longer])))
    (x, y), (same, below) = (numbers(both.boxes[hint], "x", "y") for hint in "ef")
    assert (x, both.texts.count("title")) == (same, 2)
    assert y < below < numbers(both.root, "height")[0]


def test_a_drawing_without_charts_is_its_head():
    drawn = read(draw(Drawing("title", "figures", [], [])))
    assert (drawn.texts, drawn.all("line")) == (["title", "figures"], [])


@given(st.integers(1, 60), st.text("abc 0", max_size=30), st.floats(1e-9, 1e15))
def test_nothing_leaves_the_page(count, name, most):
    lanes = [Lane(name, [Box(0, most, "#111111", "a", name)], group=name)] * count
    assert outside(draw(Drawing("", "", [Chart(lanes, most, "bytes")] * 2, []))) == []
