"""The table of weights: names, units, decay, dims, and the spread each weight starts with."""

from collections import Counter
from dataclasses import replace
from math import sqrt

import pytest
from hypothesis import given
from random_shapes import shapes

from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts, Latent, ModelShape
from howdah.shapes.weights import SPREAD, part_kinds, part_weights, parts, parts_of, weights

SHAPE = ModelShape(layers=2, width=12, heads=6, kv_heads=2, ffn_size=20, vocab=50, context=8)
T5 = replace(SHAPE, family="encoder-decoder", encoder_layers=3, positions="relative", kv_heads=None)
MIXTURE = replace(SHAPE, experts=Experts(count=4, top_k=2, ffn_size=6, shared=10, first_dense=1))
DEEPSEEK = replace(
    SHAPE,
    kv_heads=None,
    latent=Latent(kv_rank=5, query_rank=7, qk_nope_size=3, qk_rope_size=2, v_size=4),
)


def table(shape):
    return {weight.name: weight for weight in weights(shape)}


def drawn(shape, *units):
    """The rows of some units as they are drawn below."""
    return [
        f"{weight.name} {','.join(weight.dims)} {','.join(map(str, weight.shape))} "
        f"{'yes' if weight.decay else 'no'}"
        for weight in weights(shape)
        if weight.unit in units
    ]


def rows(drawing):
    return [" ".join(line.split()) for line in drawing.strip().splitlines()]


# -- what there is, drawn ------------------------------------------------------


def test_a_block():
    assert drawn(SHAPE, "layers.1") == rows("""
        layers.1.attention_norm.weight    width        12     no
        layers.1.attention.q.weight       query,width  12,12  yes
        layers.1.attention.k.weight       key,width    4,12   yes
        layers.1.attention.v.weight       key,width    4,12   yes
        layers.1.attention.o.weight       width,query  12,12  yes
        layers.1.feedforward_norm.weight  width        12     no
        layers.1.feedforward.gate.weight  ffn,width    20,12  yes
        layers.1.feedforward.up.weight    ffn,width    20,12  yes
        layers.1.feedforward.down.weight  width,ffn    12,20  yes
    """)


def test_the_ends_of_a_decoder():
    assert drawn(SHAPE, "embedding", "head") == rows("""
        embedding.weight  vocab,width  50,12  yes
        norm.weight       width        12     no
        head.weight       vocab,width  50,12  yes
    """)


def test_the_ends_of_bert_have_no_pooler():
    bert = replace(
        preset("bert-base"), layers=1, vocab=50, width=12, heads=3, context=8, ffn_size=20
    )
    assert drawn(bert, "tied", "embedding", "head") == rows("""
        embedding.weight       vocab,width       50,12  yes
        head.bias              vocab             50     no
        positions.weight       position,width    8,12   no
        token_types.weight     token_type,width  2,12   no
        embedding_norm.weight  width             12     no
        embedding_norm.bias    width             12     no
        transform.weight       width,width       12,12  yes
        transform.bias         width             12     no
        transform_norm.weight  width             12     no
        transform_norm.bias    width             12     no
    """)


def test_the_decoder_of_an_encoder_decoder_attends_twice():
    assert drawn(T5, "relative.decoder", "layers.0") == rows("""
        relative.decoder.weight           bucket,query  32,6   no
        layers.0.attention_norm.weight    width         12     no
        layers.0.attention.q.weight       query,width   12,12  yes
        layers.0.attention.k.weight       key,width     12,12  yes
        layers.0.attention.v.weight       key,width     12,12  yes
        layers.0.attention.o.weight       width,query   12,12  yes
        layers.0.cross_norm.weight        width         12     no
        layers.0.cross.q.weight           query,width   12,12  yes
        layers.0.cross.k.weight           key,width     12,12  yes
        layers.0.cross.v.weight           key,width     12,12  yes
        layers.0.cross.o.weight           width,query   12,12  yes
        layers.0.feedforward_norm.weight  width         12     no
        layers.0.feedforward.gate.weight  ffn,width     20,12  yes
        layers.0.feedforward.up.weight    ffn,width     20,12  yes
        layers.0.feedforward.down.weight  width,ffn     12,20  yes
    """)


def test_the_encoder_ends_in_a_norm_of_its_own():
    middle, last = drawn(T5, "encoder.1"), drawn(T5, "encoder.2")
    assert not any("cross" in row for row in middle)
    assert [row.replace("encoder.2", "encoder.1") for row in last[:-1]] == middle
    assert last[-1] == "encoder_norm.weight width 12 no"


def test_a_block_with_experts_has_a_router_and_stacked_experts():
    assert drawn(MIXTURE, "layers.1")[5:] + drawn(MIXTURE, "layers.1.experts") == rows("""
        layers.1.feedforward_norm.weight  width                    12      no
        layers.1.router.weight            choice,width             4,12    yes
        layers.1.shared.gate.weight       ffn,width                10,12   yes
        layers.1.shared.up.weight         ffn,width                10,12   yes
        layers.1.shared.down.weight       width,ffn                12,10   yes
        layers.1.experts.gate.weight      expert,expert_ffn,width  4,6,12  yes
        layers.1.experts.up.weight        expert,expert_ffn,width  4,6,12  yes
        layers.1.experts.down.weight      expert,width,expert_ffn  4,12,6  yes
    """)


def test_the_first_blocks_may_stay_dense():
    assert drawn(MIXTURE, "layers.0") == drawn(SHAPE, "layers.0")
    assert drawn(MIXTURE, "layers.0.experts") == []


def test_latent_attention_goes_down_to_the_ranks_and_up_to_the_heads():
    assert drawn(DEEPSEEK, "layers.0")[1:-4] == rows("""
        layers.0.attention.q_down.weight   rank,width   7,12   yes
        layers.0.attention.q_norm.weight   rank         7      no
        layers.0.attention.q_up.weight     query,rank   30,7   yes
        layers.0.attention.kv_down.weight  rank,width   7,12   yes
        layers.0.attention.kv_norm.weight  rank         5      no
        layers.0.attention.kv_up.weight    query,rank   42,5   yes
        layers.0.attention.o.weight        width,query  12,24  yes
    """)


def test_without_a_query_rank_queries_come_straight_from_the_stream():
    straight = replace(DEEPSEEK, latent=replace(DEEPSEEK.latent, query_rank=0))
    assert drawn(straight, "layers.0")[1] == "layers.0.attention.q.weight query,width 30,12 yes"
    assert not any("q_" in name for name in table(straight))


# -- single choices ------------------------------------------------------------


def test_biases_have_the_dim_of_the_rows_they_are_added_to():
    biased = table(replace(SHAPE, bias=True))
    bias = biased["layers.0.attention.k.bias"]
    assert (bias.dims, bias.shape, bias.decay) == (("key",), (4,), False)
    assert biased["layers.0.feedforward.down.bias"].dims == ("width",)


def test_query_key_and_value_alone_may_have_biases():
    names = [name for name in table(replace(SHAPE, qkv_bias=True)) if name.endswith(".bias")]
    assert names == [f"layers.{i}.attention.{p}.bias" for i in range(2) for p in ("q", "k", "v")]


def test_query_and_key_norms_have_one_size_for_all_heads():
    found = table(replace(SHAPE, qk_norm=True))
    for name in ("q_norm", "k_norm"):
        weight = found[f"layers.0.attention.{name}.weight"]
        assert (weight.dims, weight.shape, weight.decay) == (("head",), (2,), False)


# -- parts and units -----------------------------------------------------------


def test_the_parts_of_a_decoder_and_of_an_encoder_decoder():
    assert parts(SHAPE) == ("embedding", "layers.0", "layers.1", "head")
    assert parts(T5) == (
        *("embedding", "encoder.0", "encoder.1", "encoder.2"),
        *("target", "layers.0", "layers.1", "head"),
    )


def test_where_units_are_used():
    tied = replace(T5, tie_embeddings=True)
    assert parts_of("tied", tied) == ("embedding", "target", "head")
    assert parts_of("embedding", T5) == ("embedding", "target")
    assert parts_of("relative.encoder", T5) == ("encoder.0", "encoder.1", "encoder.2")
    assert parts_of("relative.decoder", T5) == ("layers.0", "layers.1")
    assert parts_of("layers.1", T5) == ("layers.1",)
    assert parts_of("head", T5) == ("head",)
    assert parts_of("tied", replace(SHAPE, tie_embeddings=True)) == ("embedding", "head")
    assert parts_of("layers.1.experts", MIXTURE) == ("layers.1",)


def test_an_encoder_alone_looks_both_ways():
    encoder = replace(SHAPE, family="encoder", positions="relative")
    assert parts_of("relative.encoder", encoder) == ("layers.0", "layers.1")
    assert parts_of("relative.decoder", encoder) == ()
    assert "relative.encoder.weight" in table(encoder)


def test_tied_weights_are_one_weight_in_a_unit_of_its_own():
    shape = replace(SHAPE, tie_embeddings=True, positions="learned")
    units = list(dict.fromkeys(weight.unit for weight in weights(shape)))
    assert units == ["tied", "embedding", "layers.0", "layers.1", "head"]
    assert [w.name for w in weights(shape) if w.unit == "tied"] == ["embedding.weight"]
    assert "head.weight" not in table(shape)


@given(shapes())
def test_the_order_is_that_of_the_forward_pass(shape):
    order = parts(shape)
    first = [order.index(parts_of(weight.unit, shape)[0]) for weight in weights(shape)]
    assert first == sorted(first)


@given(shapes())
def test_units_are_used_at_parts_of_the_model_and_every_part_uses_some(shape):
    used = {part for weight in weights(shape) for part in parts_of(weight.unit, shape)}
    assert used == set(parts(shape))


@given(shapes())
def test_parts_of_a_kind_have_the_same_rows(shape):
    def rows(part):
        found = part_weights(shape, part)
        return tuple(replace(row, name=row.name.removeprefix(part), unit="") for row in found)

    counted = Counter()
    for part, number in part_kinds(shape).items():
        counted[rows(part)] += number
    assert counted == Counter(map(rows, parts(shape)))


# -- how weights start, and which decay ----------------------------------------


@given(shapes())
def test_names_are_unique_and_every_dim_has_a_size(shape):
    found = weights(shape)
    assert len({weight.name for weight in found}) == len(found)
    assert all(len(weight.dims) == len(weight.shape) for weight in found)
    assert all(size >= 1 for weight in found for size in weight.shape)


@given(shapes())
def test_matrices_decay_and_nothing_else_does(shape):
    looked_up = ("positions", "token_types", "relative")
    for weight in weights(shape):
        matrix = len(weight.shape) >= 2 and not weight.name.startswith(looked_up)
        assert weight.decay is matrix, weight.name


@given(shapes())
def test_norms_start_at_one_biases_at_zero_and_the_rest_at_random(shape):
    for weight in weights(shape):
        constant = 1.0 if weight.name.endswith("norm.weight") else 0.0
        assert weight.mean == constant, weight.name
        assert (weight.spread == 0) is (len(weight.shape) == 1), weight.name


def test_weights_start_smaller_where_they_write_to_the_residual_stream():
    start = table(replace(MIXTURE, layers=3))
    assert start["layers.1.attention.q.weight"].spread == SPREAD == 0.02
    for name in ("attention.o", "shared.down", "experts.down"):
        assert start[f"layers.1.{name}.weight"].spread == pytest.approx(0.02 / sqrt(6))
    assert start["layers.0.feedforward.down.weight"].spread == pytest.approx(0.02 / sqrt(6))


def test_weights_behind_norms_start_as_all_others_do():
    """As in transformers' BERT; smaller ones left it at the frequencies of its tokens for long."""
    start = table(preset("bert-base"))
    for name in ("attention.o", "feedforward.down"):
        assert start[f"layers.1.{name}.weight"].spread == SPREAD


def test_each_stack_counts_its_own_writers():
    start = table(T5)
    assert start["encoder.0.attention.o.weight"].spread == pytest.approx(0.02 / sqrt(2 * 3))
    assert start["layers.0.cross.o.weight"].spread == pytest.approx(0.02 / sqrt(3 * 2))
