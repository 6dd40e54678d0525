"""One at a time, and GPipe: pictures, bubbles, memory."""

import pytest
from reference import SIZES, draw, shows, total

from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.gpipe import gpipe, naive
from howdah.plan.schedule.held import peak_held

NAIVE = """\
F0                   B0··· F1                   B1···
   F0          B0···          F1          B1···
      F0 B0···                   F1 B1···"""

GPIPE = """\
F0 F1 F2 F3                   B0··· B1··· B2··· B3···
   F0 F1 F2 F3          B0··· B1··· B2··· B3···
      F0 F1 F2 F3 B0··· B1··· B2··· B3···"""


def test_pictures():
    assert draw(naive(3, 2)) == NAIVE
    assert shows(naive, NAIVE)
    assert draw(gpipe(3, 4)) == GPIPE
    assert shows(gpipe, GPIPE)


@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (2, 3), (3, 1)])
def test_bubbles(forward, backward):
    costs = {Kind.FORWARD: forward, Kind.BACKWARD: backward}
    one = forward + backward
    for ranks, micros in SIZES:
        assert total(naive(ranks, micros), costs) == ranks * micros * one
        assert total(gpipe(ranks, micros), costs) == (micros + ranks - 1) * one


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_memory(ranks, micros):
    for rank in range(ranks):
        assert peak_held(naive(ranks, micros), rank) == 1
        assert peak_held(gpipe(ranks, micros), rank) == micros
