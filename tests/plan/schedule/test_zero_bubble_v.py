"""The V: no bubble, in the memory of 1F1B's first rank, from 2p - 1 micro-batches on."""

import pytest
from reference import SIZES, bubbles, draw, shows

from howdah.plan.schedule.actions import rank_of_stage
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.zero_bubble_v import zero_bubble_v

PICTURE = """\
0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2"""

ENOUGH = [(ranks, micros) for ranks, micros in SIZES if micros >= 2 * ranks - 1]


def test_picture():
    assert draw(zero_bubble_v(2, 3)) == PICTURE
    assert shows(zero_bubble_v, PICTURE)


def test_stages_go_down_and_up():
    assert rank_of_stage(zero_bubble_v(3, 4)) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(("ranks", "micros"), ENOUGH)
def test_no_bubble_and_p_micro_batches_on_every_rank(ranks, micros):
    schedule = zero_bubble_v(ranks, micros)
    assert bubbles(schedule) == [0] * ranks
    assert [peak_held(schedule, rank) for rank in range(ranks)] == [2 * ranks] * ranks


@pytest.mark.parametrize(("ranks", "micros"), [size for size in SIZES if size not in ENOUGH])
def test_fewer_micro_batches_have_a_bubble_and_no_more_memory(ranks, micros):
    schedule = zero_bubble_v(ranks, micros)
    assert max(bubbles(schedule)) > 0
    assert max(peak_held(schedule, rank) for rank in range(ranks)) <= 2 * min(ranks, micros)
