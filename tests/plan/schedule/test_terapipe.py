"""Token slices: the bubble divided by M, and few slices held."""

import pytest
from reference import draw, shows, total

from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.one_f_one_b import one_f_one_b
from howdah.plan.schedule.terapipe import terapipe

PICTURE = """\
F0·· F0.1 F1·· F1.1                     B0.1·····      B0·······      B1.1····· B1·······
     F0·· F0.1 F1··           B0.1····· F1.1 B0·······      B1.1····· B1·······
          F0·· F0.1 B0.1····· F1·· B0······· F1.1 B1.1····· B1·······"""


def test_picture():
    assert draw(terapipe(3, 2, 2)) == PICTURE
    assert shows(terapipe, PICTURE)


@pytest.mark.parametrize("slices", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bubble_and_memory(ranks, slices):
    """In units of a slice's forward, of which a micro-batch's is M."""
    for micros in (1, 2, 3, 8):
        schedule = terapipe(ranks, micros, slices)
        assert total(schedule) == 3 * (micros * slices + ranks - 1)
        held = [peak_held(schedule, rank) for rank in range(ranks)]
        assert held == [min(slices + ranks - 1 - rank, micros * slices) for rank in range(ranks)]


def test_one_slice_is_1f1b():
    assert terapipe(4, 6, 1).programs == one_f_one_b(4, 6).programs
