"""The norms against torch's own and against their formulas, in every dtype."""

import pytest
import torch
import torch.nn.functional as F

from howdah.model.islands import promoted
from howdah.model.norm import LayerNorm, RMSNorm, build_norm

WIDTH = 24


def norm_of(kind, dtype):
    norm = build_norm(kind, WIDTH, 1e-5).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for weight in norm.parameters():
        weight.data = torch.randn(WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return norm


def draw_input(dtype, *sizes):
    draw = torch.Generator().manual_seed(1)
    drawn = 3 * torch.randn(*sizes, WIDTH, generator=draw, dtype=torch.float64) + 1
    return drawn.to(dtype).requires_grad_()


def value_and_gradients(norm, x, weights):
    y = norm(x)
    pull = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype)
    return [y, *torch.autograd.grad(y, (x, *weights), pull)]


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (2, 3, 2)])
def test_rmsnorm_equals_torch_in_float64(sizes):
    norm, x = norm_of("rmsnorm", torch.float64), draw_input(torch.float64, *sizes)
    mine = value_and_gradients(norm, x, [norm.weight])

    def theirs(x):
        return F.rms_norm(x, (WIDTH,), norm.weight, norm.epsilon)

    for a, b in zip(mine, value_and_gradients(theirs, x, [norm.weight]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_rmsnorm_passes_gradcheck():
    norm, x = norm_of("rmsnorm", torch.float64), draw_input(torch.float64, 3)

    def call(x, weight):
        return torch.func.functional_call(norm, {"weight": weight}, (x,))

    assert torch.autograd.gradcheck(call, (x, norm.weight))


def test_layernorm_equals_its_formula():
    norm, x = norm_of("layernorm", torch.float64), draw_input(torch.float64, 4)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * norm.weight + norm.bias
    torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)]
)
def test_narrow_formats_are_rounded_once(kind, dtype, bound):
    """The error of value and gradients is that of one rounding: inside it is float32.

    torch's LayerNorm in bfloat16 adds up thousands of tokens' gradients in bfloat16.
    """
    norm, x = norm_of(kind, dtype), draw_input(dtype, 2000)
    narrow = value_and_gradients(norm, x, list(norm.parameters()))
    wide = value_and_gradients(
        norm.double(), x.detach().double().requires_grad_(), list(norm.parameters())
    )
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).norm() / b.norm() < bound


def test_promoted_is_at_least_float32():
    assert promoted(torch.bfloat16) == promoted(torch.float16) == torch.float32
    assert promoted(torch.float32) == torch.float32
    assert promoted(torch.float64) == torch.float64


def test_rmsnorm_keeps_its_input_and_one_scale_per_token():
    norm, x = norm_of("rmsnorm", torch.float32), draw_input(torch.float32, 50)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        norm(x)
    assert sorted(kept) == [WIDTH, 50, 50 * WIDTH]


def test_build_norm_gives_the_kind():
    assert isinstance(build_norm("rmsnorm", 4, 1e-6), RMSNorm)
    assert isinstance(build_norm("layernorm", 4, 1e-6), LayerNorm)
