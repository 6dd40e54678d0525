"""Interleaved 1F1B: the bubble divided by v for every m ≥ p, whether p divides m or not."""

import pytest
from reference import SIZES, draw, shows, total

from howdah.plan.schedule.actions import rank_of_stage
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.interleaved import interleaved

PICTURE = """\
0F0 0F1 2F0 2F1         2B0····     2B1···· 0B0···· 0B1····
    1F0 1F1 3F0 3B0···· 3F1 3B1···· 1B0···· 1B1····"""


def test_picture():
    assert draw(interleaved(2, 2, 2)) == PICTURE
    assert shows(interleaved, PICTURE)


def test_stages_go_around_the_ranks():
    assert rank_of_stage(interleaved(3, 4, 2)) == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_bubble(ranks, virtual):
    """In units of a stage's forward, of which a rank's is v: the paper's (p - 1)(F + B)/v."""
    for micros in range(ranks, 17):
        assert total(interleaved(ranks, micros, virtual)) == 3 * (micros * virtual + ranks - 1)


@pytest.mark.parametrize(("ranks", "micros"), SIZES)
def test_memory(ranks, micros):
    groups = max(1, micros // ranks)
    longest = -(-micros // groups)
    for virtual in (1, 2, 4):
        schedule = interleaved(ranks, micros, virtual)
        held = [peak_held(schedule, rank) for rank in range(ranks)]
        assert held == [
            min(longest * (virtual - 1) + 2 * (ranks - 1 - rank) + 1, micros * virtual)
            for rank in range(ranks)
        ]


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 2), (4, 2), (4, 3), (8, 4)])
def test_memory_of_the_first_rank_is_the_published_figure(ranks, virtual):
    """p(1 + (p - 1)/(pv)) micro-batches, https://arxiv.org/abs/2205.05198, section 4.2.3."""
    stages = peak_held(interleaved(ranks, 2 * ranks, virtual), 0)
    assert stages / virtual == pytest.approx(ranks * (1 + (ranks - 1) / (ranks * virtual)))
