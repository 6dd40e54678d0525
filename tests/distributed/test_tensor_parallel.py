"""Parallel equals single: matrices cut between ranks, alone and beside replicas, in float64.

layouts   tp 2 to 4, with and without sp, beside dp and zero 1 and 2; some with all controls
forms     grouped heads shared or not, norms of heads, biases, positions, tied or not
uneven    heads, columns, vocabulary, positions of a slice, the last micro-batch
controls  those of every layout, and two of tensor parallelism: a verification that would not
          notice a sum over tp that is missing fails here
"""

from dataclasses import replace

import pytest
from small_cases import FORMS, case_of, prove

from howdah.verify.evidence import gather
from howdah.verify.mutations import mutations

# Nothing divides by three: 3 and 2 groups of heads, 29 columns, 67 tokens, slices of 16 positions.
UNEVEN = {
    "grouped": replace(
        FORMS["qwen3"], heads=8, kv_heads=4, width=40, head_size=8, ffn_size=29, vocab=67
    ),
    "biases": replace(
        FORMS["gpt2"], heads=5, kv_heads=5, width=40, head_size=8, ffn_size=29, vocab=67
    ),
    "shared": replace(FORMS["laptop"], heads=3, kv_heads=1, width=24, ffn_size=29, vocab=67),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "breaks"),
    [
        ("tp2 x2", ["an input's sum skipped"]),
        ("tp2 sp x2", ["an input's sum skipped", "a part left out"]),
        ("dp2 tp2 zero2 sp x2", ["an input's sum skipped", "a part left out"]),
    ],
)
def test_every_break_is_noticed(workers, layout, breaks):
    case = case_of(layout)
    assert [mutation.name for mutation in mutations(case.plan)][-len(breaks) :] == breaks
    prove(case, workers, controls=True)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["tp2 x2", "tp2 sp x2"])
def test_every_form_equals_one_device(workers, layout, form):
    prove(case_of(layout, form=form), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", UNEVEN)
@pytest.mark.parametrize("layout", ["tp3 x1", "tp3 sp x2"])
def test_nothing_needs_to_divide(workers, layout, form):
    prove(replace(case_of(layout), shape=UNEVEN[form]), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["tp4 x2", "tp4 sp x1"])
def test_key_value_heads_are_shared_by_more_parts_than_there_are_heads(workers, layout):
    """Each head's keys are on two of four parts: their gradients are summed over those two."""
    case = case_of(layout, form="qwen3")
    assert mutations(case.plan)[-1].name == "a part left out"
    prove(case, workers, controls="sp" not in layout)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("sp", ["", "sp "])
@pytest.mark.parametrize("zero", ["", "zero1 ", "zero2 ", "zero2 accumulate=whole "])
def test_beside_replicas_and_what_they_share_out(workers, zero, sp):
    prove(case_of(f"dp2 tp2 {zero}{sp}x3", form="qwen3"), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["tp2 zero2 sp x2", "tp2 recompute=full sp x2"])
def test_beside_shares_of_one_and_what_is_made_again(workers, layout):
    prove(case_of(layout), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layout", ["tp2 x3", "tp4 sp x2", "dp2 tp2 zero2 sp x2"])
def test_lower_precisions_equal_one_device_within_their_rounding(workers, layout, precision):
    prove(case_of(layout, form="qwen3", precision=precision), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("form", ["laptop", "gpt2"])
def test_dropout_of_a_slice_drops_what_one_device_drops(workers, form):
    prove(case_of("tp2 sp x2", form=form, dropout=0.1), workers)


def test_gloo_carries_it(workers):
    prove(case_of("tp2 sp x2"), workers, transport="torch")


def test_the_same_run_twice_gives_the_same_bits(workers):
    case = case_of("dp2 tp2 zero1 sp x2", form="qwen3")
    first, second = (workers.run(gather, case, ranks=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.norms, one.checksums) == (
            other.losses,
            other.norms,
            other.checksums,
        )
