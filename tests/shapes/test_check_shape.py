"""What is wrong with sizes, said in sentences."""

from dataclasses import replace

import pytest

from howdah.base.errors import UserError
from howdah.shapes.check import check_shape, require_shape
from howdah.shapes.shape import Experts, Latent, ModelShape

SMALL = ModelShape(layers=2, width=12, heads=3, ffn_size=20, vocab=50, context=8)
TWO_STACKS = {"family": "encoder-decoder", "encoder_layers": 3}
LATENT = Latent(kv_rank=5, query_rank=0, qk_nope_size=4, qk_rope_size=2, v_size=3)


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
        ({"relative_buckets": 0}, "model.relative_buckets is 0; it must be at least 1"),
        (
            {"bias": True, "qkv_bias": True},
            "model.bias has the biases of model.qkv_bias already; leave model.qkv_bias out",
        ),
        (
            {"latent": replace(LATENT, kv_rank=0)},
            "model.latent.kv_rank is 0; it must be at least 1",
        ),
        (
            {"latent": replace(LATENT, qk_rope_size=3)},
            "rotary positions turn pairs, but model.latent.qk_rope_size is 3; make it even",
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
            TWO_STACKS | {"experts": Experts(4, 2, ffn_size=6)},
            "model.experts is for models of one stack; leave it out of an encoder-decoder",
        ),
        (
            {"experts": Experts(4, 5, ffn_size=6)},
            "model.experts.top_k 5 is more than model.experts.count; use at most 4",
        ),
        (
            {"experts": Experts(4, 2, ffn_size=6, shared=-1)},
            "model.experts.shared is -1; it must be at least 0",
        ),
        (
            {"experts": Experts(4, 2, ffn_size=6, first_dense=1, every=2)},
            "none of 2 layers has experts with model.experts.first_dense 1 and every 2; make one "
            "of the two smaller",
        ),
        (
            {"experts": Experts(4, 2, ffn_size=6), "bias": True},
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
    broken = replace(SMALL, layers=0, ffn_size=-1, vocab=0)
    assert len(check_shape(broken)) == 3
    assert len(check_shape(replace(SMALL, width=15, heads=3, kv_heads=2))) == 2


def test_odd_heads_are_fine_with_learned_positions():
    assert check_shape(replace(SMALL, head_size=5, positions="learned")) == []
