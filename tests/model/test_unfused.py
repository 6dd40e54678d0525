"""Attention as matrices: the plain formula with the same mask, its gradients, and what it drops."""

import pytest
import torch
from random_model import pack

from howdah.model.attention import both_ways
from howdah.model.documents import Dropping, dense_mask
from howdah.model.noise import Noise, drop_within
from howdah.model.relative import RelativeTable, Seen
from howdah.model.unfused import attend_dropping, kept_pairs

ROWS, HEADS, LENGTH, SIZE, SHARE = 2, 4, 10, 6, 0.3


def dropping(mask, *, first=0, samples=(7, 9), length=LENGTH):
    noise = Noise(5, 2, torch.tensor(samples))
    drop = drop_within(noise, "layers.0.probabilities", share=SHARE, length=length)
    return Dropping(mask, drop, first, HEADS)


def inputs(kv_heads=HEADS):
    draw = torch.Generator().manual_seed(0)
    return [
        torch.randn(ROWS, n, LENGTH, SIZE, generator=draw, dtype=torch.float64).requires_grad_()
        for n in (HEADS, kv_heads, kv_heads)
    ]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", [None, [3, 7]])
def test_it_is_the_formula(causal, kv_heads, lengths):
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).tril()
    if lengths:
        mask = dense_mask(pack(lengths)[1])
    mask = mask if causal else both_ways(mask)
    q, k, v = inputs(kv_heads)
    of = dropping(mask if lengths else None)
    out = attend_dropping(q, k, v, of, causal=causal)
    groups = HEADS // kv_heads
    keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
    scores = (q @ keys.mT * SIZE**-0.5).masked_fill(~mask, -torch.inf)
    expected = (scores.softmax(-1) * kept_pairs(of, HEADS, LENGTH) / (1 - SHARE)) @ values
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    weight = torch.randn_like(out)
    mine = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("biased", [True, False])
def test_with_a_bias_it_is_the_formula_without_division(biased):
    """What the stacks of a T5 attend with; to a source there is no bias."""
    table = RelativeTable(8, HEADS).double()
    torch.nn.init.normal_(table.weight, std=2.0)
    bias = table.bias(range(LENGTH), LENGTH, both_ways=True, device=torch.device("cpu"))
    seen = torch.arange(LENGTH) < torch.tensor([LENGTH, 6])[:, None]  # [b, t]
    q, k, v = inputs()
    of = dropping(Seen(seen[:, None, None], bias if biased else None))
    out = attend_dropping(q, k, v, of, causal=False)
    scores = q @ k.mT + (table.weight[bias.buckets].T.unfold(1, LENGTH, 1).flip(1) if biased else 0)
    likely = scores.masked_fill(~seen[:, None, None], -torch.inf).softmax(-1)
    expected = (likely * kept_pairs(of, HEADS, LENGTH) / (1 - SHARE)) @ v
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-14)
    weight, trained = torch.randn_like(out), (q, k, v, *([table.weight] if biased else []))
    mine = torch.autograd.grad((out * weight).sum(), trained)
    theirs = torch.autograd.grad((expected * weight).sum(), trained)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_what_is_dropped_depends_on_sample_head_and_pair_alone():
    whole = kept_pairs(dropping(None), HEADS, LENGTH)
    assert torch.equal(kept_pairs(dropping(None, first=1), 2, LENGTH), whole[:, 1:3])
    assert torch.equal(kept_pairs(dropping(None, samples=(9,)), HEADS, LENGTH), whole[1:])
    flat = whole.flatten()
    assert not torch.equal(whole[0], whole[1]) and not torch.equal(whole[:, 0], whole[:, 1])
    many = kept_pairs(dropping(None, samples=tuple(range(200))), HEADS, LENGTH)
    assert many.to(torch.float64).mean() == pytest.approx(1 - SHARE, abs=0.01)
    assert len(flat) == ROWS * HEADS * LENGTH**2
