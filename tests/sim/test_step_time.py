"""The time of a step against closed forms, on clusters whose wires cost nothing or very much."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import plans
from round_steps import clock_of, wires

from howdah.base.errors import UserError
from howdah.machines.cluster import Link, attained, peak
from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.gather_order import gather_counts
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.products import conventions, train_flops
from howdah.shapes.shape import Experts, ModelShape
from howdah.sim.step_time import step_time

# Blocks alone would be even stages: the head is as small as it can be.
SHAPE = ModelShape(layers=16, width=512, heads=8, ffn_size=1024, vocab=8, context=512)


def plan_of(layout, *, micro=1, precision="bf16"):
    batch, method = Batch(micro_batch=micro), Method(precision=precision)
    return make_plan(SHAPE, parse_layout(layout), batch, sequence=512, method=method)


def cluster_of(devices, *, bandwidth=1e30):
    """Devices with the rates of an H100, and without losses to small products, on wires of
    `bandwidth`; their memory is fast, so that an update takes no time.
    """
    wire = Link("wire", bandwidth, 0.0)
    cluster = load_cluster("h100", devices=devices)
    device = replace(cluster.device, name="chip", bandwidth=1e30)
    return replace(cluster, device=device, inside=wire, between=wire, measured=())


def speed(cluster):
    return peak(attained(cluster).device, "bf16")


def test_one_device_takes_its_flops():
    cluster, plan = cluster_of(1), plan_of("single x3", micro=2)
    flops = train_flops(SHAPE, 512, causal=True) * 512 * 6
    found = step_time(plan, cluster)
    assert found.seconds == pytest.approx(flops / speed(cluster))
    assert found.tokens_per_second == pytest.approx(512 * 6 / found.seconds)
    dense = 989e12 * found.seconds
    assert found.mfu == pytest.approx(conventions(SHAPE, 512).model * 512 * 6 / dense, rel=1e-3)


def test_full_recomputation_takes_a_forward_of_the_blocks_more():
    cluster = cluster_of(1)
    plain, again = (step_time(plan_of(f"single {w}"), cluster) for w in ("", "recompute=full"))
    assert again.seconds / plain.seconds == pytest.approx(4 / 3, rel=1e-3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_takes_m_plus_p_minus_one_micro_batches(schedule):
    cluster = cluster_of(4)
    one = step_time(plan_of("single x1"), cluster).seconds / 4  # a stage's micro-batch
    found = step_time(plan_of(f"pp4 {schedule} x8"), cluster)
    assert found.seconds == pytest.approx(11 * one, rel=0.01)
    assert found.timeline.bubble == pytest.approx(3 / 11, rel=0.02)


def test_replicas_and_parts_of_a_matrix_share_the_work():
    one = step_time(plan_of("single x1"), cluster_of(1)).seconds
    for layout in ("tp4 x1", "cp4 x1"):
        assert step_time(plan_of(layout), cluster_of(4)).seconds == pytest.approx(one / 4)
    assert step_time(plan_of("dp4 x1"), cluster_of(4)).seconds == pytest.approx(one)


def test_a_slow_wire_hides_behind_the_last_backward_pass_or_is_waited_for():
    """Gradients of 8 ranks, there and back, on a wire that takes much longer than the step."""
    plan, slow = plan_of("dp8 x1"), cluster_of(8, bandwidth=1e6)
    found = step_time(plan, slow)
    wire = attained(slow).inside.bandwidth
    moved = 2 * 7 / 8 * 4 * sum(w.elements for w in plan.weights) / wire
    assert found.seconds == pytest.approx(moved, rel=0.01)
    fast = step_time(plan, cluster_of(8, bandwidth=1e15))
    assert fast.breakdown["waiting"] < 0.01 * fast.seconds


def test_zero3_gathers_in_every_pass_and_reduces_in_every_backward():
    plan, slow = plan_of("dp8 zero3 x2"), cluster_of(8, bandwidth=1e6)
    unit = 7 / 8 * sum(w.elements for w in plan.weights) / attained(slow).inside.bandwidth
    per_micro = unit * (2 + 2 + 4)  # two gathers in bf16, a reduction in float32
    assert step_time(plan, slow).seconds == pytest.approx(2 * per_micro, rel=0.01)


@settings(max_examples=40)
@given(plans())
def test_the_breakdown_adds_up_and_faster_wires_are_never_slower(plan):
    plan = replace(plan, method=replace(plan.method, precision="bf16"))
    if plan.layout.world > 64:
        return
    slow, fast = (
        step_time(plan, cluster_of(plan.layout.world, bandwidth=wire)) if fits(plan) else None
        for wire in (1e6, 1e12)
    )
    if slow is None or fast is None:
        return
    assert sum(slow.breakdown.values()) >= slow.seconds * (1 - 1e-9)
    assert fast.seconds <= slow.seconds * (1 + 1e-9)


@settings(max_examples=40)
@given(plans(), st.sampled_from([1e3, 1e6, 1e9]))
def test_a_step_waits_for_no_more_than_its_messages(plan, bandwidth):
    """Without a pipeline, a rank waits only while a message is under way; and a step is no shorter
    than all messages of one group.
    """
    plan = replace(plan, method=replace(plan.method, precision="float32"))
    if plan.layout.pp > 1 or plan.layout.world > 64:
        return
    machine = wires(bandwidth, per_node=plan.layout.world, latency=1e-4)
    _, messages, _ = clock_of(plan, machine)
    lanes = Counter()
    for row, (lane, seconds) in zip(messages.sums, messages.of_sum, strict=True):
        lanes[lane] += seconds * (plan.micros if row.every_micro else 1)
    often = gather_counts(plan, 0) if messages.by_use else Counter([*messages.of_gather])
    for unit, (lane, seconds) in messages.of_gather.items():
        lanes[lane] += seconds * often[unit]
    found = step_time(plan, machine)
    rounding = 1e-9 * found.seconds
    assert found.breakdown["waiting"] <= lanes.total() + rounding
    assert found.seconds >= max(lanes.values(), default=0.0) - rounding


def test_an_update_reads_and_writes_the_states_that_a_rank_updates():
    """float32 with Adam: gradients, masters and moments read, all but gradients and the weights
    written: 7 x 4 + 4 bytes. Of experts, a rank updates a share of those that it holds.
    """
    experts = Experts(count=4, top_k=2, ffn_size=64)
    shape = ModelShape(layers=2, width=64, heads=2, ffn_size=64, vocab=64, context=64)
    batch, method = Batch(micro_batch=1), Method(precision="float32")

    def seconds(layout, shape):
        plan = make_plan(shape, parse_layout(layout), batch, sequence=64, method=method)
        machine = wires(1e30, per_node=plan.layout.world)
        slow = replace(machine, device=replace(machine.device, bandwidth=1e9))
        return plan, step_time(plan, slow).breakdown["update"]

    plan, one = seconds("x1", shape)
    assert one == pytest.approx(32 * sum(w.elements for w in plan.weights) / 1e9, rel=0.01)
    assert seconds("dp4 zero1 x1", shape)[1] == pytest.approx(one / 4, rel=0.01)
    assert seconds("dp4 zero1 shard2 x1", shape)[1] == pytest.approx(one / 2, rel=0.01)
    whole = seconds("x1", replace(shape, experts=experts))[1]
    shared = seconds("dp4 ep2 zero1 x1", replace(shape, experts=experts))[1]
    assert shared == pytest.approx(whole / 4, rel=0.01)


def fits(plan):
    """Whether there is a cluster of just as many devices."""
    try:
        load_cluster("h100", devices=plan.layout.world)
    except UserError:
        return False
    return True
