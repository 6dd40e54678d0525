"""The SVG of a pipeline: every computation is a box in its place, and nothing leaves the page.

How it looks is judged by eye; what it says is tested here.
"""

import pytest
from drawn_svg import numbers, outside, read

from howdah.draw.schedule_svg import COLORS, STRIPS, draw_svg
from howdah.plan.schedule.lowering import lower
from howdah.plan.schedule.registry import build
from howdah.sim.timeline import Timeline, simulate


@pytest.mark.parametrize(
    ("name", "ranks", "micros"), [("1f1b", 4, 8), ("zb-v", 3, 6), ("1f1b", 16, 64)]
)
def test_every_computation_is_a_box_to_scale(name, ranks, micros):
    timeline = simulate(build(name, ranks=ranks, micros=micros))
    _, hinted, texts = read(draw_svg(timeline))
    assert len(hinted) == sum(map(len, timeline.spans))
    left, _ = numbers(hinted["0F0: 0 to 1 s"], "x", "width")
    for rank, found in enumerate(timeline.spans):
        assert f"rank {rank}" in texts
        lanes = set()
        for (_, action, *_), start, end in found:
            x, y, width = numbers(hinted[f"{action}: {start:g} to {end:g} s"], "x", "y", "width")
            assert x == pytest.approx(left + start * 1180 / timeline.makespan, abs=0.01)
            assert 0.79 <= width * timeline.makespan / 1180 / (end - start) <= 1
            lanes.add(y)
        assert len(lanes) == 1


@pytest.mark.parametrize(("ranks", "micros"), [(1, 1), (2, 3), (40, 3)])
def test_nothing_leaves_the_page(ranks, micros):
    assert outside(draw_svg(simulate(build("gpipe", ranks=ranks, micros=micros)))) == []


def test_kinds_have_colors_and_a_legend():
    _, hinted, texts = read(draw_svg(simulate(build("zb-h1", ranks=2, micros=2))))
    assert {rect.get("fill") for rect in hinted.values()} == {COLORS[kind] for kind in "FIW"}
    assert {"forward", "backward: input", "backward: weights"} <= set(texts)
    assert "update" not in texts


def test_later_stages_are_lighter():
    _, hinted, texts = read(draw_svg(simulate(build("interleaved", ranks=2, micros=2, virtual=3))))
    shades = {rect.get("fill") for text, rect in hinted.items() if "F" in text}
    assert len(shades) == 3
    assert COLORS["F"] in shades
    assert "lighter: later stages of a rank" in texts


def test_numbers_stand_in_all_boxes_or_in_none():
    """A number where it happens to have one digit, and none beside it, would mislead."""

    def zeros(micros):
        return read(draw_svg(simulate(build("1f1b", ranks=16, micros=micros)))).texts.count("0")

    on_axis = 1
    assert zeros(8) == on_axis + 2 * 16
    assert zeros(64) == on_axis


def test_collectives_are_strips():
    lowered = lower(build("1f1b", ranks=2, micros=2), tied=(0, 1))
    timeline = simulate(lowered, transfer=lambda instruction: 0.5)
    _, hinted, texts = read(draw_svg(timeline))
    fills = {rect.get("fill") for rect in hinted.values()}
    assert set(STRIPS.values()) <= fills
    assert {"reduce", "tie"} <= set(texts)
    (reduce,) = (rect for hint, rect in hinted.items() if hint.startswith("reduce 0B1:"))
    compute = hinted["0F0: 0 to 1 s"]
    (top, height), (strip,) = numbers(compute, "y", "height"), numbers(reduce, "y")
    assert strip >= top + height


def test_a_name_may_be_anything():
    schedule = build("gpipe", ranks=1, micros=1)._replace(name='<a & "b">')
    _, _, texts = read(draw_svg(simulate(schedule)))
    assert texts[0] == '<a & "b">: 1 rank, 1 micro-batch'


def test_an_empty_timeline():
    _, hinted, _ = read(draw_svg(Timeline(build("gpipe", ranks=1, micros=1), ((),))))
    assert hinted == {}
