"""Parameters by hand, and what is wrong with sizes, said in sentences."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from random_shapes import shapes

from howdah.base.errors import UserError
from howdah.shapes.presets import preset
from howdah.shapes.shape import (
    Experts,
    Latent,
    ModelShape,
    check_shape,
    parameters,
    require_shape,
    stated,
)
from howdah.shapes.weights import weights

SMALL = ModelShape(layers=2, width=12, heads=3, ffn=20, vocab=50, context=8)
TWO_STACKS = {"family": "encoder-decoder", "encoder_layers": 3}
LATENT = Latent(kv_rank=5, query_rank=0, plain=4, rotary=2, value=3)

VARIANTS = {
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "own head size": {"head_size": 10},
    "geglu": {"feedforward": "geglu", "bias": True},
    "gelu": {"feedforward": "gelu"},
    "relu": {"feedforward": "relu"},
    "layernorm": {"norm": "layernorm"},
    "norms after": {"norm_at": "after"},
    "learned positions": {"positions": "learned"},
    "relative positions": {"positions": "relative"},
    "biases": {"bias": True},
    "biases without a gate": {"bias": True, "feedforward": "gelu"},
    "biases of query, key and value": {"qkv_bias": True},
    "tied": {"tied": True},
    "query-key norm": {"query_key_norm": True},
    "two stacks": TWO_STACKS,
    "two stacks, relative": TWO_STACKS | {"positions": "relative"},
    "token types": {"token_types": 2},
    "embedding norm": {"embedding_norm": True},
    "transform": {"transform": True},
    "latent": {"latent": LATENT},
    "latent queries": {"latent": replace(LATENT, query_rank=7)},
    "experts": {"experts": Experts(4, 2, ffn=6)},
    "experts in every second block": {"experts": Experts(4, 2, ffn=6, shared=3, every=2)},
}


# -- parameters ----------------------------------------------------------------


def test_parameters_by_hand():
    count = parameters(SMALL)
    assert count.embedding == count.head == 50 * 12
    assert count.attention == 2 * 4 * 12 * 12
    assert count.feedforward == 2 * 3 * 12 * 20
    assert count.norms == (2 * 2 + 1) * 12
    assert (count.positions, count.router, count.experts) == (0, 0, 0)
    assert count.total == count.active == 600 + 2 * (576 + 720 + 24) + 12 + 600


def test_parameters_of_a_mixture_by_hand():
    count = parameters(replace(SMALL, layers=3, experts=Experts(8, 2, ffn=6, shared=5, first=1)))
    assert count.feedforward == 3 * 12 * 20 + 2 * 3 * 12 * 5
    assert count.router == 2 * 8 * 12
    assert count.experts == 2 * 8 * 3 * 12 * 6
    assert count.total - count.active == 2 * 6 * 3 * 12 * 6


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_choice_changes_the_count_as_it_changes_the_table(change):
    shape = replace(SMALL, **change)
    assert check_shape(shape) == []
    assert parameters(shape).total == sum(weight.elements for weight in weights(shape))
    assert parameters(shape).total != parameters(SMALL).total


@settings(max_examples=300)
@given(shapes())
def test_the_formula_and_the_table_agree_for_every_model(shape):
    assert parameters(shape).total == sum(weight.elements for weight in weights(shape))


@given(shapes())
def test_components_are_the_table_summed_by_name(shape):
    def total(*inside):
        return sum(w.elements for w in weights(shape) if any(word in w.name for word in inside))

    count, chosen = parameters(shape), shape.experts.chosen if shape.experts else 0
    assert count.embedding == total("embedding.weight")
    assert count.positions == total("positions.", "token_types.", "relative.")
    assert count.attention == total(".attention.", ".cross.")
    assert count.feedforward == total(".feedforward.", ".shared.")
    assert count.router == total(".router.")
    assert count.experts == total(".experts.")
    assert count.head == total("head.", "transform.", "transform_norm.")
    stacked = shape.experts.number if shape.experts else 1
    assert count.total - count.active == count.experts // stacked * (stacked - chosen)


def test_a_head_with_its_own_size_leaves_the_width_alone():
    shape = replace(SMALL, heads=3, head_size=10)
    assert shape.d == 10
    assert parameters(shape).attention == 2 * (12 * (3 + 2 * 3) * 10 + 3 * 10 * 12)


def test_the_textbook_formulas():
    """V·d + L(4d² + 2·d·f) without biases; with f = 4d and the feed-forward's, L(12d² + 5d)."""
    vocab, layers, d, f = 50, 2, 12, 20
    plain = parameters(replace(SMALL, feedforward="relu", tied=True))
    assert plain.total - plain.norms == vocab * d + layers * (4 * d**2 + 2 * d * f)
    biased = parameters(replace(SMALL, feedforward="relu", ffn=4 * d, bias=True, tied=True))
    of_attention = layers * 4 * d  # which the second formula leaves out
    assert biased.total - biased.norms - of_attention == vocab * d + layers * (12 * d**2 + 5 * d)


def test_which_blocks_have_experts():
    def blocks(**sizes):
        shape = replace(SMALL, layers=6, experts=Experts(4, 1, ffn=6, **sizes))
        return [layer for layer in range(6) if shape.sparse(layer)]

    assert blocks() == [0, 1, 2, 3, 4, 5]
    assert blocks(first=3) == [3, 4, 5]  # DeepSeek-V3
    assert blocks(every=2) == [1, 3, 5]  # Llama 4 Maverick
    assert blocks(first=1, every=2) == [2, 4]
    assert not SMALL.sparse(0)


def test_equal_models_are_equal_shapes():
    assert stated(SMALL) == stated(replace(SMALL, kv_heads=3, head_size=4)) != SMALL
    latent = replace(SMALL, latent=LATENT)
    assert stated(latent) == latent
    assert (latent.k, latent.d) == (3, 6)


# -- bytes ---------------------------------------------------------------------


def test_the_memory_of_gpt_3():
    """float32 weight 700 GB, 16-bit weight and gradient 350 GB, both to two digits."""
    total = parameters(preset("gpt3-175b")).total
    assert (round(4 * total / 1e9, -1), round(2 * total / 1e9, -1)) == (700, 350)


def test_the_memory_of_7_5_billion():
    """15 GB of 16-bit weights; 120 GB with gradients and Adam, 16 bytes a parameter."""
    total = parameters(preset("megatron-7.5b")).total
    assert (round(2 * total / 1e9), round(16 * total / 1e9, -1)) == (15, 120)


def test_an_embedding_of_64_000_rows_is_1250_mebibytes():
    shape = replace(SMALL, vocab=64_000, width=5120, heads=40)
    assert 4 * parameters(shape).embedding == 1250 * 2**20


def test_maverick_is_800_gigabytes_of_which_a_token_meets_34():
    count = parameters(preset("llama4-maverick"))
    assert (round(2 * count.total / 1e9, -1), round(2 * count.active / 1e9)) == (800, 34)


# -- flops ---------------------------------------------------------------------


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
        ({"token_types": -1}, "model.token_types is -1; it must be at least 0"),
        ({"buckets": 0}, "model.buckets is 0; it must be at least 1"),
        (
            {"bias": True, "qkv_bias": True},
            "model.bias has the biases of model.qkv_bias already; leave model.qkv_bias out",
        ),
        (
            {"latent": replace(LATENT, kv_rank=0)},
            "model.latent.kv_rank is 0; it must be at least 1",
        ),
        (
            {"latent": replace(LATENT, rotary=3)},
            "rotary positions turn pairs, but model.latent.rotary is 3; make it even",
        ),
        (
            {"latent": LATENT, "kv_heads": 3},
            "model.latent is an attention without model.kv_heads; leave model.kv_heads out",
        ),
        (
            {"latent": LATENT, "family": "encoder"},
            "model.latent needs family decoder and rotary positions, not encoder and rotary; "
            "leave model.latent out",
        ),
        (
            {"family": "encoder-decoder"},
            "an encoder-decoder needs model.encoder_layers; give at least 1",
        ),
        (
            {"encoder_layers": 2},
            "model.encoder_layers is 2, but model.family is decoder, whose blocks are "
            "model.layers; leave it out, or make the family encoder-decoder",
        ),
        (
            TWO_STACKS | {"experts": Experts(4, 2, ffn=6)},
            "model.experts is for models of one stack; leave it out of an encoder-decoder",
        ),
        (
            {"experts": Experts(4, 5, ffn=6)},
            "model.experts.chosen 5 is more than model.experts.number; use at most 4",
        ),
        (
            {"experts": Experts(4, 2, ffn=6, shared=-1)},
            "model.experts.shared is -1; it must be at least 0",
        ),
        (
            {"experts": Experts(4, 2, ffn=6, first=1, every=2)},
            "none of 2 layers has experts with model.experts.first 1 and every 2; make one of the "
            "two smaller",
        ),
        (
            {"experts": Experts(4, 2, ffn=6), "bias": True},
            "model.bias is for dense models, experts have none; leave it out",
        ),
    ],
)
def test_a_problem_is_a_sentence_with_a_way_out(change, sentence):
    shape = replace(SMALL, **change)
    assert check_shape(shape) == [sentence]
    with pytest.raises(UserError) as caught:
        require_shape(shape)
    assert str(caught.value) == sentence


def test_all_problems_are_said_at_once():
    broken = replace(SMALL, layers=0, ffn=-1, vocab=0)
    assert len(check_shape(broken)) == 3
    assert len(check_shape(replace(SMALL, width=15, heads=3, kv_heads=2))) == 2


def test_odd_heads_are_fine_with_learned_positions():
    assert check_shape(replace(SMALL, head_size=5, positions="learned")) == []
