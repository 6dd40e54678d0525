"""Weights in 8 bits by blocks, against the definition in numpy; and what does not change them."""

import numpy as np
import pytest
import torch

from howdah.comm.build import engine_library
from howdah.comm.settings import read_settings
from howdah.model import blockwise
from howdah.model.blockwise import add, quantise, restore, rounded
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


@pytest.fixture
def either(monkeypatch):
    """What a function says with the library, and what it says with torch's operations alone."""
    engine_library(read_settings())  # compiles it
    blockwise._library.cache_clear()
    library = blockwise._library()
    assert library is not None

    def both(function):
        found = []
        for chosen in (library, None):
            monkeypatch.setattr(blockwise, "_library", lambda chosen=chosen: chosen)
            found.append(function())
        return found

    return both


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", blockwise.IN_LIBRARY)
def test_the_library_has_the_bits_of_torch(either, dtype, bits):
    x = torch.randn(64 * BLOCK) * torch.logspace(-20, 20, 64).repeat_interleave(BLOCK)
    half = torch.arange(BLOCK) - 127.5  # ties, if their scale is 1
    half[0] = 127 if bits == 8 else 7
    x[:BLOCK], x[BLOCK : 2 * BLOCK] = 0, half.clamp(-float(half[0]), float(half[0]))
    x[2 * BLOCK : 3 * BLOCK], x[3 * BLOCK : 4 * BLOCK] = 1e-44, 1e-38
    x = x.to(dtype)

    def sent():
        message = torch.zeros(message_bytes(len(x), bits), dtype=torch.uint8)
        quantise(x, message, bits)
        out, total = torch.full_like(x, 9), x.flip(0).clone()
        restore(message, out, shares=1, bits=bits)
        add(message, total, bits=bits)
        return message, out, total

    for one, other in zip(*either(sent), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("what", ["inf", "-inf", "nan"])
def test_the_library_makes_a_block_that_is_not_finite_nan(either, bits, what):
    x = torch.randn(2 * BLOCK)
    x[7] = float(what)

    def back():
        message = torch.zeros(message_bytes(len(x), bits), dtype=torch.uint8)
        quantise(x, message, bits)
        out = torch.zeros_like(x)
        restore(message, out, shares=1, bits=bits)
        return out

    for one in either(back):
        assert one[:BLOCK].isnan().all()
        assert one[BLOCK:].isfinite().all()


def test_shares_of_a_message_are_restored_by_the_library_too(either):
    x = torch.randn(8 * BLOCK)

    def back():
        message = torch.zeros(message_bytes(len(x)), dtype=torch.uint8)
        for part, own in zip(x.chunk(4), message.chunk(4), strict=True):
            quantise(part, own)
        out = torch.zeros_like(x)
        restore(message, out, shares=4)
        return out

    one, other = either(back)
    assert torch.equal(one, other)
    assert torch.equal(one, rounded(x))


def test_numbers_that_the_library_does_not_know_are_torchs():
    wide, odd = torch.randn(BLOCK, dtype=torch.float64), torch.randn(2 * BLOCK)[::2]
    for x in (wide, odd):
        assert blockwise._library_for(x, torch.zeros(1)) is None
