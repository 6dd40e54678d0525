"""The order of samples: every sample once per epoch, shares as asked, from any position."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.text.order import BLOCK, Order, locate, shares


def order(samples, weights=None, seed=7):
    return Order(seed, 4, tuple(samples), shares(weights or [1.0] * len(samples)))


@settings(max_examples=30)
@given(
    samples=st.lists(st.integers(30, 900), min_size=1, max_size=3),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_within_an_epoch_no_sample_is_skipped_or_repeated(samples, seed, data):
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(samples), max_size=len(samples)))
    source, sample = locate(order(samples, weights, seed), np.arange(5 * BLOCK // 2))
    for one, size in enumerate(samples):
        read = sample[source == one]
        for epoch in range(0, len(read), size):
            seen = np.bincount(read[epoch : epoch + size], minlength=size)
            assert len(seen) == size and seen.max() == 1


@settings(max_examples=20)
@given(
    asked=st.lists(st.integers(0, 3 * BLOCK - 1), min_size=1, max_size=20),
    seed=st.integers(0, 99),
)
def test_any_position_can_be_asked_for_alone(asked, seed):
    mixed = order([110, 300], [2, 1], seed)
    everything = np.stack(locate(mixed, np.arange(3 * BLOCK)))
    np.testing.assert_array_equal(np.stack(locate(mixed, asked)), everything[:, asked])


@pytest.mark.parametrize("samples", [[1], [1, 2], [3, 5]])
def test_sources_smaller_than_a_batch_go_round(samples):
    source, sample = locate(order(samples), np.arange(40))
    for one, size in enumerate(samples):
        read = sample[source == one]
        whole = read[: len(read) // size * size].reshape(-1, size)
        assert (np.sort(whole) == np.arange(size)).all()


def test_each_block_has_the_exact_shares_in_an_order_of_its_own():
    source, _ = locate(order([50, 60, 70], [0.7, 0.2, 0.1]), np.arange(3 * BLOCK))
    blocks = source.reshape(3, BLOCK)
    for block in blocks:
        assert np.bincount(block).tolist() == [700, 200, 100]
    assert not np.array_equal(blocks[0], blocks[1])
    assert np.bincount(blocks[0, :100], minlength=3).min() > 0  # mixed, not one after the other


def test_seeds_epochs_and_sources_are_shuffled_apart():
    numbers = np.arange(64)
    _, first = locate(order([32]), numbers)
    _, other = locate(order([32], seed=8), numbers)
    assert not np.array_equal(first[:32], first[32:])
    assert not np.array_equal(first, other)
    assert not np.array_equal(first[:32], np.arange(32))
    source, sample = locate(order([32, 32]), np.arange(200))
    assert not np.array_equal(sample[source == 0][:32], sample[source == 1][:32])


def test_the_order_never_changes():
    """Written down once: a run of an older howdah must be resumed on the same samples."""
    assert locate(order([10]), np.arange(12))[1].tolist() == [6, 5, 8, 7, 4, 2, 9, 0, 3, 1, 8, 4]
    source, sample = locate(order([5, 5], [2, 1]), np.arange(9))
    assert source.tolist() == [0, 0, 1, 1, 1, 1, 0, 0, 1]
    assert sample.tolist() == [1, 2, 4, 0, 3, 2, 3, 0, 1]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
def test_shares_add_up_and_are_within_one_place_of_exact(weights):
    places = shares(weights, 100_000)
    assert sum(places) == 100_000
    exact = np.array(weights) / sum(weights) * 100_000
    assert np.abs(np.array(places) - exact).max() < 1


@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, -1.0), (1.0, float("nan")), (float("inf"),)])
def test_a_weight_that_is_not_above_zero_is_refused(weights):
    with pytest.raises(UserError, match="greater than 0"):
        shares(weights)


def test_a_weight_too_small_to_be_seen_is_refused():
    with pytest.raises(UserError, match=r"0\.0001 is less than 1/1000"):
        shares((1, 0.0001))


def test_in_sequence_samples_come_as_they_stand_and_epochs_again():
    alone = replace(order([7]), how="sequential")
    _, sample = locate(alone, np.arange(20))
    assert sample.tolist() == [n % 7 for n in range(20)]
    mixed = replace(order([7, 5], [3, 1]), how="sequential")
    source, sample = locate(mixed, np.arange(1000))
    for one, size in enumerate((7, 5)):
        assert sample[source == one].tolist() == [n % size for n in range((source == one).sum())]
    assert (source == 0).sum() == 750
