"""Seconds of the parts of a stage, from their operators, their passes over memory and exchanges."""

from dataclasses import replace

import pytest
from round_steps import SHAPE, plan_of, wires

from howdah.plan.schedule.actions import Kind
from howdah.shapes.products import part_flops
from howdah.sim.operator_times import Speeds, Triple
from howdah.sim.part_times import PartTimes, part_times
from howdah.sim.profile import PLAIN

NUMBERS = 8 * SHAPE.width * 4 / 1e30  # seconds of a pass over eight tokens in float32


def times_of(layout, rank=0, *, exchanged=(), profile=PLAIN):
    plan, cluster = plan_of(layout), wires(1.0)
    speeds = Speeds(cluster, cluster, plan.method, profile)
    return part_times(plan, speeds, rank, dict(exchanged), profile)


def test_a_part_takes_its_flops_on_its_share_of_the_ranks():
    """The chip of `wires` computes 1e30 flop/s."""
    whole, cut = times_of("x1")[0], times_of("cp2 tp2 x1")[0]
    assert list(whole) == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    for part, times in whole.items():
        assert times.products.forward == pytest.approx(part_flops(SHAPE, part, 8) / 1e30)
        assert sum(times.products) == pytest.approx(3 * times.products.forward)
        assert cut[part].products.forward == pytest.approx(times.products.forward / 4)


def test_only_blocks_pass_over_memory_and_only_the_chosen_are_recomputed():
    found = times_of("recompute=full:1 x1")[0]
    touch = PLAIN.stream * NUMBERS
    assert [times.touch for times in found.values()] == [0, *[pytest.approx(touch)] * 3, 0]
    first = found["layers.0"]
    again = first.products.forward + first.touch
    assert [times.again for times in found.values()] == [0, again, 0, 0, 0]


def test_each_kind_of_pass_is_counted():
    """Passes over the feed-forward's, the heads' and the logits' numbers, at their own sizes."""
    some = replace(PLAIN, stream=0.0, activation=3.0, heads=5.0, logits=6.0, again=1.0)
    found = times_of("x1", profile=some)[0]
    per_token = 3 * SHAPE.ffn_size + 5 * (SHAPE.width + 2 * SHAPE.width)
    assert found["layers.1"].touch == pytest.approx(per_token * 8 * 4 / 1e30)
    assert found["layers.1"].touched == pytest.approx(found["layers.1"].touch)
    assert found["head"].touch + found["head"].touched == pytest.approx(6 * 8 * 8 * 4 / 1e30)


def test_without_a_flash_kernel_scores_pass_over_memory_too():
    plain, squares = (
        times_of("x1", profile=replace(PLAIN, flash=flash))[0]["layers.1"].touch for flash in (3, 0)
    )
    assert squares - plain == pytest.approx(PLAIN.square * 8 * 8 * SHAPE.heads * 4 / 1e30)


def test_selective_recomputation_runs_attention_again_or_half_of_the_products():
    core = times_of("recompute=selective x1")[0]["layers.1"]
    operators = replace(PLAIN, selective="operators")
    half = times_of("recompute=selective x1", profile=operators)[0]["layers.1"]
    pairs = 4 * 8 * 8 * SHAPE.width / 2 / 1e30  # queries times keys, shares times values, causal
    assert core.again == pytest.approx(pairs)
    assert half.again == pytest.approx(half.products.forward / 2 + half.touch)


def test_exchanges_are_spread_over_the_parts_of_their_stage():
    stages = times_of("pp2 interleaved v2 x2", 1, exchanged={(1, False): 6.0, (3, True): 1.0})
    assert {stage: [*parts] for stage, parts in stages.items()} == {
        1: ["layers.1"],
        3: ["head"],
    }
    assert (stages[1]["layers.1"].ahead, stages[1]["layers.1"].back) == (6.0, 0.0)
    assert (stages[3]["head"].ahead, stages[3]["head"].back) == (0.0, 1.0)


def test_what_each_action_takes():
    times = PartTimes(
        Triple(1.0, 1.5, 0.75), touch=0.25, touched=0.5, again=1.25, ahead=10.0, back=20.0
    )
    assert {kind: times.seconds(kind) for kind in list(Kind)[:4]} == {
        Kind.FORWARD: 1.25 + 10,
        Kind.BACKWARD: 2.25 + 0.5 + 1.25 + 20,
        Kind.INPUT: 1.5 + 0.25 + 1.25 + 20,
        Kind.WEIGHT: 1.0,
    }
    slow = times._replace(least=(15.0, 100.0))  # the host starts kernels no faster
    assert [slow.seconds(kind) for kind in list(Kind)[:4]] == [15.0, 100.0, 50.0, 50.0]
