"""Two of three batch numbers give the third; a ramp; what contradicts is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.plan.batch import Batch, micro_steps, resolve_batch
from howdah.plan.layout import Layout

counts = st.integers(1, 50)


@given(micro=counts, dp=counts, micros=counts)
def test_any_two_give_the_third(micro, dp, micros):
    total = micro * dp * micros
    full = Batch(global_batch=total, micro_batch=micro), Layout(dp=dp, micros=micros)
    assert resolve_batch(Batch(micro_batch=micro), Layout(dp=dp, micros=micros)) == full
    assert resolve_batch(Batch(global_batch=total), Layout(dp=dp, micros=micros)) == full
    assert resolve_batch(Batch(global_batch=total, micro_batch=micro), Layout(dp=dp)) == full
    assert resolve_batch(*full) == full


@given(total=counts, micro=counts, dp=counts)
def test_there_are_just_enough_micro_steps(total, micro, dp):
    count = micro_steps(total, micro=micro, replicas=dp)
    assert (count - 1) * micro * dp < total <= count * micro * dp


def test_what_does_not_divide_is_padded():
    """10 samples on 3 replicas in twos: 6, then 4 and a row of padding on the last."""
    batch, layout = resolve_batch(Batch(global_batch=10, micro_batch=2), Layout(dp=3))
    assert (batch.global_batch, str(layout)) == (10, "dp3 x2")
    batch, layout = resolve_batch(Batch(global_batch=10), Layout(dp=3, micros=2))
    assert (batch.micro_batch, str(layout)) == (2, "dp3 x2")


def test_one_number_alone_makes_one_micro_batch():
    assert resolve_batch(Batch(global_batch=7), Layout(dp=2))[0].micro_batch == 4
    assert resolve_batch(Batch(micro_batch=4), Layout(dp=2))[0].global_batch == 8


@given(
    start=st.integers(1, 40), more=st.integers(0, 40), steps=st.integers(1, 30), step=st.integers(0)
)
def test_a_ramp_grows_from_its_start_to_the_full_batch(start, more, steps, step):
    batch = Batch(global_batch=start + more, ramp_from=start, ramp_steps=steps)
    assert batch.size(0) == start
    assert batch.size(step) <= batch.size(step + 1) <= start + more
    assert batch.size(steps + step) == start + more


def test_a_ramp_is_linear():
    """GPT-3's, with a thousandth of its tokens: 32 to 3200."""
    batch = Batch(global_batch=3200, ramp_from=32, ramp_steps=99)
    assert [batch.size(step) for step in (0, 1, 50, 98, 99)] == [32, 64, 1632, 3168, 3200]


@pytest.mark.parametrize(
    ("batch", "layout", "sentence"),
    [
        (Batch(), Layout(dp=2, micros=4), "the batch is open: give two of"),
        (Batch(), Layout(dp=2), "the batch is open: give two of"),
        (Batch(global_batch=0), Layout(), "batch.global_batch is 0; it must be at least 1"),
        (Batch(micro_batch=-2), Layout(), "batch.micro_batch is -2; it must be at least 1"),
        (
            Batch(global_batch=16, micro_batch=4),
            Layout(dp=2, micros=3),
            "batch.global_batch 16 on 2 replicas with batch.micro_batch 4 takes x2, but the "
            "layout says x3; drop one of the three",
        ),
        (
            Batch(global_batch=8),
            Layout(micros=16),
            "batch.global_batch 8 on 1 replicas makes x8 micro-batches of one size, but the layout "
            "says x16; use x8, or another batch.global_batch",
        ),
        (
            Batch(global_batch=7, micro_batch=5),
            Layout(dp=2),
            "batch.micro_batch 5 is more than a replica's part of batch.global_batch 7 on 2 "
            "replicas, and the rest would be padding; use batch.micro_batch=4",
        ),
        (Batch(global_batch=8, ramp_from=9, ramp_steps=2), Layout(), "batch.ramp_from 9 is over"),
        (Batch(global_batch=8, ramp_from=4), Layout(), "a ramp needs both batch.ramp_from and"),
        (Batch(global_batch=8, ramp_steps=4), Layout(), "a ramp needs both batch.ramp_from and"),
        (Batch(global_batch=8, ramp_from=-1, ramp_steps=4), Layout(), "batch.ramp_from is -1; "),
        (Batch(global_batch=1 << 40), Layout(), "batch.global_batch is 1099511627776; it must"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(batch, layout, sentence):
    with pytest.raises(UserError) as refused:
        resolve_batch(batch, layout)
    assert str(refused.value).startswith(sentence)


@given(total=st.integers(1, 60), dp=counts, micros=counts)
def test_a_global_batch_and_an_x_always_agree_or_are_refused(total, dp, micros):
    """The micro-batch is rounded up, after which fewer micro-batches may be enough."""
    try:
        batch, layout = resolve_batch(Batch(global_batch=total), Layout(dp=dp, micros=micros))
    except UserError as refused:
        assert f"but the layout says x{micros}" in str(refused)
        return
    assert layout.micros == micros == micro_steps(total, micro=batch.micro_batch, replicas=dp)
