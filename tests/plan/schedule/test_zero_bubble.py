"""H1 and H2: pictures, the paper's bubbles and memory, and where its formulas end."""

import pytest
from reference import SIZES, bubbles, draw, shows, total

from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.zero_bubble import zero_bubble_h1, zero_bubble_h2

H1 = """\
F0 F1 F2       I0 W0 F3 I1 W1 I2 W2 I3 W3
   F0 F1    I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
      F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3"""

H2 = """\
F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4
   F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4
      F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4"""

# F, I, W with W no longer than the others
COSTS = [(1, 1, 1), (2, 3, 1), (3, 2, 2), (4, 5, 3)]


def costs_of(forward, inner, weight):
    return {Kind.FORWARD: forward, Kind.INPUT: inner, Kind.WEIGHT: weight}


def test_pictures():
    assert draw(zero_bubble_h1(3, 4)) == H1
    assert shows(zero_bubble_h1, H1)
    assert draw(zero_bubble_h2(3, 5)) == H2
    assert shows(zero_bubble_h2, H2)


@pytest.mark.parametrize(("forward", "inner", "weight"), COSTS)
def test_bubble_of_h1(forward, inner, weight):
    for ranks, micros in [size for size in SIZES if size[1] >= size[0]]:
        found = bubbles(zero_bubble_h1(ranks, micros), costs_of(forward, inner, weight))
        assert max(found) == (ranks - 1) * (forward + inner - weight)


@pytest.mark.parametrize(("forward", "inner", "weight"), COSTS)
def test_bubble_of_h2(forward, inner, weight):
    for ranks, micros in [size for size in SIZES if size[1] >= 2 * size[0] - 1]:
        found = bubbles(zero_bubble_h2(ranks, micros), costs_of(forward, inner, weight))
        assert max(found) == (ranks - 1) * (forward + inner - 2 * weight)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_few_micro_batches_and_a_long_w_have_more_bubble_than_the_formulas(ranks):
    assert max(bubbles(zero_bubble_h1(ranks, ranks - 1))) > ranks - 1
    assert max(bubbles(zero_bubble_h2(ranks, 2 * ranks - 2))) > 0
    assert max(bubbles(zero_bubble_h1(ranks, 16), costs_of(1, 1, 2))) > 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_with_a_wait_between_steps_h2_gains_nothing_over_h1(ranks):
    assert total(zero_bubble_h1(ranks, 16)) == total(zero_bubble_h2(ranks, 16)) == 48 + ranks - 1


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_memory(ranks, micros):
    first = peak_held(one_f_one_b(ranks, micros), 0)
    for rank in range(ranks):
        assert peak_held(zero_bubble_h1(ranks, micros), rank) == min(ranks, micros) == first
        assert peak_held(zero_bubble_h2(ranks, micros), rank) == min(2 * ranks - 1, micros)
