"""Bytes that pass through memory where what is sent is rounded, counted one by one."""

from dataclasses import replace

import pytest
from round_steps import plan_of, wires

from howdah.plan.quantised import hops, message_bytes
from howdah.plan.sharding import local_buffers
from howdah.sim.rounding import rounded
from howdah.sim.step_time import step_time

INT8, INT4 = {"gather_dtype": "int8"}, {"gradient_dtype": "int4"}


def of_block(plan):
    """Bytes of the passes of the second block."""
    parts = (part for stage in plan.stages.parts for part in stage)
    return rounded(plan, 0, next(part for part in parts if part == "layers.1"))


def length_of(plan, unit):
    return next(buffer.length for buffer in local_buffers(plan, 0) if buffer.unit == unit)


def test_a_gather_rounds_a_share_and_restores_the_message():
    plan = plan_of("dp4 zero3 x2", **INT8)
    elements = length_of(plan, "layers.1")
    message = message_bytes(elements)
    share = elements // 4 * 4 + message // 4  # read, and written
    aside, restored = 2 * message, message + elements * 4
    expected = pytest.approx(share + aside + restored)
    assert of_block(plan) == (expected, expected)
    assert of_block(plan_of("dp4 zero3 x2")) == (0, 0)
    assert of_block(plan_of("dp4 zero3 release=step x2", **INT8)) == (
        pytest.approx((share + aside + restored) / 2),
        0,
    )


def test_a_sum_rounds_all_and_adds_what_is_heard_in_each_hop():
    whole = plan_of("dp4 zero3 x2", **INT4)
    elements = length_of(whole, "layers.1")
    heard = 4 * message_bytes(elements // 4, 4)
    assert of_block(whole) == (0, 3 * elements * 4 + 2 * heard)
    near = plan_of("dp4 zero3 hpz2 x2", **INT4)
    first, second = hops(length_of(near, "layers.1"), [2, 2])
    assert second.elements == first.elements // 2
    expected = sum(3 * hop.elements * 4 + 2 * 2 * hop.message for hop in (first, second))
    assert of_block(near) == (0, expected)


def test_a_step_takes_as_much_longer():
    """On memory that is slow beside all else."""
    plans = plan_of("dp2 zero3 x2"), plan_of("dp2 zero3 x2", **INT8)
    machine = wires(1e30, per_node=2)
    machine = replace(machine, device=replace(machine.device, bandwidth=1e9))
    plain, eight = (step_time(plan, machine).breakdown["memory"] for plan in plans)
    parts = [part for stage in plans[1].stages.parts for part in stage]
    more = 2 * sum(sum(rounded(plans[1], 0, part)) for part in parts)
    assert eight - plain == pytest.approx(more / machine.device.bandwidth)
