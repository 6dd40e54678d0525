"""Buckets: every unit once, in the order in which backward finishes them, and large enough."""

from hypothesis import given
from hypothesis import strategies as st

from howdah.plan.buckets import fill_buckets
from howdah.plan.flat_buffers import Buffer


def made(*lengths):
    return [Buffer(f"unit{number}", (), 0, length) for number, length in enumerate(lengths)]


def names(buckets):
    return [[buffer.unit for buffer in bucket] for bucket in buckets]


def test_an_example_by_hand():
    """Backward finishes unit4 first; a bucket closes with 40 bytes or more."""
    buffers = made(9, 2, 8, 3, 7)
    assert names(fill_buckets(buffers, element_bytes=4, least_bytes=40)) == [
        ["unit4", "unit3"],
        ["unit2", "unit1"],
        ["unit0"],
    ]


def test_the_width_of_an_element_counts():
    buffers = made(5, 5, 5, 5)
    assert len(fill_buckets(buffers, element_bytes=4, least_bytes=40)) == 2
    assert len(fill_buckets(buffers, element_bytes=8, least_bytes=40)) == 4


def test_one_byte_gives_every_unit_a_bucket_of_its_own():
    assert names(fill_buckets(made(3, 1), element_bytes=4, least_bytes=1)) == [["unit1"], ["unit0"]]


def test_nothing_fills_no_bucket():
    assert fill_buckets([], element_bytes=4, least_bytes=40) == []


@given(st.lists(st.integers(0, 50), max_size=12), st.sampled_from([2, 4, 8]), st.integers(1, 400))
def test_buckets_cut_the_units_in_backward_order(lengths, width, least):
    buffers = made(*lengths)
    buckets = fill_buckets(buffers, element_bytes=width, least_bytes=least)
    assert [buffer for bucket in buckets for buffer in bucket] == buffers[::-1]
    for bucket in buckets[:-1]:
        assert sum(buffer.length for buffer in bucket) * width >= least
    for bucket in buckets:  # none is larger than it has to be
        assert sum(buffer.length for buffer in bucket[:-1]) * width < least
