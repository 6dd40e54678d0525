"""Attention to some of the keys: blocks add up to all of them, forward and backward."""

import pytest
import torch

from howdah.model.attention import attend
from howdah.model.partial import attend_part, merge, part_gradients

SHAPES = pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])


def draw(heads, kv_heads, *, dtype=torch.float64, value=6):
    sizes = (heads, 6), (kv_heads, 6), (kv_heads, value)
    return [torch.randn(2, n, 9, size, dtype=dtype).requires_grad_() for n, size in sizes]


def in_blocks(q, k, v):
    """Causal attention of the last four of nine tokens: their own block, then two others."""
    mine = slice(5, 9)
    out, sums = attend_part(q[:, :, mine], k[:, :, mine], v[:, :, mine], causal=True)
    for block in (slice(0, 2), slice(2, 5)):
        part = attend_part(q[:, :, mine], k[:, :, block], v[:, :, block], causal=False)
        merge(out, sums, *part)
    return out, sums


@SHAPES
@pytest.mark.parametrize("value", [6, 4])  # values of another size go through plain products
def test_blocks_add_up_to_all_keys(heads, kv_heads, value):
    q, k, v = draw(heads, kv_heads, value=value)
    with torch.no_grad():
        out, _ = in_blocks(q, k, v)
    groups = heads // kv_heads
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ keys.mT / 6**0.5).masked_fill(torch.ones(9, 9).triu(1).bool(), float("-inf"))
    expected = scores.softmax(-1) @ values
    torch.testing.assert_close(out, expected[:, :, 5:], rtol=0, atol=1e-13)


@SHAPES
def test_gradients_of_blocks_add_up_to_those_of_all_keys(heads, kv_heads):
    q, k, v = draw(heads, kv_heads)
    expected = attend(q, k, v, None)[:, :, 5:]
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    with torch.no_grad():
        made, mine = in_blocks(q, k, v), slice(5, 9)
        found = [torch.zeros_like(x) for x in (q, k, v)]
        for block in (mine, slice(0, 2), slice(2, 5)):
            some = q[:, :, mine], k[:, :, block], v[:, :, block]
            terms = part_gradients(grad, some, made, causal=block == mine)
            for total, place, term in zip(found, (mine, block, block), terms, strict=True):
                total[:, :, place] += term
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@SHAPES
@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_and_plain_products_agree(heads, kv_heads, causal):
    """Values with a number more, which is zero, take the plain way."""
    q, k, v = (x.detach() for x in draw(heads, kv_heads))
    wider = torch.cat([v, torch.zeros_like(v[..., :1])], -1)
    out, sums = attend_part(q, k, v, causal=causal)
    plain, plain_sums = attend_part(q, k, wider, causal=causal)
    torch.testing.assert_close(sums, plain_sums, rtol=0, atol=1e-13)
    torch.testing.assert_close(out, plain[..., :-1], rtol=0, atol=1e-13)
    grad = torch.randn_like(out)
    zero = torch.zeros_like(grad[..., :1])
    found = part_gradients(grad, (q, k, v), (out, sums), causal=causal)
    given = torch.cat([grad, zero], -1)
    others = part_gradients(given, (q, k, wider), (plain, plain_sums), causal=causal)
    for mine, theirs in zip(found, (*others[:2], others[2][..., :-1]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_in_16_bits_sums_are_wide_and_a_group_s_gradients_are_added_wide():
    q, k, v = (x.detach() for x in draw(4, 2, dtype=torch.bfloat16))
    out, sums = attend_part(q, k, v, causal=True)
    d_q, d_k, d_v = part_gradients(torch.ones_like(out), (q, k, v), (out, sums), causal=True)
    assert (out.dtype, sums.dtype, d_q.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert d_k.dtype == d_v.dtype == torch.float32 and d_k.shape == k.shape
