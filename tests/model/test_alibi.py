"""ALiBi inside wider heads: the formula of the paper, in every format and for packed documents."""

from math import ceil, log2

import pytest
import torch
from random_model import pack

from howdah.model.alibi import slopes, widened
from howdah.model.attention import attend
from howdah.model.documents import cut_documents, cut_to_tensors, dense_mask
from howdah.shapes.shape import WIDER

CPU = torch.device("cpu")


def published(heads):
    """The authors' own function (github.com/ofirpress/attention_with_linear_biases)."""
    if log2(heads).is_integer():
        start = 2 ** (-(2 ** -(log2(heads) - 3)))
        return [start * start**i for i in range(heads)]
    power = 2 ** (ceil(log2(heads)) - 1)
    return published(power) + published(2 * power)[0::2][: heads - power]


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20, 112])
def test_slopes_are_those_of_the_paper(heads):
    expected = torch.tensor(published(heads), dtype=torch.float64)
    torch.testing.assert_close(slopes(heads, (0, heads), CPU), expected, rtol=1e-14, atol=0)
    middle = slopes(heads, (heads // 3, heads), CPU)
    assert torch.equal(middle, slopes(heads, (0, heads), CPU)[heads // 3 :])


def heads_of(rows, length, heads, size, dtype):
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randn(rows, length, heads, size, generator=draw, dtype=torch.float64).to(dtype)
        for _ in range(3)
    ]


def expected_of(q, k, v, documents):
    """softmax(q·k/√d - slope·(i - j)), from the distance itself, in float64."""
    q, k, v = (x.to(torch.float64).transpose(1, 2) for x in (q, k, v))
    at = torch.arange(q.shape[2])
    away = (at[:, None] - at) * slopes(q.shape[1], (0, q.shape[1]), CPU)[:, None, None]
    scores = q @ k.mT * q.shape[-1] ** -0.5 - away
    return scores.masked_fill(~dense_mask(documents), -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("cut", [cut_documents, cut_to_tensors])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("lengths", [[24], [9, 1, 14]])
def test_wider_heads_have_the_bias(cut, dtype, bound, lengths):
    positions, documents = pack(lengths)
    q, k, v = heads_of(1, 24, 6, 8, dtype)
    wide = widened((q, k, v), positions, slopes(6, (0, 6), CPU))
    assert all(x.shape[-1] == 8 + WIDER for x in wide)
    out = attend(*(x.transpose(1, 2) for x in wide), cut(documents, CPU, 24))
    error = (out[..., :8] - expected_of(q, k, v, documents)).abs().max()
    assert error < bound
    assert not out[..., 8:].any()  # values of 0


@pytest.mark.slow
def test_in_16_bits_far_positions_cost_nothing():
    """A position of 2000 that is rounded once is off by 4, and its keys are mixed up."""
    q, k, v = heads_of(1, 2000, 12, 6, torch.bfloat16)
    positions, documents = pack([2000])
    expected = expected_of(q, k, v, documents)
    wide = widened((q, k, v), positions, slopes(12, (0, 12), CPU))
    out = attend(*(x.transpose(1, 2) for x in wide), None)[..., :6]
    error = (out - expected).abs()
    assert error[:, :, -100:].mean() < 2 * error[:, :, :100].mean() < 0.02
