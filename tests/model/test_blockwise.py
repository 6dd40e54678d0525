"""Weights in 8 bits by blocks, against the definition in numpy; and what does not change them."""

import numpy as np
import pytest
import torch

from howdah.model.blockwise import quantise, restore, rounded
from howdah.plan.quantised import BLOCK, message_bytes

WIDTHS = {torch.float64: np.float64, torch.float32: np.float32}


def by_definition(x):
    """Each block of the elements of x as integers from -127 to 127 times a float32 scale."""
    flat = x.reshape(-1)
    found = np.zeros_like(flat)
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        scale = np.float32(np.abs(block).max() / x.dtype.type(127))
        if scale:
            found[start : start + BLOCK] = np.rint(block / x.dtype.type(scale)) * scale
    return found.reshape(x.shape)


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", [(3, 700), (256,), (1,), (512,)])
def test_weights_are_rounded_as_defined(dtype, shape):
    x = torch.randn(shape, dtype=dtype)
    expected = by_definition(x.numpy())
    np.testing.assert_array_equal(rounded(x).numpy(), expected)
    scale = float(x.abs().max()) / 127
    assert float((rounded(x) - x).abs().max()) <= 0.5001 * scale
    assert x.numel() == 1 or not torch.equal(rounded(x), x)


def test_bf16_is_rounded_from_what_is_kept_and_comes_back_as_bf16():
    x = torch.randn(1000).bfloat16()
    wide = torch.from_numpy(by_definition(x.float().numpy()))
    assert rounded(x).dtype == torch.bfloat16
    assert torch.equal(rounded(x), wide.bfloat16())


@pytest.mark.parametrize("shares", [1, 2, 4])
def test_a_message_of_shares_restores_the_same_weights(shares):
    """Whoever cuts it: each rank rounds its share by itself."""
    x = torch.randn(8 * BLOCK)
    message = torch.empty(message_bytes(len(x)), dtype=torch.uint8)
    for part, own in zip(x.chunk(shares), message.chunk(shares), strict=True):
        quantise(part, own)
    out = torch.full_like(x, 9)
    restore(message, out, shares=shares)
    assert torch.equal(out, rounded(x))
    assert len(message) == 8 * (BLOCK + 4)


def test_zeros_stay_zeros_and_what_is_not_finite_is_noticed():
    x = torch.zeros(2 * BLOCK)
    x[BLOCK] = float("inf")
    back = rounded(x)
    assert torch.equal(back[:BLOCK], x[:BLOCK])
    assert not torch.isfinite(back[BLOCK:]).all()
    tiny = torch.full((BLOCK,), 1e-44)  # a scale that float32 has not
    assert torch.isfinite(rounded(tiny)).all()


def test_a_block_does_not_depend_on_others():
    x = torch.randn(4 * BLOCK)
    other = x.clone()
    other[BLOCK:] *= 100
    assert torch.equal(rounded(x)[:BLOCK], rounded(other)[:BLOCK])
