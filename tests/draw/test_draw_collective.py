"""The pictures of algorithms: what stands in their files and in the lecture, and as SVG."""

from importlib import import_module
from itertools import pairwise
from pathlib import Path
from textwrap import indent

import pytest
from drawn_svg import numbers, outside, read

from howdah.collectives.registry import ALGORITHMS, build
from howdah.collectives.walk import walk
from howdah.draw.collective import draw
from howdah.draw.collective_svg import draw_svg

PAGE = (Path(__file__).parents[2] / "docs" / "collectives.md").read_text("utf-8")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_picture_stands_in_the_file_and_in_the_lecture(name):
    drawn = draw(ALGORITHMS[name].drawn())
    file = import_module(ALGORITHMS[name].make.__module__).__doc__
    assert indent(drawn, "    ") in file
    assert f"```\n{drawn}\n```" in PAGE
    assert drawn.startswith(f"{name}: ")


def test_the_ring_as_the_lecture_draws_it():
    """Checked by eye: sums go round from rank to rank, then the results."""
    assert draw(build("ring", 3)) == (
        "all_reduce/ring: 3 ranks, 3 chunks, 4 rounds, each rank sends 4/3 vectors\n"
        "        1       2       3       4\n"
        "rank 0  2>1 +1  1>1 +0  0>1 =2  2>1 =1\n"
        "rank 1  0>2 +2  2>2 +1  1>2 =0  0>2 =2\n"
        "rank 2  1>0 +0  0>0 +2  2>0 =1  1>0 =0\n"
        "2>1: chunk to rank 1, +: added to what is there, =: kept"
    )


def test_other_buffers_are_named():
    assert draw(build("butterfly", 2)).splitlines()[2:] == [
        "rank 0  0>1 =0w +0<w",
        "rank 1  0>0 =0w +0<w",
        "0>1: chunk to rank 1, +: added to what is there, =: kept, <: from its own buffer, "
        "w: buffer work",
    ]


def test_the_volume_is_that_of_the_formulas():
    def title(name, ranks):
        return draw(build(name, ranks)).splitlines()[0].split(", ", 3)[3]

    assert title("broadcast/binomial", 8) == "a rank sends 0 to 3 vectors"
    assert title("all_to_all/pairwise", 4) == "each rank sends 3/4 of the vector"
    assert title("mesh", 3) == "a rank sends 1 to 2 vectors"


def test_one_rank_has_nothing_to_do():
    assert draw(build("ring", 1)) == (
        "all_reduce/ring: 1 rank, 1 chunk, 0 rounds, each rank sends 0 of the vector"
    )
    assert outside(draw_svg(build("ring", 1))) == []


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_svg_has_an_arrow_for_each_message(name):
    """Arrows go from round to round, down or up to the rank that receives."""
    program = ALGORITHMS[name].drawn()
    drawn, order = read(draw_svg(program)), walk(program)
    arrows = [line for line in drawn.all("line") if line.get("stroke-width") == "2"]
    assert len(arrows) == len(order.sent) == len(drawn.all("circle"))
    ranks = sorted({float(line.get("y1")) for line in drawn.all("line")})
    assert len(ranks) == program.ranks
    for line, message in zip(arrows, order.sent, strict=True):
        x1, x2, y1, y2 = numbers(line, "x1", "x2", "y1", "y2")
        assert x1 < x2
        assert (ranks.index(y1), ranks.index(y2)) == (message.source, message.target)
    starts = [numbers(line, "x1")[0] for line in arrows]
    for (x, one), (y, two) in pairwise(zip(starts, order.sent, strict=True)):
        assert (x < y) == (one.round < two.round)
    wide, high = numbers(drawn.root, "width", "height")
    assert max(starts) < wide and max(ranks) < high


def test_the_svg_tells_what_is_added():
    drawn = read(draw_svg(build("ring", 2)))
    titles = [title.text for title in drawn.root.iter("{http://www.w3.org/2000/svg}title")]
    assert "rank 0 sends 1 to rank 1, which adds it" in titles
    assert "rank 0 sends 0 to rank 1, which keeps it" in titles
    dashed = [line for line in drawn.all("line") if line.get("stroke-dasharray")]
    assert len(dashed) == 2  # the all-gather
    assert all("keeps" in "".join(line.itertext()) for line in dashed)
