"""Token slices: against every way to cut a short sequence, and against a run of the pipeline."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.search.token_slices import best_slices, even_slices, latency


def compositions(length):
    """Every tuple of positive numbers that sum to `length`."""
    for size in range(length):
        for inner in itertools.combinations(range(1, length), size):
            yield tuple(b - a for a, b in itertools.pairwise((0, *inner, length)))


def attention(start):
    """Time of a slice: to start it, its matrix products, and what its tokens attend to."""
    return lambda length, prefix: start + length + length * (prefix + (length + 1) / 2) / 4


def walked(times, stages):
    """When the last slice leaves the last stage, slice by slice and stage by stage."""
    ready = [0.0] * len(times)
    for _ in range(stages):
        free = 0.0
        for index, time in enumerate(times):
            free = ready[index] = max(free, ready[index]) + time
    return ready[-1]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_latency_is_what_walking_through_the_stages_takes(lengths, stages):
    time = attention(2.0)
    prefixes = [sum(lengths[:n]) for n in range(len(lengths))]
    times = [time(*slice_) for slice_ in zip(lengths, prefixes, strict=True)]
    assert latency(tuple(lengths), time, stages=stages) == pytest.approx(walked(times, stages))


def test_the_picture():
    times = {0: 4.0, 1: 6.0, 2: 4.0, 3: 4.0}
    assert latency((1, 1, 1, 1), lambda _, prefix: times[prefix], stages=3) == 18 + 2 * 6


@given(sequence=st.integers(1, 300), slices=st.integers(1, 300))
def test_even_slices_differ_by_at_most_one_and_never_grow(sequence, slices):
    if slices > sequence:
        with pytest.raises(UserError, match=f"slices{slices} is more .* at most slices{sequence}$"):
            even_slices(sequence, slices)
        return
    lengths = even_slices(sequence, slices)
    assert (len(lengths), sum(lengths)) == (slices, sequence)
    assert lengths[0] - lengths[-1] in (0, 1)
    assert sorted(lengths, reverse=True) == list(lengths)


@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_no_other_cut_is_faster(sequence, stages, data):
    """With times of no sense at all: the algorithm asks nothing of them."""
    spans = [(b - a, a) for a, b in itertools.combinations(range(sequence + 1), 2)]
    times = {span: data.draw(st.integers(0, 30).map(float)) for span in spans}

    def time(length, prefix):
        return times[length, prefix]

    found = best_slices(sequence, time, stages=stages)
    assert sum(found) == sequence
    best = min(latency(lengths, time, stages=stages) for lengths in compositions(sequence))
    assert latency(found, time, stages=stages) == best


@given(st.integers(1, 11), st.integers(1, 8), st.floats(0, 20))
def test_no_other_cut_is_faster_for_attention(sequence, stages, start):
    time = attention(start)
    found = best_slices(sequence, time, stages=stages)
    best = min(latency(lengths, time, stages=stages) for lengths in compositions(sequence))
    assert latency(found, time, stages=stages) == pytest.approx(best)


@given(st.integers(1, 40), st.integers(4, 50), st.integers(1, 4))
def test_cuts_are_at_multiples_of_the_granularity(sequence, granularity, stages):
    time = attention(1.0)
    found = best_slices(sequence, time, stages=stages, granularity=granularity)
    *most, _ = itertools.accumulate(found)
    assert all(end % granularity == 0 for end in most)
    allowed = [
        lengths
        for places in range(-(-sequence // granularity))
        for inner in itertools.combinations(range(granularity, sequence, granularity), places)
        for lengths in [tuple(b - a for a, b in itertools.pairwise((0, *inner, sequence)))]
    ]
    best = min(latency(lengths, time, stages=stages) for lengths in allowed)
    assert latency(found, time, stages=stages) == pytest.approx(best)


def test_one_stage_has_no_bubble_so_nothing_is_cut():
    assert best_slices(64, attention(1.0), stages=1) == (64,)


def test_later_slices_are_shorter_because_they_attend_to_more():
    """A deep pipeline wants slices of equal time, which no cut into equal lengths has."""
    time = attention(20.0)
    found = best_slices(96, time, stages=24)
    assert found[0] > found[-1]
    even = [latency(even_slices(96, n), time, stages=24) for n in range(1, 97)]
    assert latency(found, time, stages=24) < min(even)


def test_a_long_sequence_ends():
    """128 places to cut have 2¹²⁷ cuts."""
    found = best_slices(2048, attention(100.0), stages=48, granularity=16)
    assert sum(found) == 2048
    assert len(found) > 1
