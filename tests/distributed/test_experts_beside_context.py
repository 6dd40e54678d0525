"""Parallel equals single: experts and latent attention where ranks share sequences.

layouts   a ring and all-to-all; ep over the ranks of cp, over replicas, over both; beside tp with
          sp, pipelines, every ZeRO stage and recomputation
routing   dropless and with a capacity that drops, counted over all chunks of a sequence
latent    values narrower than keys, in a ring and traded
controls  those of cp and of experts, and a rank that hears of no other chunk
"""

from dataclasses import replace

import pytest
from small_cases import case_of, prove

from howdah.plan.method import Routing
from howdah.shapes.presets import preset
from howdah.verify.case import small_shape
from howdah.verify.mutations import mutations

MIXTRAL = small_shape(preset("mixtral-8x7b"), context=19)
DEEPSEEK = small_shape(preset("deepseek-v3"), context=19, times=2)
BALANCED = Routing(balance_loss=0.3, z_loss=0.1)
DROPPING = replace(BALANCED, capacity=0.8)
TRADE = "context=all-to-all"
slow = pytest.mark.slow


def case_with(layout, shape, routing=BALANCED, **of):
    """A case of 19 positions: chunks of 5, 5, 5 and 4 under cp2."""
    case = replace(case_of(layout, **of), sequence=19)
    if shape.experts.bias:
        routing = replace(routing, bias_rate=0.01)
    return replace(case, shape=shape, method=replace(case.method, routing=routing))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("routing", [BALANCED, DROPPING], ids=["dropless", "capacity"])
@pytest.mark.parametrize(
    "layout",
    [
        "cp2 x2",
        "cp2 ep2 x2",
        pytest.param("dp2 cp2 ep2 zero2 x1", marks=slow),
        pytest.param("dp2 cp2 ep4 zero1 x1", marks=slow),
        pytest.param("cp4 ep2 zero3 x1", marks=slow),
        pytest.param("cp3 ep3 x1", marks=slow),  # chunks of three and four tokens
        pytest.param(f"cp2 ep2 tp2 sp recompute=full x1 {TRADE}", marks=slow),
        pytest.param("pp2 cp2 ep2 zb-h1 x2", marks=slow),
        pytest.param("cp2 ep2 recompute=full x2", marks=slow),
    ],
)
def test_experts_beside_cp_equal_one_device(workers, layout, routing):
    """The same tokens are dropped, and bytes are exact given the rows that were sent."""
    prove(case_with(layout, MIXTRAL, routing), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "cp2 x2",
        f"cp2 x2 {TRADE}",
        pytest.param("cp2 recompute=selective x2", marks=slow),
        pytest.param(f"cp2 recompute=selective x2 {TRADE}", marks=slow),
        pytest.param("cp2 tp2 sp x2", marks=slow),
        pytest.param(f"cp2 tp2 x2 {TRADE}", marks=slow),
        pytest.param("cp2 pp2 1f1b recompute=full x2", marks=slow),
        pytest.param("dp2 cp2 ep2 zero3 x1", marks=slow),
        pytest.param(f"cp3 x1 {TRADE}", marks=slow),
    ],
)
def test_latent_attention_beside_cp_equals_one_device(workers, layout):
    prove(case_with(layout, DEEPSEEK), workers)


@slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("layout", ["cp2 ep2 x2", f"cp2 x2 {TRADE}"])
def test_other_precisions(workers, layout, precision):
    prove(case_with(layout, DEEPSEEK, precision=precision), workers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "routing"),
    [
        ("cp2 ep2 x2", DROPPING),
        pytest.param("dp2 cp2 ep2 zero2 x2", BALANCED, marks=slow),
        pytest.param(f"cp2 x2 {TRADE}", DROPPING, marks=slow),
    ],
)
def test_every_break_is_noticed(workers, layout, routing):
    case = case_with(layout, DEEPSEEK, routing)
    assert "other chunks not heard" in [mutation.name for mutation in mutations(case.plan)]
    prove(case, workers, controls=True)
