"""The list of `shapes/activations.py` is what the real model keeps: equal to the byte."""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_model import random_model, random_tokens

from howdah.model import loss
from howdah.model.documents import cut_to_tensors
from howdah.model.islands import Islands
from howdah.model.loss import cross_entropy_sum
from howdah.model.moe import Balancing
from howdah.model.noise import Noise
from howdah.parallel.saved_bytes import SavedTensorMeter
from howdah.plan.method import Routing
from howdah.shapes import dims
from howdah.shapes.activations import bytes_of, howdah, saved, shared
from howdah.shapes.dims import Tokens, local
from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts, Latent, ModelShape
from howdah.shapes.weights import parts

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def predicted(shape, rows, length, *, compute, dropout=False, packed=False):
    kernels = howdah(compute=compute, dropout=dropout, packed=packed)
    lists = [shared(shape, kernels), *(saved(shape, part, kernels) for part in parts(shape))]
    of = local(shape, Tokens(rows, length))
    return sum(bytes_of(kept, of, compute=compute) for kept in lists)


def forward(model, rows, length, *, dropout=False, documents=None):
    """The loss of a micro-batch, on tensors of its own."""
    tokens, positions = random_tokens(model.shape, rows, length)
    noise = Noise(0, 0, torch.arange(rows)) if dropout else None
    hidden = model(tokens, positions.contiguous(), documents, noise=noise)
    return cross_entropy_sum(hidden, model.head_weight, tokens.clone(), bias=model.head_bias)


def measured(shape, rows, length, *, dtype, dropout=False, documents=None):
    model = random_model(shape, dtype=dtype, dropout=0.1 if dropout else 0.0)
    with SavedTensorMeter(model.parameters()) as kept:
        total = forward(model, rows, length, dropout=dropout, documents=documents)
    return kept.count(total)


def cut(rows, length):
    """Document numbers: the first row is one document, the last has three."""
    documents = torch.zeros(rows, length, dtype=torch.int64)
    documents[-1, length // 3 :] = 1
    documents[-1, length - 1 :] = 2
    return documents


shapes = st.builds(
    ModelShape,
    layers=st.integers(1, 3),
    width=st.just(16),
    heads=st.just(4),
    kv_heads=st.sampled_from([1, 2, 4]),
    head_size=st.sampled_from([None, 6]),
    ffn_size=st.sampled_from([24, 40]),
    vocab=st.just(40),
    context=st.just(32),
    feedforward=st.sampled_from(["swiglu", "gelu", "relu"]),
    norm=st.sampled_from(["rmsnorm", "layernorm"]),
    norm_at=st.sampled_from(["before", "after"]),
    positions=st.sampled_from(["rotary", "learned", "alibi"]),
    bias=st.booleans(),
    tie_embeddings=st.booleans(),
    qk_norm=st.booleans(),
    family=st.sampled_from(["decoder", "encoder"]),
    embedding_norm=st.booleans(),
    token_types=st.sampled_from([0, 2]),
    transform=st.booleans(),
    first_position=st.sampled_from([0, 2]),
)


@settings(max_examples=150)
@given(shape=shapes, dtype=st.sampled_from(DTYPES), dropout=st.booleans(), packed=st.booleans())
def test_predicted_is_measured(shape, dtype, dropout, packed):
    documents = cut(3, 8) if packed else None
    found = measured(shape, 3, 8, dtype=dtype, dropout=dropout, documents=documents)
    expected = predicted(shape, 3, 8, compute=dtype.itemsize, dropout=dropout, packed=packed)
    assert found == expected


experts = st.builds(
    Experts,
    count=st.just(6),
    top_k=st.integers(1, 3),
    ffn_size=st.sampled_from([8, 12]),
    shared=st.sampled_from([0, 7]),
    first_dense=st.integers(0, 1),
    scores=st.sampled_from(["softmax", "sigmoid"]),
    normalise=st.booleans(),
    groups=st.just(3),
    top_groups=st.integers(2, 3),
    bias=st.booleans(),
)
latents = st.builds(
    Latent,
    kv_rank=st.just(10),
    query_rank=st.sampled_from([0, 14]),
    qk_nope_size=st.just(4),
    qk_rope_size=st.sampled_from([2, 4]),
    v_size=st.sampled_from([3, 6]),
)


@settings(max_examples=60)
@given(
    shape=shapes.filter(lambda shape: not shape.bias),
    of=experts,
    gate=st.booleans(),
    latent=st.none() | latents,
    capacity=st.sampled_from([0.0, 0.75, 1.5]),
    balanced=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    packed=st.booleans(),
)
def test_experts_and_latent_attention(shape, of, latent, **how):
    capacity, balanced, dtype = how["capacity"], how["balanced"], how["dtype"]
    packed = how["packed"]
    shape = replace(shape, experts=replace(of, shared_gate=how["gate"] and of.shared > 0))
    if latent:
        no_heads = {"kv_heads": None, "head_size": None, "qk_norm": False, "positions": "rotary"}
        shape = replace(shape, latent=latent, **no_heads)
    assume(shape.layers > of.first_dense)
    documents = cut(3, 8) if packed else None
    routing = Routing(balance_loss=float(balanced), capacity=capacity)
    asked = Balancing(routing, torch.full((3,), 8), 24.0)
    model, (tokens, positions) = random_model(shape, dtype=dtype), random_tokens(shape, 3, 8)
    with SavedTensorMeter(model.parameters()) as kept:
        hidden = model(tokens, positions.contiguous(), documents, balancing=asked)
        total = cross_entropy_sum(hidden, model.head_weight, tokens.clone(), bias=model.head_bias)
    kernels = replace(howdah(compute=dtype.itemsize, packed=packed), balanced=balanced)
    lists = [shared(shape, kernels), *(saved(shape, part, kernels) for part in parts(shape))]
    of_rank = local(shape, Tokens(3, 8))
    rows = 3 * dims.expert_rows(shape, 8, capacity)
    of_rank.counts.update(expert_row=rows, taken_row=rows)
    expected = sum(bytes_of(some, of_rank, compute=dtype.itemsize) for some in lists)
    assert kept.count(total) == expected


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_the_laptop_s_model(dtype, packed):
    shape, documents = preset("laptop"), cut(4, 256) if packed else None
    expected = predicted(shape, 4, 256, compute=dtype.itemsize, packed=packed)
    assert measured(shape, 4, 256, dtype=dtype, documents=documents) == expected


@settings(max_examples=60)
@given(shape=shapes, dropout=st.booleans())
def test_what_a_gpu_s_operations_keep_in_16_bits(shape, dropout):
    """The operations of a GPU, run on a CPU: documents as a tensor, and a gate that keeps no
    activation. Of a GPU's kernels themselves nothing is known here.
    """
    model = random_model(shape, dtype=torch.bfloat16, dropout=0.1 if dropout else 0.0)
    for module in model.modules():
        if hasattr(module, "islands"):
            module.islands = Islands()
    starts = []

    def cut_to_a_tensor(*of):
        mask = cut_to_tensors(*of)
        starts.append(mask.starts)
        return mask

    model.cut = cut_to_a_tensor
    with SavedTensorMeter([*model.parameters(), *starts]) as kept:
        total = forward(model, 3, 8, dropout=dropout, documents=cut(3, 8))
    found = kept.count(total) - starts[0].nbytes
    kernels = howdah(compute=2, dropout=dropout, packed=True, card=True)
    lists = [shared(shape, kernels), *(saved(shape, part, kernels) for part in parts(shape))]
    of = local(shape, Tokens(3, 8))
    assert found == sum(bytes_of(kept, of, compute=2) for kept in lists)


def test_the_head_keeps_the_gradient_of_its_last_chunk_s_logits():
    """2100 tokens are a chunk of 2048 and one of 52."""
    assert dims.CHUNK == loss.CHUNK
    shape = ModelShape(layers=1, width=8, heads=2, ffn_size=4, vocab=64, context=700)
    assert local(shape, Tokens(3, 700)).counts["chunk"] == 52
    assert measured(shape, 3, 700, dtype=torch.float32) == predicted(shape, 3, 700, compute=4)


# -- the measurement itself ------------------------------------------------------


def test_views_of_one_storage_count_once_and_whole():
    x = torch.ones(10, requires_grad=True)
    with SavedTensorMeter([x]) as kept:
        y = x * 2  # saves nothing of y's size
        total = (y[:5] * y[5:]).sum() + (y[2:4] ** 2).sum()  # three parts of y
    assert kept.count(total) == 10 * 4


def test_parameters_do_not_count_however_they_are_seen():
    flat = torch.ones(12, requires_grad=True)
    with SavedTensorMeter([flat]) as kept:
        total = (flat[:6].view(2, 3) @ flat[6:].view(3, 2)).sum()
    assert kept.count(total) == 0


def test_what_is_not_for_the_backward_pass_is_not_kept():
    x = torch.ones(10, requires_grad=True)
    with SavedTensorMeter([x]) as kept, torch.no_grad():
        total = (x.exp() * x).sum()
    assert kept.count(total) == 0


def test_what_was_counted_is_let_go():
    """Or memory that backward frees would be held until the next measurement."""
    x = torch.ones(10, requires_grad=True)
    with SavedTensorMeter([x]) as kept:
        total = x.exp().sum()
    assert kept.count(total) == 10 * 4
    assert kept.count(total) == 0


def test_measuring_changes_nothing():
    shape = replace(
        preset("laptop"), layers=1, width=16, heads=2, kv_heads=1, ffn_size=24, vocab=40
    )
    results = []
    for watched in (False, True):
        model = random_model(shape, dtype=torch.float32)
        if watched:
            with SavedTensorMeter(model.parameters()) as kept:
                total = forward(model, 2, 8)
            assert kept.count(total) > 0
        else:
            total = forward(model, 2, 8)
        total.backward()
        results.append([total.detach(), *(p.grad for p in model.parameters())])
    for plain, watched in zip(*results, strict=True):
        assert torch.equal(plain, watched)
