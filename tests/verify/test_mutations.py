"""Mutations break what they say, and nothing else."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_cases import case_of

from howdah.comm.transport import SingleRank
from howdah.plan.batch import MASKED
from howdah.train.step import count_tokens
from howdah.verify.evidence import gather
from howdah.verify.mutations import (
    count_a_unit_twice,
    count_one_more,
    keep_a_unit,
    lose_a_gradient,
    mutations,
    run_otherwise_again,
    shift_first_micro,
    skip_a_sum,
    skip_the_sum_across,
    skip_the_tie,
)
from howdah.verify.verify import verify

ROOT = Path(__file__).parents[2]

NAMES = ["a wrong count", "a norm counted twice", "a shifted micro-batch"]


LOST, TIE = "a gradient lost between stages", "a tie skipped"
ACROSS, LATE = "a sum across groups skipped", "a unit from before the update"
AGAIN = "another second run"


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("single x3", []),
        ("dp2 x1", []),
        ("dp2 zero2 x2", []),
        ("dp4 zero1 shard2 x2", [ACROSS]),
        ("dp4 zero3 shard2 x2", [ACROSS, LATE]),
        ("dp2 zero3 release=step x2", [LATE]),
        ("dp4 zero2 shard4 x2", []),  # one group
        ("single x1 recompute=full", [AGAIN]),
        ("dp2 zero3 x1 recompute=selective", [LATE, AGAIN]),
        ("pp2 x3", [LOST, TIE]),
        ("pp2 zb-v x3", [LOST]),  # embedding and head are on one rank
        ("dp2 pp2 zero3 x3", [LATE, LOST, TIE]),
    ],
)
def test_each_form_adds_its_own_breaks(layout, more):
    names = [m.name for m in mutations(case_of(layout).plan)]
    assert [name for name in names if name != "a sum skipped"] == [*NAMES, *more]


def test_a_sum_can_be_skipped_only_where_there_is_one():
    for layout in ("single x3", "pp2 x3"):  # a tied weight is summed over its stages
        form = "untied" if "pp" in layout else "laptop"
        lost = [LOST] if "pp" in layout else []
        assert [m.name for m in mutations(case_of(layout, form=form).plan)] == [*NAMES, *lost]
    for layout in ("dp2 x1", "pp2 x3", "dp2 pp2 x3"):
        assert mutations(case_of(layout).plan)[0].name == "a sum skipped"


def test_a_late_weight_is_a_break_only_where_it_shows():
    """Not before the second step; and in lower precisions less than rounding may follow."""
    plan = case_of("dp2 zero3 x1").plan
    assert LATE in [m.name for m in mutations(plan, steps=2)]
    assert LATE not in [m.name for m in mutations(plan, steps=1)]
    plan = case_of("dp2 zero3 x1", precision="bf16").plan
    assert LATE not in [m.name for m in mutations(plan, steps=2)]


def batch_of(case):
    """The micro-batches of the first step on one rank."""
    seen = []
    gather(SingleRank(), case, shift=lambda batch, _: seen.append(batch) or batch)
    return seen[0]


def test_a_wrong_count_scales_every_gradient():
    case = case_of("single x2", steps=1)
    right, wrong = gather(SingleRank(), case), gather(SingleRank(), case, count_one_more)
    tokens = count_tokens(batch_of(case))
    for name, gradient in right.gradients.items():
        expected = gradient * tokens / (tokens + 1)
        np.testing.assert_allclose(wrong.gradients[name], expected, rtol=1e-9, atol=1e-15)


def test_a_norm_counted_twice_changes_the_norm_alone():
    case = case_of("single x2", steps=1)
    right, wrong = gather(SingleRank(), case), gather(SingleRank(), case, count_a_unit_twice)
    assert wrong.losses == right.losses and wrong.norms[0] > right.norms[0]
    for name, gradient in right.gradients.items():
        np.testing.assert_array_equal(wrong.gradients[name], gradient)


def test_a_sum_skipped_changes_one_gradient_alone(workers):
    case = case_of("dp2 x2", steps=1)
    right = workers.run(gather, case, ranks=2)[0].gradients
    wrong = workers.run(gather, case, skip_a_sum, ranks=2)[0].gradients
    changed = [name for name in right if not np.array_equal(right[name], wrong[name])]
    assert changed == ["embedding.weight"]


def changed(workers, case, mutate):
    """Evidence of rank 0 without and with a break, and the names of gradients that differ."""
    ranks = case.layout.world
    right = workers.run(gather, case, ranks=ranks)[0]
    wrong = workers.run(gather, case, mutate, ranks=ranks)[0]
    names = [n for n, g in right.gradients.items() if not np.array_equal(g, wrong.gradients[n])]
    return right, wrong, names


def before(unit, names):
    """The names of what forward comes through before `unit`."""
    return names[: next(at for at, name in enumerate(names) if name.startswith(unit))]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp4 zero1 shard2 x2", "dp4 zero2 shard2 x2"])
def test_a_sum_across_groups_skipped_leaves_every_gradient_that_of_a_group(workers, layout):
    right, wrong, names = changed(workers, case_of(layout, steps=1), skip_the_sum_across)
    assert names == list(right.gradients)
    assert wrong.losses == right.losses


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["", "release=step"])
def test_a_kept_unit_is_late_from_the_second_step_on(workers, words):
    right, wrong, names = changed(workers, case_of(f"dp2 zero3 x2 {words}"), keep_a_unit)
    assert names == []
    assert wrong.losses[0] == right.losses[0] and wrong.losses[1] != right.losses[1]
    assert wrong.sent == right.sent


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("words", ["recompute=full", "recompute=selective"])
def test_another_second_run_changes_no_loss_and_what_backward_comes_to_behind_it(workers, words):
    right, wrong, names = changed(workers, case_of(f"x2 {words}", steps=1), run_otherwise_again)
    assert wrong.losses == right.losses
    reached = before("layers.1", list(right.gradients))
    assert set(names) <= set(reached) and "layers.0.attention.v.weight" in names


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved v2", "zb-v"])
def test_a_gradient_that_is_lost_is_missing_behind_the_boundary(workers, schedule):
    """With four stages, the first that is sent is that of the last boundary between ranks."""
    case = case_of(f"pp2 {schedule} x3", form="untied", steps=1)
    case = replace(case, shape=replace(case.shape, layers=4))
    right, wrong, names = changed(workers, case, lose_a_gradient)
    sender = {"1f1b": 1, "zb-h1": 1, "interleaved v2": 3, "zb-v": 3}[schedule]
    first = case.plan.stages.parts[sender][0]
    assert set(names) == set(before(first, list(right.gradients)))
    assert wrong.losses == right.losses and wrong.sent == right.sent


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["pp2 x2", "dp2 pp2 x1", "dp2 pp2 zero2 x2"])
def test_a_tie_skipped_changes_the_embedding_alone(workers, layout):
    _, _, names = changed(workers, case_of(layout, steps=1), skip_the_tie)
    assert names == ["embedding.weight"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout", ["dp4 zero3 shard2 x1", "x2 recompute=full", "x2 recompute=selective", "pp2 x2"]
)
def test_every_break_of_a_form_is_noticed(workers, layout):
    verdict = verify(case_of(layout), workers)
    assert verdict.proved, verdict.problems
    assert all(failing.used > 1e4 for _, failing in verdict.controls)


def nudge(context):
    """Rank 1 begins with other weights."""
    unit = next(iter(context.placed.units.values()))
    unit.weights[0] += context.mesh.rank
    return context


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


def test_the_page_names_every_control():
    """Eleven of them were missing in its table."""
    sources = (ROOT / "howdah" / "verify").glob("*mutations.py")
    text = "".join(path.read_text() for path in sources)
    names = {
        *re.findall(r'Mutation\("([^"]+)"', text),
        *re.findall(r'^ +"([a-z\' -]+)": [a-z_]+,$', text, re.M),
    }
    names |= {
        *re.findall(r'found\["([^"]+)"\]', text),
        *re.findall(r'\{"([a-z\' ]+)": [a-z_]+\}', text),
    }
    page = (ROOT / "docs" / "verify.md").read_text()
    assert len(names) == 23
    assert [name for name in sorted(names) if f"\n| {name} |" not in page] == []
