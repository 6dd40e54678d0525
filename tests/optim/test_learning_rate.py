"""Learning rates: every shape by hand, and what must hold for all of them."""

from itertools import pairwise
from math import cos, pi, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.optim.learning_rate import learning_rate
from howdah.plan.method import LearningRate

C = [(1 + cos(pi * n / 4)) / 2 for n in range(5)]  # cosine over four steps

# A warm-up of 2 to a peak of 1, six steps in all, down to a fifth.
GOLDEN = {
    "constant": [0.5, 1, 1, 1, 1, 1],
    "linear": [0.5, 1, 0.8, 0.6, 0.4, 0.2],
    "cosine": [0.5, 1, *(0.2 + 0.8 * c for c in C[1:])],
    "inverse_sqrt": [0.5, 1, sqrt(2 / 3), sqrt(2 / 4), sqrt(2 / 5), sqrt(2 / 6)],
    "wsd": [0.5, 1, 1, 1, 0.6, 0.2],
}


@pytest.mark.parametrize("shape", GOLDEN)
def test_every_shape_by_hand(shape):
    rate = LearningRate(peak=1.0, warmup_steps=2, schedule=shape, min_ratio=0.2, decay_steps=2)
    rates = [learning_rate(rate, step=step, steps=6) for step in range(6)]
    assert rates == pytest.approx(GOLDEN[shape], abs=1e-15)


@pytest.mark.parametrize("shape", GOLDEN)
def test_without_a_warm_up_the_first_step_is_on_the_shape(shape):
    first = learning_rate(
        LearningRate(peak=2.0, schedule=shape, min_ratio=0.0, decay_steps=3), step=0, steps=4
    )
    expected = {"linear": 1.5, "cosine": 2 * C[1]}.get(shape, 2.0)
    assert first == pytest.approx(expected)


def test_the_rate_is_in_proportion_to_the_peak():
    one, three = (
        learning_rate(LearningRate(peak=p, warmup_steps=3), step=7, steps=20) for p in (1.0, 3.0)
    )
    assert three == pytest.approx(3 * one)


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_a_run_that_goes_on_too_long_stays_on_the_floor(shape):
    rate = LearningRate(peak=1.0, warmup_steps=2, schedule=shape, min_ratio=0.1, decay_steps=3)
    assert learning_rate(rate, step=9, steps=10) == pytest.approx(0.1)
    assert learning_rate(rate, step=50, steps=10) == pytest.approx(0.1)


rates = st.builds(
    LearningRate,
    peak=st.floats(1e-6, 10),
    warmup_steps=st.integers(0, 30),
    schedule=st.sampled_from(sorted(GOLDEN)),
    min_ratio=st.floats(0, 1),
    decay_steps=st.integers(0, 60),
)


@given(rates, st.integers(1, 60))
def test_a_rate_rises_to_the_peak_and_then_only_falls(rate, steps):
    walk = [learning_rate(rate, step=step, steps=steps) for step in range(steps)]
    assert all(0 <= value <= rate.peak * (1 + 1e-12) for value in walk)
    top = rate.warmup_steps - 1
    if 0 <= top < steps:
        assert walk[top] == pytest.approx(rate.peak)
    rising, falling = walk[: rate.warmup_steps], walk[max(top, 0) :]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


@given(rates, st.integers(1, 60))
def test_a_rate_makes_no_jump(rate, steps):
    """No step changes it by more than the steepest part of its shape does."""
    if rate.schedule == "constant":
        steepest = 0.0
    elif rate.schedule == "inverse_sqrt":
        steepest = 1 - sqrt(max(rate.warmup_steps, 1) / (max(rate.warmup_steps, 1) + 1))
    else:
        falling = steps - rate.warmup_steps
        falling = min(falling, rate.decay_steps) if rate.schedule == "wsd" else falling
        steepest = (
            (pi / 2 if rate.schedule == "cosine" else 1) * (1 - rate.min_ratio) / max(falling, 1)
        )
    steepest = max(steepest, 1 / rate.warmup_steps if rate.warmup_steps else 0.0)
    walk = [learning_rate(rate, step=step, steps=steps) for step in range(steps)]
    for before, after in pairwise(walk):
        assert abs(after - before) <= rate.peak * (steepest + 1e-12)


def test_a_decay_longer_than_the_rest_begins_when_the_warm_up_ends():
    rate = LearningRate(peak=1.0, warmup_steps=4, schedule="wsd", min_ratio=0.0, decay_steps=100)
    walk = [learning_rate(rate, step=step, steps=8) for step in range(8)]
    assert walk == pytest.approx([0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0])
