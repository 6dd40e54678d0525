"""Every sum of gradients that a rank makes is in the plan's list, and the other way round.

`bench/matrix/run.py --shadow` asks all cells of the matrix.
"""

from dataclasses import replace
from unittest.mock import patch

import pytest
import shadow
from in_flight import message_for_each_unit
from recorded_wire import Backend

from howdah.plan.method import Method
from howdah.plan.plan import for_gpus
from howdah.plan.sums import sums_of
from howdah.verify.matrix import case_of


def plan_of(words):
    return for_gpus(replace(case_of(words), method=Method()).plan)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    "words",
    [
        "dp2 x2",
        "dp3 zero1 x2",
        "dp4 zero2 shard2 x2",
        "dp2 zero3 recompute=full x2",
        "tp2 sp x2",
        "tp4 sp x2",  # slices of a sequence that are not equal
        "pp2 1f1b x3",
        "dp2 pp2 1f1b x4",  # a tied embedding, summed by halves
        "dp2 pp2 tp2 zero1 zb-h1 x2",
        "dp2 zero3 weights=disk gradients=disk optimizer=disk x2",
        "dp2 zero2 optimizer=host activations=host x2",
    ],
)
def test_ranks_make_the_sums_that_are_listed(words, apart):
    with message_for_each_unit(apart):
        assert list(shadow.differences(plan_of(words))) == []


class Forgets(Backend):
    """Leaves out its first sum by shares."""

    left = 1

    def _reduce_scatter_base(self, *arguments):
        if not self.left:
            super()._reduce_scatter_base(*arguments)
        self.left = 0


def test_a_sum_that_a_rank_does_not_make():
    (first, *_) = shadow.differences(plan_of("dp2 zero2 x2"), Forgets)
    assert first.startswith("rank 0 lacks 1 x reduce_scatter of ") and first.endswith(" over 0-1")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("dp2 x2", "rank 0 also makes 1 x all_reduce of "),
        ("tp2 sp x2", "rank 0 sums "),  # more activations than there are
    ],
)
def test_a_sum_that_is_not_listed(words, says):
    with patch.object(shadow, "sums_of", lambda plan, rank: sums_of(plan, rank)[1:]):
        assert next(shadow.differences(plan_of(words))).startswith(says)
