"""Seconds of the parts of a stage, from their flops, their passes over memory and exchanges."""

import pytest
from round_steps import SHAPE, plan_of, wires

from howdah.plan.schedule.actions import Kind
from howdah.shapes.products import part_flops
from howdah.sim.part_times import PASSES, SQUARE_PASSES, PartTimes, part_times


def times_of(layout, rank=0, *, flash=True, exchanged=()):
    return part_times(plan_of(layout), wires(1.0), rank, dict(exchanged), flash=flash)


def test_a_part_takes_its_flops_on_its_share_of_the_ranks():
    """The chip of `wires` computes 1e30 flop/s."""
    whole, cut = times_of("x1")[0], times_of("cp2 tp2 x1")[0]
    assert list(whole) == ["embedding", "layers.0", "layers.1", "layers.2", "head"]
    for part, times in whole.items():
        assert times.forward == pytest.approx(part_flops(SHAPE, part, 8) / 1e30)
        assert cut[part].forward == pytest.approx(times.forward / 4)


def test_only_blocks_pass_over_memory_and_only_the_chosen_are_recomputed():
    found = times_of("recompute=full:1 x1")[0]
    touch = PASSES * 8 * SHAPE.width * 4 / 1e30  # eight tokens in float32
    assert [times.touch for times in found.values()] == [0, *[pytest.approx(touch)] * 3, 0]
    first = found["layers.0"]
    assert [times.again for times in found.values()] == [0, first.forward + first.touch, 0, 0, 0]


def test_without_a_flash_kernel_scores_pass_over_memory_too():
    plain, squares = (times_of("x1", flash=flash)[0]["layers.1"].touch for flash in (True, False))
    assert squares - plain == pytest.approx(SQUARE_PASSES * 8 * 8 * SHAPE.heads * 4 / 1e30)


def test_exchanges_are_spread_over_the_parts_of_their_stage():
    stages = times_of("pp2 interleaved v2 x2", 1, exchanged={(1, False): 6.0, (3, True): 1.0})
    assert {stage: [*parts] for stage, parts in stages.items()} == {
        1: ["layers.1"],
        3: ["head"],
    }
    assert (stages[1]["layers.1"].ahead, stages[1]["layers.1"].back) == (6.0, 0.0)
    assert (stages[3]["head"].ahead, stages[3]["head"].back) == (0.0, 1.0)


def test_what_each_action_takes():
    times = PartTimes(forward=1.0, touch=0.25, again=1.25, ahead=10.0, back=20.0)
    assert {kind: times.seconds(kind) for kind in list(Kind)[:4]} == {
        Kind.FORWARD: 1.25 + 10,
        Kind.BACKWARD: 2.5 + 1.25 + 20,
        Kind.INPUT: 1.25 + 1.25 + 20,
        Kind.WEIGHT: 1.25,
    }
