"""Attention inside documents: every way of applying the mask computes the same."""

from dataclasses import replace
from math import sin

import pytest
import torch
from random_model import LLAMA, QWEN3, STRETCHED, pack, random_model, random_tokens

from howdah.model.attention import Cache, attend, rotary_angles, rotate
from howdah.model.documents import (
    Cuts,
    Spans,
    cut_documents,
    cut_to_tensors,
    dense_mask,
    document_numbers,
    one_document_each,
)
from howdah.shapes.shape import RopeScaling

CPU = torch.device("cpu")


def by_hand(q, k, v, mask):
    """Attention as its formula: softmax(q kᵀ / √d) v over the allowed pairs, head by head."""
    groups = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // groups].mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~mask[:, 0], float("-inf"))
        out[:, head] = scores.softmax(-1) @ v[:, head // groups]
    return out


def draw_heads(rows, length, *, heads=6, kv_heads=2, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    sizes = ((rows, n, length, 8) for n in (heads, kv_heads, kv_heads))
    return [
        torch.randn(size, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for size in sizes
    ]


DOCUMENTS = {
    "single rows": torch.tensor([[0] * 6, [4] * 6]),
    "all cut": torch.tensor([[0, 0, 1, 1, 1, 2], [3, 4, 4, 4, 4, 4]]),
    "mixed": torch.tensor([[0, 0, 1, 1, 1, 2], [3] * 6, [4, 4, 4, 4, 4, 5], [6] * 6]),
    "a document over a row's end": torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 2, 2, 2, 2]]),
}


@pytest.mark.parametrize("documents", DOCUMENTS.values(), ids=DOCUMENTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_spans_and_mask_equal_the_formula_in_value_and_gradients(documents, kv_heads):
    q, k, v = draw_heads(len(documents), documents.shape[1], kv_heads=kv_heads)
    dense = dense_mask(documents)
    weights = torch.randn(q.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    results = []
    for out in (
        by_hand(q, k, v, dense),
        attend(q, k, v, dense),
        attend(q, k, v, cut_documents(documents, CPU, documents.shape[1])),
        attend(q, k, v, cut_to_tensors(documents, CPU, documents.shape[1])),
    ):
        results.append([out, *torch.autograd.grad((out * weights).sum(), (q, k, v))])
    for other in results[1:]:
        for mine, formula in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, formula, rtol=0, atol=1e-12)


def test_rows_of_one_document_need_no_mask():
    for cut, kind in ((cut_documents, Spans), (cut_to_tensors, Cuts)):
        assert cut(DOCUMENTS["single rows"], CPU, 6) is None
        assert isinstance(cut(DOCUMENTS["mixed"], CPU, 6), kind)


def test_the_dense_mask_of_two_rows():
    documents = torch.tensor([[0, 0, 1], [2, 3, 3]])
    expected = [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]], [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]]
    assert torch.equal(dense_mask(documents), torch.tensor(expected, dtype=torch.bool))


def draw_documents(draw, rows, length):
    """Document numbers of rows that are cut anywhere; numbers ascend from row to row."""
    new = torch.rand(rows, length, generator=draw) < torch.rand((), generator=draw)
    new[:, 0] = torch.rand(rows, generator=draw) < 0.5
    return new.flatten().cumsum(0).view(rows, length)


@pytest.mark.parametrize("seed", range(12))
def test_cuts_spans_and_the_dense_mask_agree_on_random_documents(seed):
    """Values and gradients, in float64; the dense mask is made of the cuts, as a GPU makes it."""
    draw = torch.Generator().manual_seed(seed)
    documents = draw_documents(draw, 1 + seed % 4, 9)
    q, k, v = draw_heads(len(documents), 9, kv_heads=[1, 2, 6][seed % 3])
    cuts = cut_to_tensors(documents, CPU, 9) or Cuts(torch.arange(0, documents.numel() + 1, 9), 9)
    dense = dense_mask(document_numbers(cuts, len(documents)))
    assert torch.equal(dense, dense_mask(documents))
    pull, results = torch.randn(q.shape, dtype=torch.float64, generator=draw), []
    for mask in (dense, cut_documents(documents, CPU, 9), cuts):
        out = attend(q, k, v, mask)
        results.append([out, *torch.autograd.grad((out * pull).sum(), (q, k, v))])
    for other in results[1:]:
        for mine, theirs in zip(other, results[0], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_cuts_that_are_wrong_by_one_token_are_noticed():
    documents = DOCUMENTS["mixed"]
    q, k, v = draw_heads(len(documents), 6)
    cuts = cut_to_tensors(documents, CPU, 6)
    moved = cuts.starts.clone()
    moved[1] += 1
    right, wrong = attend(q, k, v, cuts), attend(q, k, v, Cuts(moved, 6))
    assert (right - wrong).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_in_narrow_formats_are_as_near_as_spans(dtype):
    documents = DOCUMENTS["mixed"]
    heads = draw_heads(len(documents), 6, kv_heads=2, dtype=dtype)
    found = []
    for cut in (cut_documents, cut_to_tensors):
        out = attend(*heads, cut(documents, CPU, 6))
        found.append([out, *torch.autograd.grad(out.sum(), heads)])
    for mine, other in zip(*found, strict=True):
        assert mine.dtype == dtype
        assert (mine - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_heads_in_narrow_formats_are_near_the_float64_ones(dtype):
    """In bfloat16 torch's grouped kernel sums gradients in bfloat16: it must not be used there."""
    wide = draw_heads(2, 128, heads=32, kv_heads=2)
    pull = torch.randn(wide[0].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    gradients = []
    for heads in (narrow, exact):
        out = attend(*heads, None)
        gradients.append(torch.autograd.grad(out, heads, pull.to(out.dtype)))
    for mine, true in zip(*gradients, strict=True):
        error = (mine.double() - true).norm() / true.norm()
        assert error < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("shape", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_a_packed_row_equals_its_documents_alone(shape):
    model = random_model(shape)
    lengths = [5, 1, 9, 3]
    tokens, _ = random_tokens(shape, 1, sum(lengths))
    positions, documents = pack(lengths)
    packed = model(tokens, positions, documents)
    alone = [model(part, torch.arange(part.shape[1])[None]) for part in tokens.split(lengths, 1)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), rtol=0, atol=1e-12)
    weights = list(model.parameters())[:-1]  # the head is no part of the hidden states
    gradients = [
        torch.autograd.grad(out.square().sum(), weights) for out in (packed, torch.cat(alone, 1))
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_documents_that_are_not_told_apart_change_the_result():
    """The control: without document numbers the second document would see the first."""
    model = random_model(LLAMA)
    tokens, _ = random_tokens(LLAMA, 1, 8)
    positions, documents = pack([4, 4])
    apart, mixed = model(tokens, positions, documents), model(tokens, positions)
    torch.testing.assert_close(apart[:, :4], mixed[:, :4], rtol=0, atol=1e-12)
    assert not torch.allclose(apart[:, 4:], mixed[:, 4:], atol=1e-3)


# -- the cache -----------------------------------------------------------------


def test_a_cache_takes_one_token_at_a_time_after_the_prompt():
    model, cache = random_model(LLAMA), Cache()
    tokens, positions = random_tokens(LLAMA, 1, 6)
    model(tokens[:, :3], positions[:, :3], cache=cache)
    with pytest.raises(ValueError, match="one more at a time"):
        model(tokens[:, 3:], positions[:, 3:], cache=cache)


def test_the_cache_keeps_key_value_heads_not_copies_for_every_head():
    model, cache = random_model(LLAMA), Cache()
    model(*random_tokens(LLAMA, 2, 5), cache=cache)
    assert {tuple(key.shape) for key, _ in cache.pairs.values()} == {(2, LLAMA.k, 5, LLAMA.d)}
    assert set(cache.pairs) == {"0", "1"}


# -- rotary positions ----------------------------------------------------------


def test_rotation_is_multiplication_by_complex_numbers():
    q, _, _ = draw_heads(2, 7)
    positions = torch.stack([torch.arange(7), torch.tensor([0, 1, 2, 0, 1, 0, 1])])
    shape = replace(LLAMA, head_size=8)
    turned = rotate(q, rotary_angles(shape, positions, torch.float64))
    pairs = torch.complex(q[..., :4], q[..., 4:])
    angles = positions[:, None, :, None] * 10_000.0 ** (-torch.arange(4) / 4)
    expected = pairs * torch.polar(torch.ones_like(angles), angles).to(pairs.dtype)
    torch.testing.assert_close(
        turned, torch.cat([expected.real, expected.imag], -1), rtol=0, atol=1e-5
    )


def test_scores_depend_on_the_distance_alone():
    q, k, _ = draw_heads(1, 1, kv_heads=6)
    shape = replace(LLAMA, head_size=8, rope_scaling=STRETCHED)

    def score(at, of):
        here, there = (rotary_angles(shape, torch.tensor([[n]]), torch.float64) for n in (at, of))
        return (rotate(q, here) * rotate(k, there)).sum(-1)

    torch.testing.assert_close(score(9, 4), score(30, 25), rtol=0, atol=1e-12)
    assert not torch.allclose(score(9, 4), score(9, 5))


def test_scaling_keeps_short_wavelengths_and_stretches_long_ones():
    scaling = RopeScaling(factor=4.0, context=64)
    shape = replace(LLAMA, head_size=64, rope_scaling=scaling)
    one = torch.tensor([[1]])
    plain = rotary_angles(replace(shape, rope_scaling=None), one, torch.float64)
    scaled = rotary_angles(shape, one, torch.float64)
    angles, stretched = (torch.atan2(rotary[1], rotary[0]).flatten() for rotary in (plain, scaled))
    wavelengths = 2 * torch.pi / angles
    short = wavelengths < scaling.context / scaling.high
    long = wavelengths > scaling.context / scaling.low
    assert short.any() and long.any() and not (short | long).all()
    torch.testing.assert_close(stretched[short], angles[short])
    torch.testing.assert_close(stretched[long], angles[long] / scaling.factor)
    between = ~(short | long)
    assert ((stretched < angles) & (stretched > angles / scaling.factor))[between].all()


def test_late_positions_lose_no_digits():
    """Angles in float32 would be off by 0.004 at position 100 000."""
    place, d = 100_003, 6
    shape = replace(LLAMA, head_size=d)
    _, sines = rotary_angles(shape, torch.tensor([[place]]), torch.float64).flatten(1)
    expected = [sin(place * 10_000.0 ** (-i / d)) for i in range(0, d, 2)]
    torch.testing.assert_close(
        sines, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-9
    )
    narrow = rotary_angles(shape, torch.tensor([[place]]), torch.float32)[1].flatten()
    assert torch.equal(narrow, sines.float())


def test_a_device_is_given_its_cuts_and_asked_nothing():
    """The host once looked at the documents, and copied the mask for every micro-batch."""
    documents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    assert not one_document_each(documents) and one_document_each(documents[1:].numpy())
    meta = torch.device("meta")
    mask = cut_documents(documents, meta, 4)
    assert isinstance(mask, Cuts) and mask.starts.is_meta and mask.starts.shape == (4,)
    assert cut_documents(mask.starts, meta, 4) == mask
    assert cut_documents(documents.to(meta), meta, 4).shape == (2, 1, 4, 4)
    assert cut_documents(documents[1:], meta, 4) is None
    q, k, v = (torch.empty(2, heads, 4, 8, device=meta) for heads in (4, 2, 2))
    assert attend(q, k, v, mask).shape == q.shape
