"""The global norm and clipping, as torch computes them on ordinary parameters."""

import pytest
import torch

from howdah.optim.clip import clip, squared_norm, total_norm

SIZES = (7, 1, 64, 1000)


def gradients(dtype, scale=1.0):
    draw = torch.Generator().manual_seed(3)
    return [scale * torch.randn(size, generator=draw, dtype=dtype) for size in SIZES]


def parameters(grads):
    made = []
    for gradient in grads:
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient.clone()
        made.append(parameter)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("limit", [0.5, 1.0, 1e6])
def test_the_norm_and_the_clipped_gradients_are_torchs(dtype, limit):
    mine = gradients(dtype)
    theirs = parameters(mine)
    norm = total_norm([squared_norm(mine)])
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    tight = 1e-6 if dtype == torch.float32 else 1e-14
    assert norm == pytest.approx(float(expected), rel=tight)
    clip(mine, norm=norm, limit=limit)
    for flat, parameter in zip(mine, theirs, strict=True):
        torch.testing.assert_close(flat, parameter.grad, rtol=tight, atol=0)
    assert (total_norm([squared_norm(mine)]) < norm / 2) == (limit < norm / 2)


def test_padding_of_zeros_counts_for_nothing():
    flat = gradients(torch.float64)[2]
    padded = torch.cat([flat, torch.zeros(9, dtype=torch.float64)])
    assert squared_norm([padded]) == pytest.approx(squared_norm([flat]), rel=1e-15)


def test_buffers_add_up_in_float64():
    """float32 has no room for 1 beside 1e8."""
    flats = [torch.tensor([1e4]), *([torch.tensor([1.0])] * 10)]
    assert squared_norm(flats) == 1e8 + 10


def test_a_limit_of_zero_never_clips_and_a_norm_of_zero_stays_finite():
    flats = gradients(torch.float32, scale=1e6)
    before = [flat.clone() for flat in flats]
    clip(flats, norm=total_norm([squared_norm(flats)]), limit=0.0)
    assert all(map(torch.equal, flats, before))
    nothing = [torch.zeros(4)]
    clip(nothing, norm=total_norm([squared_norm(nothing)]), limit=1.0)
    assert torch.equal(nothing[0], torch.zeros(4))


def test_nothing_has_a_norm_of_zero():
    assert total_norm([squared_norm([])]) == 0.0


def test_squares_of_several_ranks_make_one_norm():
    assert total_norm([9.0, 16.0]) == 5.0
