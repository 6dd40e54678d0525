"""Lists of saved tensors against the papers' closed formulas and sums by hand.

That `howdah()` is what the real model keeps is proved in tests/parallel/test_saved_bytes.py.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus, make_plan
from howdah.shapes.activations import CLASSIC, FLASH, bytes_of, howdah, saved, shared
from howdah.shapes.dims import Tokens, local
from howdah.shapes.part import Part
from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts, Latent, ModelShape
from howdah.shapes.weights import parts
from howdah.sim.kernels import kernels_of

LLAMA = ModelShape(layers=2, width=16, heads=4, kv_heads=2, ffn_size=24, vocab=40, context=32)
GPT = replace(
    LLAMA, kv_heads=4, ffn_size=64, feedforward="gelu", norm="layernorm", positions="learned"
)
T5 = replace(LLAMA, family="encoder-decoder", encoder_layers=3, positions="relative", kv_heads=4)
BERT = replace(GPT, family="encoder", transform=True, embedding_norm=True, norm_at="after")
SPARSE = replace(LLAMA, experts=Experts(8, 2, 6, shared=10, first_dense=1))
LATENT = replace(
    LLAMA, kv_heads=None, latent=Latent(6, 8, qk_nope_size=4, qk_rope_size=2, v_size=3)
)
SHAPES = {"llama": LLAMA, "gpt": GPT, "t5": T5, "bert": BERT, "moe": SPARSE, "mla": LATENT}
KERNELS = {"classic": CLASSIC, "flash": FLASH, "howdah": howdah(compute=2, dropout=True)}


def per_token(shape, part, kernels, recompute="none", **layout):
    """Bytes of one token of a sequence of 1, in 16 bits."""
    return bytes_of(saved(shape, part, kernels, recompute), local(shape, Tokens(1, 1, 1), **layout))


# -- classic: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198 ----------


@given(
    b=st.integers(1, 3),
    s=st.integers(1, 5).map(lambda n: 4 * n),
    heads=st.integers(1, 3).map(lambda n: 4 * n),
    d=st.integers(1, 9),
    t=st.sampled_from([1, 2, 4]),
)
def test_a_block_of_gpt_in_closed_form(b, s, heads, d, t):
    """Equations 1 to 6: no parallelism, tensor, sequence, selective and full recomputation."""
    a, h = heads, heads * d
    shape = replace(GPT, width=h, heads=a, kv_heads=a, ffn_size=4 * h)

    def block(recompute="none", **layout):
        kept = saved(shape, Part("layers", 1), CLASSIC, recompute)
        return bytes_of(kept, local(shape, Tokens(b, s), **layout))

    assert block() == s * b * (34 * h + 5 * a * s)
    assert t * block(tp=t) == s * b * (10 * t * h + 24 * h + 5 * a * s)
    assert t * block(tp=t, sp=True) == s * b * (34 * h + 5 * a * s)
    assert t * block("selective", tp=t, sp=True) == s * b * 34 * h
    assert block("full", tp=t) == 2 * s * b * h


def test_both_ends_of_gpt_in_closed_form():
    """Section 4.3: a mask behind the embedding; 4·s·b·h·(1 + V/h) in the head."""
    h, vocab = GPT.width, GPT.vocab
    assert per_token(GPT, Part("embedding"), CLASSIC) == h
    assert per_token(GPT, Part("head"), CLASSIC) == 4 * h + 4 * vocab
    assert 4 * per_token(GPT, Part("head"), CLASSIC, tp=4) == 4 * (4 * h) + 4 * vocab


@pytest.mark.parametrize(
    ("recompute", "terabytes", "digit"),
    [("none", 430, 1), ("selective", 128, 1), ("full", 7.55, 0.01)],
)
def test_a_batch_of_gpt_3_keeps_hundreds_of_terabytes(recompute, terabytes, digit):
    """3.2 million tokens in sequences of 2048; 4.48 TB for each of 96 blocks."""
    shape = preset("gpt3-175b")
    of = local(shape, Tokens(1, 2048))
    rows = 3.2e6 / 2048
    block = rows * bytes_of(saved(shape, Part("layers", 0), CLASSIC, recompute), of)
    assert shape.layers * block == pytest.approx(terabytes * 1e12, abs=digit / 2 * 1e12)
    if recompute == "none":
        assert block == pytest.approx(4.48e12, abs=0.005e12)


# -- flash, by operator ----------------------------------------------------------


@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize("sp", [False, True])
def test_a_block_of_llama_with_flash_attention(t, sp):
    h, a, k, d, f = 16, 4, 2, 4, 24
    cut = 2 * a * d + 4 * k * d + 2 * a * d + 4 * a + 4 * f + 2 * f
    norms = 2 * h + 2 * h + 2 * h + 2 * h
    tokens = 2 * 8
    block = bytes_of(
        saved(LLAMA, Part("layers", 0), FLASH), local(LLAMA, Tokens(2, 16), tp=t, cp=2, sp=sp)
    )
    assert block == tokens * (norms // (t if sp else 1) + cut // t)
    eager = replace(FLASH, activated=True)
    assert per_token(LLAMA, Part("layers", 0), eager) == norms + cut + 2 * f


def test_heads_with_whole_logits_keep_them_three_times():
    """In 16 bits, in float32 for the softmax, and their gradient."""
    assert per_token(LLAMA, Part("head"), FLASH) == 2 * 16 + 2 * 16 + 40 * (2 + 4 + 4)
    assert per_token(LLAMA, Part("head"), FLASH, tp=4) == 2 * 16 + 2 * 16 + 10 * (2 + 4 + 4)


def test_experts_keep_a_copy_of_a_token_for_each_they_see():
    h, number, chosen, f, shared_f = 16, 8, 2, 6, 10
    dense, sparse = (per_token(SPARSE, Part("layers", layer), FLASH) for layer in range(2))
    router = 4 * number + (4 + 8) * chosen
    routed = chosen * (2 * h + 3 * 2 * f + 2 * h)
    assert sparse - dense == router + routed + 3 * 2 * shared_f - 3 * 2 * 24


def test_latent_attention_keeps_latents_and_what_unfolds_from_them():
    ranks = (8 + 8) + (6 + 2) + 6
    heads = 4 * ((4 + 2) + (4 + 2) + 3 + 3)
    plain = per_token(LLAMA, Part("layers", 0), FLASH)
    assert per_token(LATENT, Part("layers", 0), FLASH) - plain == 2 * (ranks + heads) - 2 * (
        16 * 2 + 8 * 2
    )


def test_an_encoder_decoder_counts_source_and_target_apart():
    h, f, a = 16, 24, 4
    block = 2 * (4 * h + 4 * h + 3 * f) + 4 * a
    of = local(T5, Tokens(1, 3, source=5))
    assert bytes_of(saved(T5, Part("encoder", 0), FLASH), of) == 5 * block
    cross = 3 * (2 * 2 * h + 2 * 2 * h + 4 * a) + 5 * 2 * 2 * h  # k and v are the source's
    assert bytes_of(saved(T5, Part("layers", 0), FLASH), of) == 3 * block + cross
    normed = saved(replace(T5, qk_norm=True), Part("layers", 0), FLASH)
    more = 2 * h * (3 + 3 + 3 + 5)  # in front of q, k, cross q and (the source) cross k
    assert bytes_of(normed, of) == 3 * block + cross + more
    last_norm = 5 * 2 * h
    assert bytes_of(saved(T5, Part("encoder", 2), FLASH), of) == 5 * block + last_norm
    assert bytes_of(shared(T5, FLASH), of) == 5 * 2 * h  # what every cross attention reads
    masked = replace(FLASH, dropout=True)
    assert bytes_of(saved(T5, Part("embedding"), masked), of) == 5 * h
    assert bytes_of(saved(T5, Part("target"), masked), of) == 3 * h


def test_probabilities_between_source_and_target():
    """Classic attention: 2 bytes, a mask and 2 bytes for each pair and head."""
    few, more = (
        {
            part: sum(
                bytes_of([one], local(T5, Tokens(1, 3, source)))
                for one in saved(T5, part, CLASSIC)
                if one.core
            )
            for part in (Part("encoder", 0), Part("layers", 0))
        }
        for source in (5, 6)
    )
    assert few == {"encoder.0": 5 * 4 * 5 * 5, "layers.0": 5 * 4 * (3 * 3 + 3 * 5)}
    assert more == {"encoder.0": 5 * 4 * 6 * 6, "layers.0": 5 * 4 * (3 * 3 + 3 * 6)}


def test_a_head_with_a_transform():
    """BERT: its input, the GELU's, the norm's, and the matrix'; no norm in front."""
    assert per_token(BERT, Part("head"), CLASSIC) == 4 * 2 * 16 + 4 * 40
    assert per_token(BERT, Part("embedding"), CLASSIC) == 2 * 16 + 16


# -- all of them -----------------------------------------------------------------


@pytest.mark.parametrize("kernels", KERNELS.values(), ids=KERNELS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_what_recomputation_leaves(shape, kernels):
    for part in parts(shape):
        kept, selective, full = (
            saved(shape, part, kernels, recompute) for recompute in ("none", "selective", "full")
        )
        assert len({one.name for one in kept}) == len(kept)
        if "." not in part:
            assert kept == selective == full
            continue
        assert set(full) - set(kept) == {one for one in full if one.name == "block input"}
        assert [one for one in kept if one not in selective] == [one for one in kept if one.core]
        assert len(full) < len(selective) < len(kept)


@pytest.mark.parametrize("shape", [LLAMA, GPT, T5, BERT], ids=["llama", "gpt", "t5", "bert"])
def test_sequence_parallelism_leaves_no_tensor_whole(shape):
    """Each rank of tp2 cp2 keeps a quarter, in every part but for norms' weights."""
    whole = local(shape, Tokens(2, 8, source=4))
    part = local(shape, Tokens(2, 8, source=4), tp=2, cp=2, sp=True)
    for name in parts(shape):
        for kernels in (FLASH, CLASSIC):
            kept = saved(shape, name, kernels)
            assert 4 * bytes_of(kept, part) == bytes_of(kept, whole)


def test_formats():
    """Probabilities stay narrow, statistics are float32 at least, masks are bytes."""
    kept = {one.name: one for one in saved(GPT, Part("layers", 0), howdah(compute=8, dropout=True))}
    of = local(GPT, Tokens(1, 1))
    sizes = {
        name: [bytes_of([kept[name]], of, compute=compute) for compute in (2, 4, 8)]
        for name in ("attention norm scale", "q", "attention dropout")
    }
    assert sizes == {
        "attention norm scale": [4, 4, 8],
        "q": [32, 64, 128],
        "attention dropout": [16, 16, 16],
    }


# -- a GPU -------------------------------------------------------------------------


def test_a_token_of_a_llama_block_on_a_gpu_by_hand():
    """h = 16, a·d = 16, k·d = 8, f = 24, 16 bits: inputs of two norms and of two sub-layers, q, k,
    v, the output, gate, up and their product; a scale for each norm, and 4 log-sum-exps.
    """
    card = howdah(compute=2, packed=True, card=True)
    by_hand = 2 * (4 * 16 + 16 + 2 * 8 + 16 + 3 * 24) + 4 * (2 + 4)
    assert per_token(LLAMA, Part("layers", 1), card) == by_hand
    on_cpu = per_token(LLAMA, Part("layers", 1), howdah(compute=2, packed=True))
    assert on_cpu - by_hand == 2 * (24 + 2 * (16 - 8) + 16)  # activation, repeated heads, a copy


def test_a_plan_for_gpus_is_one_of_their_kernels():
    layout, batch = parse_layout("dp1 x1"), Batch(global_batch=1, micro_batch=1)
    plan = make_plan(LLAMA, layout, batch, sequence=8, method=Method("bf16"))
    assert kernels_of(for_gpus(plan)) == howdah(compute=2, packed=True, card=True)
    assert kernels_of(plan) == howdah(compute=2, packed=True)
