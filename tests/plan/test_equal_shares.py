"""Shares on GPUs: equal, aligned, and hardly larger; on CPUs nothing is padded."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_flat_buffers import tables

from howdah.plan.batch import Batch
from howdah.plan.flat_buffers import SHARE_ALIGN, buffers, gaps, share
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus, make_plan
from howdah.plan.sharding import local_buffers
from howdah.shapes.presets import preset
from howdah.sim.traffic import padding, step_traffic


def plan_of(layout, model="laptop"):
    found = parse_layout(layout)
    batch = Batch(global_batch=found.replicas * found.micros, micro_batch=1)
    return make_plan(preset(model), found, batch, sequence=128, method=Method("bf16"))


@given(tables(), st.integers(1, 64))
def test_shares_are_equal_and_aligned_for_any_number_of_ranks(table, ranks):
    multiple = ranks * SHARE_ALIGN
    padded = buffers(table, multiple=lambda unit: multiple)
    for buffer, plain in zip(padded, buffers(table), strict=True):
        ends = [share(buffer.length, ranks, rank) for rank in range(ranks)]
        assert {stop - start for start, stop in ends} == {buffer.length // ranks}
        assert all(start % SHARE_ALIGN == 0 for start, _ in ends)
        assert 0 <= buffer.length - plain.length < multiple
        assert buffer.segments == plain.segments and buffer.decay_stop == plain.decay_stop
        added = sum(stop - start for start, stop in gaps(buffer))
        assert added - sum(b - a for a, b in gaps(plain)) == buffer.length - plain.length


@pytest.mark.parametrize("layout", ["dp3 zero1 x2", "dp5 zero3 x1", "dp6 zero2 shard3 x2"])
def test_bytes_of_padding_are_those_of_the_longer_buffers(layout):
    plain = plan_of(layout)
    padded = for_gpus(plain)
    assert padding(plain, 0) == 0
    more = {b.unit: b.length for b in local_buffers(padded, 0)}
    less = {b.unit: b.length for b in local_buffers(plain, 0)}
    assert any(more[unit] > less[unit] for unit in less)
    sent = [sum(step_traffic(plan, 0).values()) for plan in (plain, padded)]
    assert padding(padded, 0) == sent[1] - sent[0] > 0


@pytest.mark.parametrize("layout", ["dp3 x2", "tp2 x2", "pp2 x4"])
def test_what_is_not_shared_out_is_not_padded(layout):
    plan = plan_of(layout)
    assert local_buffers(for_gpus(plan), 0) == local_buffers(plan, 0)


def test_a_model_of_a_billion_on_eight_ranks_sends_a_thousandth_more_at_most():
    for zero in (1, 2, 3):
        plan = for_gpus(plan_of(f"dp8 zero{zero} x1", model="llama3-1b"))
        assert padding(plan, 0) <= 0.001 * sum(step_traffic(plan, 0).values())


def test_a_wider_alignment_is_seen(monkeypatch):
    """The test above can fail."""
    plan = replace(plan_of("dp8 zero1 x1", model="llama3-1b"), share_align=1 << 20)
    assert padding(plan, 0) > 0.001 * sum(step_traffic(plan, 0).values())
