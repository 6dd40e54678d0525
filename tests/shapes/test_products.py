"""Operations against the papers' formulas, a list by hand and the table of weights."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.shapes.dims import Dim, Tokens, local
from howdah.shapes.parameters import parameters
from howdah.shapes.part import Part
from howdah.shapes.presets import PRESETS, preset
from howdah.shapes.products import (
    Pairs,
    Product,
    conventions,
    flops,
    forward_flops,
    operators,
    part_flops,
    train_flops,
)
from howdah.shapes.shape import Experts, Latent, ModelShape
from howdah.shapes.weights import parts, weights

SMALL = ModelShape(layers=2, width=12, heads=3, ffn_size=20, vocab=50, context=8)
GPT = replace(
    SMALL,
    ffn_size=48,
    feedforward="gelu",
    norm="layernorm",
    positions="learned",
    tie_embeddings=True,
)
T5 = replace(SMALL, family="encoder-decoder", encoder_layers=3, positions="relative")
BERT = replace(GPT, family="encoder", transform=True, token_types=2, embedding_norm=True)
SPARSE = replace(SMALL, layers=5, experts=Experts(8, 2, 6, shared=10, first_dense=1, every=2))
LATENT = replace(
    SMALL, latent=Latent(kv_rank=5, query_rank=7, qk_nope_size=4, qk_rope_size=2, v_size=3)
)
SHAPES = {
    "llama": SMALL,
    "gpt": GPT,
    "grouped": replace(SMALL, kv_heads=1, head_size=10, feedforward="relu"),
    "t5": T5,
    "bert": BERT,
    "experts": SPARSE,
    "latent": LATENT,
    "latent, whole query": replace(LATENT, latent=Latent(5, 0, 4, 2, 3)),
    **PRESETS,
}


# -- the list ------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_there_is_a_product_for_every_matrix_of_the_table(shape):
    """Of the embedding only a tied one is multiplied with: it is the head."""
    table = {}
    for weight in weights(shape):
        if weight.decay and weight.name != "embedding.weight":
            dims = [Dim(*dim) for dim in zip(weight.dims, weight.shape, strict=True)]
            table[weight.name.removesuffix(".weight")] = dims
    if shape.tie_embeddings:
        table["head"] = [Dim("vocab", shape.vocab), Dim("width", shape.width)]
    found = {}
    for part in parts(shape):
        for product in operators(shape, part):
            if isinstance(product, Product):
                name = product.name if part == "head" else f"{part}.{product.name}"
                stacked = [Dim("expert", product.groups)] if product.groups > 1 else []
                found[name] = [*stacked, product.columns, product.inner]
    assert found == table


def test_tokens_go_to_their_experts_alone():
    products = {product.name: product for product in operators(SPARSE, Part("layers", 2))}
    assert (products["experts.up"].copies, products["experts.up"].groups) == (2, 8)
    assert (products["shared.up"].copies, products["shared.up"].groups) == (1, 1)
    assert "feedforward.up" not in products
    assert [any(o.name == "router" for o in operators(SPARSE, p)) for p in parts(SPARSE)] == [
        *(False, False, False, True, False, True, False)
    ]


# -- by hand -------------------------------------------------------------------


def test_every_product_of_an_encoder_decoder_by_hand():
    """Source of 5 tokens, target of 3, in 2 rows: rows times inner times columns."""
    h, f, vocab, source, target = 12, 20, 50, 2 * 5, 2 * 3
    attention = [(h, h)] * 4
    feedforward = [(h, f), (h, f), (f, h)]
    encoder = [(source, *sizes) for sizes in [*attention, *feedforward]]
    encoder += [(2 * 5, h, 5), (2 * 5, 5, h)]  # all heads together; both ways
    decoder = [(target, *sizes) for sizes in [*attention, *feedforward, *attention[:2]]]
    decoder += [(source, h, h), (source, h, h)]  # cross attention's keys and values
    decoder += [(target, h, 3), (target, 3, h), (target, h, 5), (target, 5, h)]
    by_hand = 3 * _listed(encoder) + 2 * _listed(decoder) + _listed([(target, h, vocab)])
    of = local(T5, Tokens(2, 3, source=5))
    listed = [operator for part in parts(T5) for operator in operators(T5, part)]
    assert sum(flops(operator, of, causal=False) for operator in listed) == by_hand
    # only the decoder's own pairs are masked: half of 2 rows · 3 · 3 · 12 numbers · 4, 2 blocks
    causal = sum(flops(operator, of, causal=True) for operator in listed)
    assert by_hand - causal == 2 * (2 * 3 * 3 * 12 * 4) / 2


def test_every_product_of_experts_and_latents_by_hand():
    h, f = 12, 20
    dense = [(h, h)] * 4 + [(h, f), (h, f), (f, h)]
    sparse = [(h, h)] * 4 + [(h, 8)] + [(h, 6), (h, 6), (6, h)] * 2 + [(h, 10), (h, 10), (10, h)]
    listed = 3 * [(1, *sizes) for sizes in dense] + 2 * [(1, *sizes) for sizes in sparse]
    products = _listed(listed) + 5 * 4 * 16 * h + _listed([(1, h, 50)])
    assert forward_flops(SPARSE, 16, causal=False) == products
    latent = [(h, 7), (7, 3 * 6), (h, 5 + 2), (5, 3 * (4 + 3)), (3 * 3, h)]
    latent += [(h, f), (h, f), (f, h)]
    pairs = 2 * 16 * 3 * (6 + 3)  # 16 keys, 3 heads, of 6 numbers in and 3 out
    products = 2 * (_listed([(1, *sizes) for sizes in latent]) + pairs) + _listed([(1, h, 50)])
    assert forward_flops(LATENT, 16, causal=False) == products


def _listed(products):
    return sum(2 * m * k * n for m, k, n in products)


@given(
    kv_heads=st.sampled_from([1, 2, 3, 6]),
    head_size=st.integers(1, 9),
    ffn=st.integers(1, 50),
    feedforward=st.sampled_from(["swiglu", "geglu", "gelu", "relu"]),
    sequence=st.integers(1, 99),
)
def test_a_decoder_in_closed_form(kv_heads, head_size, ffn, feedforward, sequence):
    """L·(2·[h(a + 2k)d + adh + n·h·f] + 4·s·a·d·ρ) + 2·h·V for each token."""
    h, a, k, d, vocab, layers = 12, 6, kv_heads, head_size, 50, 3
    shape = ModelShape(
        layers, h, a, ffn, vocab, 8, kv_heads=k, head_size=d, feedforward=feedforward
    )
    matrices = h * (a + 2 * k) * d + a * d * h
    matrices += (3 if feedforward in ("swiglu", "geglu") else 2) * h * ffn
    for causal, share in ((True, 0.5), (False, 1.0)):
        pairs = 4 * sequence * a * d * share
        expected = layers * (2 * matrices + pairs) + 2 * vocab * h
        assert forward_flops(shape, sequence, causal=causal) == expected
        assert train_flops(shape, sequence, causal=causal) == 3 * expected


# -- the papers' formulas ------------------------------------------------------


def test_gpt_3_took_six_flops_a_parameter_and_token():
    """https://arxiv.org/abs/2005.14165, table D.1: 174.6 billion parameters, 3.14e23."""
    shape = preset("gpt3-175b")
    total = conventions(shape, 2048).by_parameters * 300e9
    assert total == 6 * parameters(shape).total * 300e9
    assert total == pytest.approx(3.14e23, rel=1e-3)
    assert total == pytest.approx(
        6 * 175e9 * 300e9, rel=3e-3
    )  # 3.15e23, the name taken at its word


@pytest.mark.parametrize("sequence", [1, 512, 2048])
def test_megatron_s_model_flops(sequence):
    """https://arxiv.org/abs/2205.05198, appendix A."""
    shape = preset("gpt3-175b")
    s, layers, h, vocab = sequence, shape.layers, shape.width, shape.vocab
    expected = 72 * layers * h**2 * (1 + s / (6 * h) + vocab / (12 * h * layers))
    assert conventions(shape, s).model == pytest.approx(expected, rel=1e-14)


def test_megatron_s_flops_with_full_recomputation():
    """https://arxiv.org/abs/2104.04473, equation 3: the blocks' forward pass runs twice."""
    shape, s = preset("gpt3-175b"), 2048
    layers, h, vocab = shape.layers, shape.width, shape.vocab
    expected = 96 * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
    assert train_flops(shape, s, causal=False, recompute="full") == pytest.approx(expected)


def test_full_attention_costs_what_the_palm_paper_says():
    """https://arxiv.org/abs/2204.02311, appendix B: 6N + 12·L·heads·head size·s a token."""
    shape, sequence = preset("llama2-7b"), 4096
    norms = (2 * shape.layers + 1) * shape.width
    matrices = parameters(shape).total - parameters(shape).embedding - norms
    expected = 6 * matrices + 12 * shape.layers * shape.heads * shape.d * sequence
    assert train_flops(shape, sequence, causal=False) == expected


# -- conventions, recomputation, layouts ----------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_conventions_differ_by_what_they_say(shape):
    s = 16
    of = local(shape, Tokens(1, s, s if shape.family == "encoder-decoder" else 0))
    pairs = {
        causal: sum(
            flops(operator, of, causal=causal) / s
            for part in parts(shape)
            for operator in operators(shape, part)
            if isinstance(operator, Pairs)
        )
        for causal in (True, False)
    }
    plain = conventions(shape, s)
    assert plain.hardware == plain.causal_model
    assert plain.model - plain.causal_model == pytest.approx(3 * (pairs[False] - pairs[True]))
    selective = conventions(shape, s, "selective").hardware
    assert selective - plain.hardware == pytest.approx(pairs[True])
    blocks = forward_flops(shape, s, causal=True) - part_flops(shape, Part("head"), s) / s
    assert conventions(shape, s, "full").hardware - plain.hardware == pytest.approx(blocks)


def test_masks_save_half_in_decoders_and_nothing_in_encoders():
    saved = forward_flops(GPT, 64, causal=False) - forward_flops(GPT, 64, causal=True)
    assert saved == GPT.layers * 2 * 64 * GPT.width
    assert forward_flops(BERT, 64, causal=False) == forward_flops(BERT, 64, causal=True)


def test_of_many_experts_only_the_chosen_count():
    assert conventions(SPARSE, 16).by_parameters == 6 * parameters(SPARSE).active
    more = replace(SPARSE, experts=replace(SPARSE.experts, count=16))
    router = 2 * 2 * (8 * 12)  # two blocks have one, 8 rows more
    assert forward_flops(more, 16, causal=True) - forward_flops(SPARSE, 16, causal=True) == router


@pytest.mark.parametrize("shape", [GPT, T5, SPARSE, LATENT], ids=["gpt", "t5", "moe", "mla"])
def test_even_layouts_share_the_work_out(shape):
    """Router and the way down to the latents are not cut: each rank of tp does them all."""
    shape = replace(shape, heads=6, vocab=48)
    whole = local(shape, Tokens(2, 8, source=8))
    part = local(shape, Tokens(2, 8, source=8), tp=2, cp=4)
    copied = ("router", "attention.q_down", "attention.kv_down")
    for operator in (o for p in parts(shape) for o in operators(shape, p)):
        ranks = 4 if operator.name in copied else 8
        share = flops(operator, part, causal=True)
        assert ranks * share == flops(operator, whole, causal=True), operator.name
