"""What the drawings share: round numbers on their axes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.draw.palette import ticks


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (80, [0, 10, 20, 30, 40, 50, 60, 70, 80]),
        (38.5, [0, 5, 10, 15, 20, 25, 30, 35]),
        (0.6, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
)
def test_round_numbers(most, expected):
    assert ticks(most) == pytest.approx(expected)


@given(st.floats(1e-6, 1e18))
def test_a_handful_of_even_steps(most):
    found = ticks(most)
    assert 7 <= len(found) <= 16
    assert found[0] == 0 and most * 0.85 < found[-1] <= most * (1 + 1e-6)
