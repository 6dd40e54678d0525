"""Parameters and flops by hand, and what is wrong with sizes, said in sentences."""

from dataclasses import replace

import pytest

from howdah.plan.presets import preset
from howdah.plan.problems import BadInput
from howdah.plan.shapes import (
    ModelShape,
    check_shape,
    forward_flops,
    parameters,
    require_shape,
    train_flops,
)
from howdah.plan.sharding import weights

SMALL = ModelShape(layers=2, width=12, heads=3, ffn=20, vocab=50, context=8)

VARIANTS = {
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "own head size": {"head_size": 10},
    "gelu": {"feedforward": "gelu"},
    "relu": {"feedforward": "relu"},
    "layernorm": {"norm": "layernorm"},
    "norms after": {"norm_at": "after"},
    "learned positions": {"positions": "learned"},
    "biases": {"bias": True},
    "biases without a gate": {"bias": True, "feedforward": "gelu"},
    "tied": {"tied": True},
    "query-key norm": {"query_key_norm": True},
}


# -- parameters ----------------------------------------------------------------


def test_parameters_by_hand():
    count = parameters(SMALL)
    assert count.embedding == count.head == 50 * 12
    assert count.attention == 4 * 12 * 12
    assert count.feedforward == 3 * 12 * 20
    assert count.norms == 2 * 12
    assert count.layer == 576 + 720 + 24
    assert count.total == 600 + 2 * 1320 + 12 + 600


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_the_formula_and_the_table_agree_for_every_choice(change):
    shape = replace(SMALL, **change)
    assert parameters(shape).total == sum(weight.elements for weight in weights(shape))
    assert parameters(shape).total != parameters(SMALL).total


def test_a_head_with_its_own_size_leaves_the_width_alone():
    shape = replace(SMALL, heads=3, head_size=10)
    assert shape.d == 10
    assert parameters(shape).attention == 12 * (3 + 2 * 3) * 10 + 3 * 10 * 12


# -- flops ---------------------------------------------------------------------


def test_gpt_3_took_six_flops_a_parameter_and_token():
    """https://arxiv.org/abs/2005.14165, table D.1: 3.14e23 for 300 billion tokens."""
    shape = preset("gpt3-175b")
    assert 6 * parameters(shape).total * 300e9 == pytest.approx(3.15e23, rel=0.01)
    matrices = train_flops(shape, 0, causal=True)  # a sequence of 0 has no attention scores
    assert matrices * 300e9 == pytest.approx(3.15e23, rel=0.01)


def test_full_attention_costs_what_the_palm_paper_says():
    """https://arxiv.org/abs/2204.02311, appendix B: 6N + 12·L·heads·head size·s a token."""
    shape, sequence = preset("llama2-7b"), 4096
    norms = (2 * shape.layers + 1) * shape.width
    matrices = parameters(shape).total - parameters(shape).embedding - norms
    expected = 6 * matrices + 12 * shape.layers * shape.heads * shape.d * sequence
    assert train_flops(shape, sequence, causal=False) == expected


def test_causal_attention_needs_half_of_the_scores():
    full = forward_flops(SMALL, 64, causal=False)
    causal = forward_flops(SMALL, 64, causal=True)
    assert full - causal == SMALL.layers * 2 * 64 * SMALL.width
    assert causal - forward_flops(SMALL, 0, causal=True) == full - causal


def test_grouped_heads_save_projections_and_no_scores():
    grouped, every = replace(SMALL, kv_heads=1), SMALL
    saved = forward_flops(every, 64, causal=True) - forward_flops(grouped, 64, causal=True)
    assert saved == SMALL.layers * 2 * SMALL.width * (2 * 2 * SMALL.d)


def test_the_backward_pass_costs_twice_the_forward():
    assert train_flops(SMALL, 8, causal=True) == 3 * forward_flops(SMALL, 8, causal=True)


# -- what is wrong, in sentences -----------------------------------------------


def test_sound_sizes_have_no_problem():
    assert check_shape(SMALL) == []
    require_shape(SMALL)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 0}, "model.layers is 0; it must be at least 1"),
        ({"kv_heads": 0}, "model.kv_heads is 0; it must be at least 1"),
        (
            {"width": 100, "heads": 7},
            "model.width 100 does not divide into 7 heads; use 5 heads, or give model.head_size",
        ),
        (
            {"heads": 6, "kv_heads": 4},
            "model.kv_heads 4 does not divide 6 heads; use 3",
        ),
        (
            {"head_size": 5},
            "rotary positions turn pairs, but a head has 5 numbers; make it even",
        ),
    ],
)
def test_a_problem_is_a_sentence_with_a_way_out(change, sentence):
    shape = replace(SMALL, **change)
    assert check_shape(shape) == [sentence]
    with pytest.raises(BadInput) as caught:
        require_shape(shape)
    assert str(caught.value) == sentence


def test_all_problems_are_said_at_once():
    broken = replace(SMALL, layers=0, ffn=-1, vocab=0)
    assert len(check_shape(broken)) == 3
    assert len(check_shape(replace(SMALL, width=15, heads=3, kv_heads=2))) == 2


def test_odd_heads_are_fine_with_learned_positions():
    assert check_shape(replace(SMALL, head_size=5, positions="learned")) == []
