"""Stages: against every way to cut a small model, and against published plans."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.plan.stages import (
    by_cost,
    even,
    looped,
    stages_of,
    v_shaped,
)
from howdah.shapes.part import Part


def cuts_into(length, stages):
    """Every way to cut range(length) into that many runs, none empty."""
    for inner in itertools.combinations(range(1, length), stages - 1):
        yield list(itertools.pairwise((0, *inner, length)))


def flat(stages):
    return tuple(part for stage in stages.parts for part in stage)


def sizes(stages):
    return [len(stage) for stage in stages.parts]


# -- which rank runs a stage ---------------------------------------------------


def test_the_pictures_of_where():
    assert looped(3, 2) == (0, 1, 2, 0, 1, 2)
    assert v_shaped(3) == (0, 1, 2, 2, 1, 0)


@given(ranks=st.integers(1, 9), virtual=st.integers(1, 4))
def test_looped_stages_go_round_and_v_shaped_ones_come_back(ranks, virtual):
    for rank in range(ranks):
        assert stages_of(looped(ranks, virtual), rank) == tuple(range(rank, ranks * virtual, ranks))
        assert stages_of(v_shaped(ranks), rank) == (rank, 2 * ranks - 1 - rank)


# -- evenly --------------------------------------------------------------------


def model(layers):
    return (Part("embedding"), *(Part("layers", n) for n in range(layers)), Part("head"))


@given(stages=st.integers(1, 20), more=st.integers(0, 60))
def test_even_stages_are_the_model_in_order_with_layers_that_differ_by_at_most_one(stages, more):
    parts = model(stages + more)
    found = even(parts, looped(stages))
    assert flat(found) == parts
    counts = [sum(part.startswith("layers.") for part in stage) for stage in found.parts]
    assert len(counts) == stages
    assert max(counts) - min(counts) <= 1
    assert min(counts) >= 1


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [
        (8, 4, [3, 2, 2, 3]),  # embedding and head come on top
        (9, 4, [3, 3, 2, 3]),
        (10, 4, [3, 3, 3, 3]),
        (11, 4, [4, 3, 3, 3]),  # of the ends, the one without the head
        (5, 2, [4, 3]),
        (3, 1, [5]),
    ],
)
def test_the_middle_gets_the_layers_that_do_not_divide(layers, stages, counts):
    assert sizes(even(model(layers), looped(stages))) == counts


def test_the_layers_of_both_stacks_count():
    encoder, layers = ([Part(stack, n) for n in (0, 1)] for stack in ("encoder", "layers"))
    parts = (Part("embedding"), *encoder, Part("target"), *layers, Part("head"))
    assert even(parts, looped(2)).parts == (parts[:3], parts[3:])
    assert even(parts, looped(3)).parts == (parts[:2], parts[2:5], parts[5:])


# -- by cost -------------------------------------------------------------------

costs = st.lists(st.integers(0, 9) | st.floats(0, 9), min_size=1, max_size=9)


@given(costs, st.data())
def test_no_cut_has_a_cheaper_costliest_stage_or_is_more_even_or_starts_later(costs, data):
    """All of them, in exact numbers: the costliest stage, squares, and boundaries from the back."""
    stages = data.draw(st.integers(1, len(costs)))
    exact = [Fraction(cost) for cost in costs]

    def rank(cut):
        sums = [sum(exact[start:stop]) for start, stop in cut]
        return max(sums), sum(n**2 for n in sums), [start for start, _ in reversed(cut)]

    found = by_cost({f"part {n}": cost for n, cost in enumerate(costs)}, looped(stages))
    best = min(cuts_into(len(costs), stages), key=rank)
    names = [f"part {n}" for n in range(len(costs))]
    assert found.parts == tuple(tuple(names[start:stop]) for start, stop in best)


def test_bloom():
    """70 layers on 12 stages, embedding and head counted as layers: six parts on each."""
    found = by_cost(dict.fromkeys(model(70), 1.0), looped(12))
    assert sizes(found) == [6] * 12
    assert found.parts[0] == ("embedding", *(f"layers.{n}" for n in range(5)))
    assert found.parts[-1] == (*(f"layers.{n}" for n in range(65, 70)), "head")
    assert found.where == tuple(range(12))


@pytest.mark.parametrize(
    ("head", "stages", "found"),
    [
        (0.0, 4, [3, 2, 2, 3]),
        (0.0, 3, [3, 3, 4]),  # 2, 3 and 3 layers: earlier stages have the fewer
        (0.5, 3, [4, 3, 3]),
        (1.0, 4, [3, 2, 2, 3]),  # not [1, 3, 3, 3], whose costliest costs the same
        (2.0, 5, [3, 2, 2, 2, 1]),
        (6.0, 2, [8, 2]),
        (8.0, 3, [5, 4, 1]),
    ],
)
def test_eight_layers_a_free_embedding_and_a_head(head, stages, found):
    weighed = {"embedding": 0.0, **dict.fromkeys(model(8)[1:-1], 1.0), "head": head}
    assert sizes(by_cost(weighed, looped(stages))) == found


def test_equal_costs_are_equal_however_they_are_written():
    """Sums of 0.1 are rounded differently in every place of a row."""
    for cost in (1, 0.1, 1e-300, 3e15):
        assert sizes(by_cost(dict.fromkeys("abcdefghi", cost), looped(4))) == [2, 2, 2, 3]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_none_is_refused(cost):
    with pytest.raises(ValueError, match="negative or not a number"):
        by_cost({"embedding": cost, "head": 1.0}, looped(1))


@pytest.mark.parametrize(
    ("cut", "sentence"),
    [
        (
            lambda: even(model(6), looped(8)),
            "layout: pp8 makes 8 stages, and the model has only 6 layers; use at most pp6",
        ),
        (
            lambda: even(model(7), v_shaped(4)),
            "layout: pp4 v2 makes 8 stages, and the model has only 7 layers; use at most pp3 v2",
        ),
        (
            lambda: even(model(2), looped(2, 3)),
            "layout: pp2 v3 makes 6 stages, and the model has only 2 layers; use at most pp1 v2",
        ),
        (
            lambda: by_cost(dict.fromkeys(model(2), 1.0), looped(5)),
            "layout: pp5 makes 5 stages, and the model has only 4 parts; use at most pp4",
        ),
    ],
)
def test_more_stages_than_there_is_to_put_in_them_are_refused(cut, sentence):
    with pytest.raises(UserError) as refused:
        cut()
    assert str(refused.value) == sentence
