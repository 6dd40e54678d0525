"""Parallel equals single: models with experts and latent attention, on every form that runs today.

layouts   dp, zero 0 to 3, tp with and without sp (experts cut by columns), pipelines,
          recomputation, and ep: experts on different ranks, whose states are shared out over
          their own replicas
models    softmax and sigmoid scores, groups, bias, shared experts with and without a gate, dense
          first layers, latent attention
routing   dropless, and with a capacity that drops; losses of routers; biases that move
controls  those of every layout, and those of routers
"""

from dataclasses import replace

import pytest
from small_cases import case_of, prove

from howdah.plan.method import Routing
from howdah.shapes.presets import preset
from howdah.verify.case import small_shape
from howdah.verify.mutations import mutations

MIXTRAL = small_shape(preset("mixtral-8x7b"), context=16)
QWEN = small_shape(preset("qwen3-30b-a3b"), context=16)
DEEPSEEK = small_shape(preset("deepseek-v3"), context=16)
GATED = replace(
    MIXTRAL, experts=replace(MIXTRAL.experts, shared=11, shared_gate=True, normalise=False)
)
BALANCED = Routing(balance_loss=0.3, z_loss=0.1)
DROPPING = replace(BALANCED, capacity=1.0)


def case_with(layout, shape, routing=BALANCED, **of):
    case = case_of(layout, **of)
    if shape.experts.bias:
        routing = replace(routing, bias_rate=0.01)
    return replace(case, shape=shape, method=replace(case.method, routing=routing))


SLOW = pytest.mark.slow  # cases beside quick ones that prove the same on other layouts


@pytest.mark.slow_after(2)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2 x2",
        "dp2 zero1 x2",
        "dp2 zero2 x2",
        "dp2 zero3 x2",
        "dp2 zero3 release=step x1",
        "tp2 x2",
        "tp2 sp x2",
        "tp2 sp inputs=gathered x1",
        "pp2 1f1b x2",
        "pp2 zb-h1 x2",
        "dp2 recompute=full x2",
        "dp2 zero3 recompute=full x1",
    ],
)
def test_experts_equal_one_device(workers, layout):
    prove(case_with(layout, MIXTRAL), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2 tp2 sp zero2 x2",
        "pp2 1f1b x2",
        *(pytest.param(n, marks=SLOW) for n in ("dp2 x2", "tp2 x2")),
    ],
)
def test_latent_attention_groups_and_biases_equal_one_device(workers, layout):
    prove(case_with(layout, DEEPSEEK), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 zero3 x1", "tp2 sp x1"])
@pytest.mark.parametrize("shape", [GATED, QWEN], ids=["gated", "qwen3"])
def test_other_families_equal_one_device(workers, layout, shape):
    prove(case_with(layout, shape), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 x2", "tp2 zero3 dp2 x1", "pp2 zb-h1 recompute=full x2"])
def test_a_capacity_drops_the_same_tokens_on_every_layout(workers, layout):
    prove(case_with(layout, DEEPSEEK, DROPPING), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        *(("dp2 zero2 x2", DEEPSEEK), ("pp2 x2", MIXTRAL)),
        pytest.param("tp2 sp x2", DEEPSEEK, marks=SLOW),
    ],
)
def test_every_break_is_noticed(workers, layout, shape):
    case = case_with(layout, shape, DROPPING)
    names = [mutation.name for mutation in mutations(case.plan)]
    assert names[-2:] == ["experts' rows shifted", "a router's loss averaged"]
    prove(case, workers, controls=True)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_other_precisions(workers, precision):
    prove(case_with("dp2 tp2 zero2 x2", MIXTRAL, precision=precision), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("routing", [BALANCED, DROPPING], ids=["dropless", "capacity"])
@pytest.mark.parametrize(
    "layout",
    ["dp2 ep2 x2", "dp2 ep2 tp2 sp zero3 x2", pytest.param("dp4 ep2 zero2 x1", marks=SLOW)],
)
def test_experts_on_different_ranks_equal_one_device(workers, layout, routing):
    """Five experts on two ranks. Bytes are exact, dropless given the rows that were sent."""
    prove(case_with(layout, MIXTRAL, routing), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2 ep2 pp2 1f1b recompute=full x2",
        "dp4 ep2 zero3 release=step x1",
        "dp4 ep2 zero2 shard2 x2",
        pytest.param("dp4 ep4 zero1 x1", marks=SLOW),
        pytest.param("dp2 ep2 tp2 zero3 recompute=full x2", marks=SLOW),
        pytest.param("pp2 dp2 ep2 zb-h1 x2", marks=SLOW),
    ],
)
def test_ep_beside_other_forms(workers, layout):
    prove(case_with(layout, DEEPSEEK), workers)


@pytest.mark.slow
def test_every_break_of_ep_is_noticed(workers):
    case = case_with("dp4 ep2 zero2 x1", DEEPSEEK, DROPPING)
    names = [mutation.name for mutation in mutations(case.plan)]
    assert {"experts counted twice", "an expert's sum skipped"} < set(names)
    prove(case, workers, controls=True)


def test_a_bias_that_moved_once_is_exact(workers):
    """After two steps of opposite signs it was, too, when its rate was rounded to float32."""
    prove(case_with("dp2 x2", DEEPSEEK, steps=1), workers)
