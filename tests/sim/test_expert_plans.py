"""Llama 4: what its weights take, on how many devices, and with the experts on different ranks;
how long tokens take to the experts and back.

Behemoth was announced (ai.meta.com, "The Llama 4 herd", April 2025) with two totals and 16 experts,
but without its sizes: it has no preset, and only its totals can be used.
"""

from math import ceil

import pytest
from lecture_formulas import devices_to_hold, expert_share

from howdah.machines.cluster import attained
from howdah.machines.cluster_file import load_cluster
from howdah.machines.network import axis_groups, path
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.sim.step_time import step_time
from howdah.sim.traffic import step_traffic

# parameters: total, active, experts that share them
HERD = {"scout": (109e9, 17e9, 16), "maverick": (400e9, 17e9, 128), "behemoth": (2e12, 288e9, 16)}
USABLE = load_cluster("h100").device.memory - load_cluster("h100").device.reserved


def plan_of(name, layout):
    shape, method = preset(f"llama4-{name}"), Method(precision="bf16")
    batch = Batch(micro_batch=1)
    return make_plan(shape, parse_layout(layout), batch, sequence=8192, method=method)


def held(plan):
    return memory(plan, 0, kernels_of(plan))


@pytest.mark.parametrize(
    ("name", "terabytes", "devices"),
    [("scout", 0.218, 3), ("maverick", 0.8, 11), ("behemoth", 4.0, 51)],
)
def test_weights_in_bf16_and_the_h100_that_hold_them(name, terabytes, devices):
    total, *_ = HERD[name]
    assert total * 2 / 1e12 == terabytes
    assert devices_to_hold(total, memory=USABLE) == devices


@pytest.mark.parametrize("name", ["scout", "maverick"])
def test_a_plan_says_that_as_many_h100_hold_the_weights(name):
    plan = plan_of(name, "single x1")
    weights = next(row.bytes for row in held(plan) if row.component == "weights")
    assert ceil(weights / USABLE) == devices_to_hold(HERD[name][0], memory=USABLE)


@pytest.mark.parametrize("name", ["scout", "maverick"])
def test_the_presets_have_the_announced_totals(name):
    count, (total, active, experts) = parameters(preset(f"llama4-{name}")), HERD[name]
    assert count.total == pytest.approx(total, rel=0.012)
    assert count.active == pytest.approx(active, rel=0.012)
    assert preset(f"llama4-{name}").experts.count == experts


@pytest.mark.parametrize(("name", "ep"), [("scout", 2), ("scout", 16), ("maverick", 32)])
def test_the_share_of_a_rank_from_the_totals_is_that_of_the_plan(name, ep):
    plan, count = plan_of(name, f"dp{ep} ep{ep} x1"), parameters(preset(f"llama4-{name}"))
    weights = next(row.bytes for row in held(plan) if row.component == "weights")
    experts = HERD[name][2]
    found = expert_share(count.total, count.active, experts=experts, ep=ep)
    assert weights == pytest.approx(2 * found, rel=1e-6)


def test_a_rank_with_one_of_behemoths_experts_holds_what_a_token_uses():
    """288B of 2T: 576 GB of bf16, so that tp8 is needed before anything is trained."""
    total, active, experts = HERD["behemoth"]
    share = expert_share(total, active, experts=experts, ep=16)
    assert share == pytest.approx(active)
    assert share * 2 / 8 < USABLE < share * 2 / 4


def test_experts_are_priced_as_an_all_to_all():
    """A ring over two nodes gets all eight cards; an all-to-all shares them with seven others."""
    cluster, plan = load_cluster("h100x16"), plan_of("scout", "dp16 ep16 x1")
    groups = axis_groups(16, size=16, stride=1)
    every, ring = (
        path(attained(cluster), groups, pattern=one).link.bandwidth for one in ("all", "ring")
    )
    count = sum(n for row, n in step_traffic(plan, 0).items() if row.axis == "ep")
    seconds = step_time(plan, cluster).breakdown["tp, cp, ep"]
    assert seconds == pytest.approx(count / every, rel=0.05)  # and 17 us at the start of each
    assert seconds > 4 * count / ring


@pytest.mark.parametrize(
    ("name", "layout", "fits"),
    [
        ("scout", "dp64 ep16 zero3 x1 recompute=full", True),
        ("scout", "dp64 zero1 x1 recompute=full", False),
        ("maverick", "dp16 tp8 sp ep16 zero1 x1 recompute=full", True),
        ("maverick", "dp16 tp8 sp zero1 x1 recompute=full", False),
    ],
)
def test_plans_of_training_on_h100(name, layout, fits):
    assert (peak(held(plan_of(name, layout))) <= USABLE) is fits
