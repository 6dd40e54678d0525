"""The list of sums: an example by hand, and what must be true of every plan's list."""

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import plans

from howdah.plan import sums
from howdah.plan.batch import Batch
from howdah.plan.flat_buffers import Buffer
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.sharding import local_buffers, placement
from howdah.plan.sums import fill_buckets, sums_of, used_by_several
from howdah.shapes.presets import preset

SHAPE = replace(preset("laptop"), layers=4, tie_embeddings=False)


def plan_of(words, shape=SHAPE):
    layout = resolve(parse_layout(words), None)
    return make_plan(shape, layout, Batch(micro_batch=2), sequence=9, method=Method())


def row(number, one):
    """A sum, as the picture in the module has it."""
    units = list(dict.fromkeys(span.unit for span in one.spans))
    what = "packed" if one.packed else "whole" if one.every_micro else "shares"
    gradients = ("norms of " if what == "packed" else "") + " and ".join(units) + f", {what}"
    often = "micro-batch" if one.every_micro else "step"
    ranks = " ".join(map(str, one.ranks))
    words = [number, one.axis, ranks, one.op.replace("_", "-"), gradients, often, *one.after]
    return " ".join(map(str, words))


def test_the_list_in_the_docstring_is_the_list():
    shape = replace(SHAPE, vocab=2000)
    found = sums_of(plan_of("pp2 dp4 tp2 sp zero2 shard2 x2 stages=3,1", shape), 13)
    drawn = [" ".join(line.split()) for line in sums.__doc__.splitlines()]
    drawn = [line for line in drawn if re.match(r"\d+ (tp|dp) ", line)]
    assert drawn == [row(number, one) for number, one in enumerate(found)]


def test_a_tied_embedding_of_two_ranks_is_summed_share_by_share_and_gathered():
    tied = replace(SHAPE, tie_embeddings=True)
    found = sums_of(plan_of("pp2 dp2 x2", tied), 3)
    tied_ones = [one for one in found if one.spans[0].unit == "tied"]
    assert [(one.stage, one.axis, one.op) for one in tied_ones] == [
        (1, "dp", "reduce_scatter"),
        (None, "pp", "all_reduce"),
        (None, "dp", "all_gather"),
    ]
    assert [list(one.ranks) for one in tied_ones] == [[2, 3], [1, 3], [2, 3]]
    assert found.index(tied_ones[0]) == 0  # the last stage completes it with the head
    assert not any(one.axis == "pp" for one in sums_of(plan_of("pp2 zb-v x2", tied), 0))


def test_one_rank_alone_has_no_sums():
    assert sums_of(plan_of("x3"), 0) == []
    assert sums_of(plan_of("tp2"), 0) == []  # each tp rank has the true gradient of its norms
    assert sums_of(plan_of("tp2 sp"), 0) != []


def test_where_a_share_is_the_whole_nothing_is_summed_between_micro_batches():
    """shard1: every rank has all states, and its gradients add up where they are."""
    found = sums_of(plan_of("dp2 tp2 sp zero2 shard1 x3"), 0)
    assert found and not any(one.every_micro for one in found)
    assert {one.op for one in found} == {"all_reduce"}


def test_a_unit_that_two_stages_of_a_rank_use():
    tied = replace(SHAPE, tie_embeddings=True)
    assert used_by_several(plan_of("pp2 zb-v x2", tied), 0) == {"tied"}
    assert used_by_several(plan_of("pp2 zb-v x2"), 0) == frozenset()
    assert used_by_several(plan_of("x2", tied), 0) == frozenset()  # one stage


@settings(max_examples=60)
@given(plans(), st.data())
def test_every_gradient_is_summed_over_all_who_have_terms(plan, data):
    """Following the sums of a weight from rank to rank reaches exactly the ranks of its terms."""
    rank = data.draw(st.integers(0, plan.layout.world - 1))
    buffer = data.draw(st.sampled_from(local_buffers(plan, rank)))
    segment = data.draw(st.sampled_from(buffer.segments))
    reached, new = {rank}, {rank}
    while new:
        partners = {
            other
            for each in new
            for one in sums_of(plan, each)
            for span in one.spans
            if span.unit == buffer.unit and (not one.packed or segment.name in one.names)
            for other in one.ranks
        }
        reached, new = reached | partners, partners - reached
    held = placement(plan.weight(segment.name), plan, rank)
    assert reached == set(held.summed)


@settings(max_examples=60)
@given(plans(), st.data())
def test_every_name_is_awaited_once_and_every_sum_by_later_ones(plan, data):
    rank = data.draw(st.integers(0, plan.layout.world - 1))
    found = sums_of(plan, rank)
    names = [name for one in found for name in one.names]
    assert len(names) == len(set(names))
    for number, one in enumerate(found):
        assert all(before < number for before in one.after)
        assert rank in one.ranks
        assert len(one.ranks) > 1 or plan.layout.gradients != "device"  # alone, it takes them home
        assert list(one.ranks) == sorted(set(one.ranks))


@settings(max_examples=40)
@given(plans(), st.data())
def test_all_ranks_of_a_sum_agree_on_it(plan, data):
    """In the same order, with messages of the same lengths: otherwise they would not match."""
    rank = data.draw(st.integers(0, plan.layout.world - 1))
    for one in sums_of(plan, rank)[:4]:
        mine = [s for s in sums_of(plan, rank) if tuple(s.ranks) == tuple(one.ranks)]
        for other in one.ranks:
            theirs = [s for s in sums_of(plan, other) if tuple(s.ranks) == tuple(one.ranks)]
            assert [(s.op, s.axis, s.every_micro, s.messages) for s in theirs] == [
                (s.op, s.axis, s.every_micro, s.messages) for s in mine
            ]


# -- buckets -----------------------------------------------------------------------


def made(*lengths):
    return [Buffer(f"unit{number}", (), 0, length) for number, length in enumerate(lengths)]


def names(buckets):
    return [[buffer.unit for buffer in bucket] for bucket in buckets]


def test_a_bucket_closes_with_enough_bytes():
    buffers = made(7, 3, 8, 2, 9)
    assert names(fill_buckets(buffers, element_bytes=4, least_bytes=40)) == [
        ["unit0", "unit1"],
        ["unit2", "unit3"],
        ["unit4"],
    ]


def test_the_width_of_an_element_counts():
    buffers = made(5, 5, 5, 5)
    assert len(fill_buckets(buffers, element_bytes=4, least_bytes=40)) == 2
    assert len(fill_buckets(buffers, element_bytes=8, least_bytes=40)) == 4


def test_nothing_fills_no_bucket():
    assert fill_buckets([], element_bytes=4, least_bytes=40) == []


@given(st.lists(st.integers(0, 50), max_size=12), st.sampled_from([2, 4, 8]), st.integers(1, 400))
def test_buckets_keep_the_order_and_are_no_larger_than_needed(lengths, width, least):
    buffers = made(*lengths)
    buckets = fill_buckets(buffers, element_bytes=width, least_bytes=least)
    assert [buffer for bucket in buckets for buffer in bucket] == buffers
    for bucket in buckets[:-1]:
        assert sum(buffer.length for buffer in bucket) * width >= least
    for bucket in buckets:
        assert sum(buffer.length for buffer in bucket[:-1]) * width < least
