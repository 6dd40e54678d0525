"""The mesh as text and as SVG: golden drawings, and every rank once, in its node and stage."""

import re
from collections import defaultdict
from itertools import pairwise

import pytest
from drawn_svg import SVG, numbers, outside, read
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_plans import plans

from howdah.draw.mesh import axes, draw_mesh, groups, listed, reach, some
from howdah.draw.mesh_svg import draw_mesh_svg
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.mesh_axes import Stride, axis
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.presets import preset


def plan_of(name, layout, sequence=512):
    return make_plan(
        preset(name),
        parse_layout(layout),
        Batch(micro_batch=1),
        sequence=sequence,
        method=Method(precision="bf16"),
    )


GOLDEN = [
    (
        ("llama3-8b", "pp2 dp4 tp2 zero1 sp x8", 8),
        """
pp2 dp4 tp2 zero1 sp 1f1b x8: 16 ranks on 2 nodes of 8

stage 0  embedding, layers.0 to 16
  node 0   0  1 |  2  3 |  4  5 |  6  7
stage 1  layers.17 to 31, head
  node 1   8  9 | 10 11 | 12 13 | 14 15

tp  parts of each matrix  8 groups of 2  inside a node  0 1 | 2 3 | …
dp  replicas              4 groups of 4  inside a node  0 2 4 6 | 1 3 5 7 | …
pp  stages                8 groups of 2  over 2 nodes   0 8 | 1 9 | …
""",
    ),
    # an encoder-decoder, two stages on each rank, and a node that three pipeline ranks share
    (
        ("t5-base", "pp4 dp2 interleaved v2 x8", 6),
        """
pp4 dp2 interleaved v2 x8: 8 ranks on 2 nodes of 6

stages 0 4  embedding, encoder.0 to 3; layers.3 to 5
  node 0  0 | 1
stages 1 5  encoder.4 to 7; layers.6 to 8
  node 0  2 | 3
stages 2 6  encoder.8 to 11; layers.9 to 11
  node 0  4 | 5
stages 3 7  target, layers.0 to 2; head
  node 1  6 | 7

dp  replicas  4 groups of 2  inside a node  0 1 | 2 3 | …
pp  stages    2 groups of 4  over 2 nodes   0 2 4 6 | 1 3 5 7
""",
    ),
    # nodes that cut through a stage, a replica and a sequence
    (
        ("llama3-8b", "pp2 dp2 cp2 tp2 x8", 6),
        """
pp2 dp2 cp2 tp2 1f1b x8: 16 ranks on 3 nodes of 6

stage 0  embedding, layers.0 to 16
  node 0   0  1 :  2  3 |  4  5
  node 1   6  7
stage 1  layers.17 to 31, head
  node 1   8  9 : 10 11
  node 2  12 13 : 14 15

tp  parts of each matrix    8 groups of 2  inside a node  0 1 | 2 3 | …
cp  parts of each sequence  8 groups of 2  over 2 nodes   0 2 | 1 3 | …
dp  replicas                8 groups of 2  over 2 nodes   0 4 | 1 5 | …
pp  stages                  8 groups of 2  over 2 nodes   0 8 | 1 9 | …
""",
    ),
    # experts and copies of the states; a node of more ranks than a line
    (
        ("mixtral-8x7b", "dp24 ep8 zero2 shard4", 72),
        """
dp24 ep8 zero2 shard4 x1: 24 ranks on a node of 72

stage 0  embedding, layers.0 to 31, head
  node 0   0 |  1 |  2 |  3 |  4 |  5 |  6 |  7 |  8 |  9 | 10 | 11 | 12 | 13 | 14 | 15
          16 | 17 | 18 | 19 | 20 | 21 | 22 | 23

dp     replicas                1 group of 24  inside a node  0 1 2 … 23
ep     experts                 3 groups of 8  inside a node  0 1 2 … 7 | 8 9 10 … 15 | …
shard  one copy of the states  6 groups of 4  inside a node  0 1 2 3 | 4 5 6 7 | …
""",
    ),
    (
        ("llama3-405b", "pp16 dp128 tp8 sp zero2 x16", 8),
        """
pp16 dp128 tp8 zero2 sp 1f1b x16: 16384 ranks on 2048 nodes of 8

stage 0  embedding, layers.0 to 6
  node 0         0     1     2     3     4     5     6     7
  node 1         8     9    10    11    12    13    14    15
  … 125 nodes more
  node 127    1016  1017  1018  1019  1020  1021  1022  1023
stage 1  layers.7 to 14
  node 128    1024  1025  1026  1027  1028  1029  1030  1031
  node 129    1032  1033  1034  1035  1036  1037  1038  1039
  … 125 nodes more
  node 255    2040  2041  2042  2043  2044  2045  2046  2047
… 13 stages more
stage 15  layers.119 to 125, head
  node 1920  15360 15361 15362 15363 15364 15365 15366 15367
  node 1921  15368 15369 15370 15371 15372 15373 15374 15375
  … 125 nodes more
  node 2047  16376 16377 16378 16379 16380 16381 16382 16383

tp  parts of each matrix  2048 groups of 8   inside a node   0 1 2 … 7 | 8 9 10 … 15 | …
dp  replicas              128 groups of 128  over 128 nodes  0 8 16 … 1016 | 1 9 17 … 1017 | …
pp  stages                1024 groups of 16  over 16 nodes   0 1024 2048 … 15360 | \
1 1025 2049 … 15361 | …
""",
    ),
    (
        ("gpt2-124m", "single", 1),
        """
single x1: 1 rank on a node of 1

stage 0  embedding, layers.0 to 11, head
  node 0  0
""",
    ),
]


@pytest.mark.parametrize(("what", "drawing"), GOLDEN)
def test_golden(what, drawing):
    name, layout, per_node = what
    assert draw_mesh(plan_of(name, layout), per_node) == drawing.strip()


@settings(max_examples=60)
@given(plans(), st.integers(1, 9))
def test_every_rank_stands_once_in_its_node_and_stage(plan, per_node):
    blocks = draw_mesh(plan, per_node).split("\n\n")
    assume(" more" not in blocks[1])  # of very many ranks, some are left out
    pp, seen, node, place = axis(plan.layout, "pp"), [], None, -1
    for line in blocks[1].splitlines():
        if line.startswith("stage"):
            place += 1
            continue
        name, ranks = re.fullmatch(r"(?:  node (\d+))? +([\d |:]+)", line).groups()
        node = int(name) if name else node
        for rank in map(int, re.findall(r"\d+", ranks)):
            assert (rank // per_node, pp.index_of(rank)) == (node, place)
            seen.append(rank)
    assert seen == list(range(plan.layout.world))


@settings(max_examples=25)
@given(plans(), st.integers(1, 9))
def test_groups_of_an_axis_share_out_the_ranks(plan, per_node):
    world = plan.layout.world
    for stride in axes(plan.layout).values():
        found = list(groups(stride, world))
        assert sorted(rank for group in found for rank in group) == list(range(world))
        apart = any(rank // per_node != group[0] // per_node for group in found for rank in group)
        assert reach(stride, world, per_node).startswith("over" if apart else "inside")


def test_a_group_reaches_as_many_nodes_as_the_widest_of_them():
    assert reach(Stride(3, 1), 12, 4) == "over 2 nodes"  # 0 1 2 is inside, 3 4 5 is not
    assert reach(Stride(3, 4), 12, 4) == "over 3 nodes"


def test_what_is_left_out_of_a_long_list():
    assert listed(range(4)) == "0 1 2 3"
    assert listed(range(0, 50, 10)) == "0 10 20 … 40"
    assert some("abcdef", 3) == ["a", "b", None, "f"]


# -- as SVG ----------------------------------------------------------------------


def ranks_of(drawing):
    """The boxes of each rank: of the large copy first, then one for each axis."""
    found = defaultdict(list)
    for rect in read(drawing).all("rect"):
        title = rect.find(f"{SVG}title")
        if title is not None:
            found[int(title.text.removeprefix("rank ").partition(":")[0])].append(rect)
    return found


CASES = [
    ("llama3-8b", "pp2 dp2 cp2 tp2 x8", 6),
    ("mixtral-8x7b", "dp24 ep8 zero2 shard4", 72),
    ("llama3-8b", "pp4 tp8 x8", 8),
    ("gpt2-124m", "single", 1),
]


@pytest.mark.parametrize(("name", "layout", "per_node"), CASES)
def test_ranks_have_one_color_where_they_are_one_group(name, layout, per_node):
    plan = plan_of(name, layout)
    found = ranks_of(draw_mesh_svg(plan, per_node))
    assert sorted(found) == list(range(plan.layout.world))
    for copy, stride in enumerate(axes(plan.layout).values(), start=1):
        by_color = defaultdict(set)
        for rank, boxes in found.items():
            by_color[boxes[copy].get("fill")].add(rank)
        expected = {frozenset(group) for group in groups(stride, plan.layout.world)}
        assert {frozenset(ranks) for ranks in by_color.values()} == expected


def test_a_rank_tells_its_groups():
    found = ranks_of(draw_mesh_svg(plan_of("llama3-8b", "pp2 dp4 tp2 x8"), 8))
    hint = found[11][0].find(f"{SVG}title").text
    assert hint == "rank 11: tp 10 11; dp 9 11 13 15; pp 3 11"


@pytest.mark.parametrize(
    ("name", "layout", "per_node"),
    [*CASES, ("llama3-405b", "pp16 dp128 tp8 x16", 8), ("gpt2-124m", "dp200", 1)],
)
def test_nothing_leaves_the_page_or_lies_on_another(name, layout, per_node):
    drawing = draw_mesh_svg(plan_of(name, layout), per_node)
    assert outside(drawing) == []
    boxes = [rect for each in ranks_of(drawing).values() for rect in each]
    places = sorted(tuple(numbers(rect, "y", "x", "width")) for rect in boxes)
    for (y, x, wide), (other, start, _) in pairwise(places):
        assert y != other or x + wide <= start
