"""Mutations break what they say, and nothing else."""

import numpy as np
import pytest
from small_cases import case_of

from howdah.comm.transport import Alone
from howdah.plan.batch import MASKED
from howdah.train.step import count_tokens
from howdah.verify.evidence import gather
from howdah.verify.mutations import (
    count_a_unit_twice,
    count_one_more,
    mutations,
    shift_first_micro,
    skip_a_sum,
)

NAMES = ["a wrong count", "a norm counted twice", "a shifted micro-batch"]


def test_a_sum_can_be_skipped_only_where_there_is_one():
    for layout in ("single x3", "pp2 x3"):  # a tied weight is summed over its stages
        form = "untied" if "pp" in layout else "laptop"
        assert [m.name for m in mutations(case_of(layout, form=form).plan)] == NAMES
    for layout in ("dp2 x1", "pp2 x3", "dp2 pp2 x3"):
        assert [m.name for m in mutations(case_of(layout).plan)] == ["a sum skipped", *NAMES]


def batch_of(case):
    """The micro-batches of the first step on one rank."""
    seen = []
    gather(Alone(), case, shift=lambda batch, _: seen.append(batch) or batch)
    return seen[0]


def test_a_wrong_count_scales_every_gradient():
    case = case_of("single x2", steps=1)
    right, wrong = gather(Alone(), case), gather(Alone(), case, count_one_more)
    tokens = count_tokens(batch_of(case))
    for name, gradient in right.gradients.items():
        expected = gradient * tokens / (tokens + 1)
        np.testing.assert_allclose(wrong.gradients[name], expected, rtol=1e-9, atol=1e-15)


def test_a_norm_counted_twice_changes_the_norm_alone():
    case = case_of("single x2", steps=1)
    right, wrong = gather(Alone(), case), gather(Alone(), case, count_a_unit_twice)
    assert wrong.losses == right.losses and wrong.norms[0] > right.norms[0]
    for name, gradient in right.gradients.items():
        np.testing.assert_array_equal(wrong.gradients[name], gradient)


def test_a_sum_skipped_changes_one_gradient_alone(workers):
    case = case_of("dp2 x2", steps=1)
    right = workers.run(gather, case, ranks=2)[0].gradients
    wrong = workers.run(gather, case, skip_a_sum, ranks=2)[0].gradients
    changed = [name for name in right if not np.array_equal(right[name], wrong[name])]
    assert changed == ["embedding.weight"]


def nudge(stepper):
    """Rank 1 begins with other weights."""
    unit = next(iter(stepper.placed.units.values()))
    unit.weights[0] += stepper.mesh.rank
    return stepper


def test_replicas_with_other_weights_do_not_hold_equal_bits(workers):
    case = case_of("dp2 x1", steps=1)
    one, two = workers.run(gather, case, nudge, ranks=2)
    assert one.checksums != two.checksums


@pytest.mark.parametrize("rank", [0, 1])
def test_a_shift_moves_the_labels_of_the_first_micro_batch_of_one_rank(rank):
    case = case_of("single x2", steps=1)
    batch = batch_of(case)
    moved = shift_first_micro(batch, rank)
    assert len(moved) == len(batch) == 2
    np.testing.assert_array_equal(moved[1].labels, batch[1].labels)
    np.testing.assert_array_equal(moved[0].tokens, batch[0].tokens)
    same = np.array_equal(moved[0].labels, batch[0].labels)
    assert same is (rank != 0)
    # As many labels as before: a count would give the break away.
    assert (moved[0].labels != MASKED).sum() == (batch[0].labels != MASKED).sum()
