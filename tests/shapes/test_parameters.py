"""Parameters by hand, by closed formulas and as the sum of the table of weights."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from random_shapes import shapes

from howdah.shapes.check import check_shape
from howdah.shapes.parameters import Parameters, parameters
from howdah.shapes.presets import PRESETS, preset
from howdah.shapes.shape import Experts, Latent, ModelShape
from howdah.shapes.weights import weights

SMALL = ModelShape(layers=2, width=12, heads=3, ffn_size=20, vocab=50, context=8)
TWO_STACKS = {"family": "encoder-decoder", "encoder_layers": 3}
LATENT = Latent(kv_rank=5, query_rank=0, qk_nope_size=4, qk_rope_size=2, v_size=3)

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
    "tied": {"tie_embeddings": True},
    "query-key norm": {"qk_norm": True},
    "two stacks": TWO_STACKS,
    "two stacks, relative": TWO_STACKS | {"positions": "relative"},
    "token types": {"token_types": 2},
    "embedding norm": {"embedding_norm": True},
    "transform": {"transform": True},
    "latent": {"latent": LATENT},
    "latent queries": {"latent": replace(LATENT, query_rank=7)},
    "experts": {"experts": Experts(4, 2, ffn_size=6)},
    "experts in every second block": {"experts": Experts(4, 2, ffn_size=6, shared=3, every=2)},
}


# -- by hand -------------------------------------------------------------------


def test_parameters_by_hand():
    count = parameters(SMALL)
    assert count.embedding == count.head == 50 * 12
    assert count.attention == 2 * 4 * 12 * 12
    assert count.feedforward == 2 * 3 * 12 * 20
    assert count.norms == (2 * 2 + 1) * 12
    assert (count.positions, count.router, count.experts) == (0, 0, 0)
    assert count.total == count.active == 600 + 2 * (576 + 720 + 24) + 12 + 600


def test_parameters_of_a_mixture_by_hand():
    count = parameters(
        replace(SMALL, layers=3, experts=Experts(8, 2, ffn_size=6, shared=5, first_dense=1))
    )
    assert count.feedforward == 3 * 12 * 20 + 2 * 3 * 12 * 5
    assert count.router == 2 * 8 * 12
    assert count.experts == 2 * 8 * 3 * 12 * 6
    assert count.total - count.active == 2 * 6 * 3 * 12 * 6


def test_a_head_with_its_own_size_leaves_the_width_alone():
    shape = replace(SMALL, heads=3, head_size=10)
    assert shape.d == 10
    assert parameters(shape).attention == 2 * (12 * (3 + 2 * 3) * 10 + 3 * 10 * 12)


def test_the_textbook_formulas():
    """V·d + L(4d² + 2·d·f) without biases; with f = 4d and the feed-forward's, L(12d² + 5d)."""
    vocab, layers, d, f = 50, 2, 12, 20
    plain = parameters(replace(SMALL, feedforward="relu", tie_embeddings=True))
    assert plain.total - plain.norms == vocab * d + layers * (4 * d**2 + 2 * d * f)
    biased = parameters(
        replace(SMALL, feedforward="relu", ffn_size=4 * d, bias=True, tie_embeddings=True)
    )
    of_attention = layers * 4 * d  # which the second formula leaves out
    assert biased.total - biased.norms - of_attention == vocab * d + layers * (12 * d**2 + 5 * d)


# -- by closed formulas, and as the sum of the table ---------------------------


def closed_form(shape):
    """Parameters by component, without a table of weights.

    Attention h(a + 2k)d + adh, feed-forward 2hf or gated 3hf, norms h (RMS) or 2h each;
    biases where the model has them; embedding Vh, and Vh again for a head of its own. A decoder
    block beside an encoder attends twice, with a norm each; a block with experts has E narrow
    feed-forwards and a router hE, and a shared one a gate h.
    """
    h, experts = shape.width, shape.experts
    norm = h if shape.norm == "rmsnorm" else 2 * h
    stacks = 2 if shape.family == "encoder-decoder" else 1
    blocks, crossing = shape.layers + shape.encoder_layers, shape.layers * (stacks - 1)
    inner = (3 if shape.gated else 2) * h  # for each number of a feed-forward's inside
    dense = inner * shape.ffn_size
    if shape.bias:
        dense += (2 if shape.gated else 1) * shape.ffn_size + h
    shared = router = routed = chosen = sparse = 0
    if experts is not None:
        sparse = max(0, shape.layers - experts.first_dense) // experts.every
        shared, router = inner * experts.shared, h * experts.count
        shared += h if experts.shared_gate else 0
        routed, chosen = (
            inner * experts.ffn_size * experts.count,
            inner * experts.ffn_size * experts.top_k,
        )
    tables = shape.token_types * h
    tables += (shape.context + shape.first_position) * h if shape.positions == "learned" else 0
    tables += stacks * shape.relative_buckets * shape.heads if shape.positions == "relative" else 0
    ends = stacks * (shape.norm_at == "before") + shape.embedding_norm
    head = 0 if shape.tie_embeddings else shape.vocab * h
    head += h * h + h + norm + shape.vocab if shape.transform else 0
    found = Parameters(
        embedding=shape.vocab * h,
        positions=tables,
        attention=(blocks + crossing) * attention_in_closed_form(shape),
        feedforward=(blocks - sparse) * dense + sparse * shared,
        router=sparse * router,
        experts=sparse * routed,
        norms=(2 * blocks + crossing + ends) * norm,
        head=head,
        active=0,
    )
    return replace(found, active=found.total - sparse * (routed - chosen))


def attention_in_closed_form(shape):
    h, a, k, d = shape.width, shape.heads, shape.k, shape.d
    if (latent := shape.latent) is not None:
        query = h * a * d
        if latent.query_rank:
            query = latent.query_rank * (h + 1 + a * d)
        key = h * (latent.kv_rank + latent.qk_rope_size) + latent.kv_rank
        unfold = latent.kv_rank * a * (latent.qk_nope_size + latent.v_size)
        return query + key + unfold + a * latent.v_size * h
    count = h * (a + 2 * k) * d + a * d * h
    count += (a + 2 * k) * d if shape.bias or shape.qkv_bias else 0
    count += h if shape.bias else 0
    return count + (2 * d if shape.qk_norm else 0)


@pytest.mark.parametrize("change", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_choice_changes_the_count(change):
    shape = replace(SMALL, **change)
    assert check_shape(shape) == []
    assert parameters(shape) == closed_form(shape) != closed_form(SMALL)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_in_closed_form(name):
    assert parameters(preset(name)) == closed_form(preset(name))


@settings(max_examples=300)
@given(shapes())
def test_every_model_in_closed_form(shape):
    assert parameters(shape) == closed_form(shape)
    assert parameters(shape).total == sum(weight.elements for weight in weights(shape))


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
