"""Linears in 8 bits: the quantiser by hand, products and gradients, and the sentences."""

from dataclasses import replace

import pytest
import torch
from random_model import LLAMA

from howdah.comm.transport import SingleRank
from howdah.host.precision import lacks
from howdah.model.fp8 import BACKWARD, FORWARD, linear, product, quantised
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import Layout, parse_layout
from howdah.plan.method import Method
from howdah.plan.plan import make_plan
from howdah.plan.support import unsupported
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights


def random(*sizes, seed=0, dtype=torch.float32):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=draw, dtype=torch.float64).to(dtype)


def by_hand(number, bits, low, top):
    """The nearest number with `bits` bits of fraction; ties go to the even one."""
    from math import floor, frexp, ldexp

    if number == 0:
        return 0.0
    exponent = max(frexp(abs(number))[1] - 1, low)
    units = abs(number) / ldexp(1.0, exponent - bits)
    down = floor(units)
    rounded = down + (units - down > 0.5 or (units - down == 0.5 and down % 2 == 1))
    return min(ldexp(rounded, exponent - bits), top) * (1 if number > 0 else -1)


@pytest.mark.parametrize(
    ("dtype", "bits", "low", "top"), [(FORWARD, 3, -6, 448.0), (BACKWARD, 2, -14, 57344.0)]
)
def test_the_quantiser_is_the_formats_definition(dtype, bits, low, top):
    x = random(40, 25) * torch.logspace(-9, 3, 25)
    found = quantised(x, dtype)
    assert float(found.scale) == float(x.abs().max() / top)
    wanted = [by_hand(float(one), bits, low, top) for one in (x / found.scale).flatten()]
    assert found.numbers.float().flatten().tolist() == wanted
    assert found.numbers.float().abs().max() == top


def test_zeros_stay_and_what_is_not_finite_is_seen():
    assert not quantised(torch.zeros(3, 4), FORWARD).numbers.float().any()
    for bad in (float("nan"), float("inf")):
        x = random(3, 4)
        x[1, 2] = bad
        one = quantised(x, FORWARD)
        assert product(one, one, torch.float32).isnan().any()


def test_a_product_is_that_of_the_rounded_numbers():
    left, right = quantised(random(5, 16), BACKWARD), quantised(random(7, 16, seed=1), FORWARD)
    wide = [one.numbers.double() * one.scale.double() for one in (left, right)]
    torch.testing.assert_close(
        product(left, right, torch.float64), wide[0] @ wide[1].T, rtol=1e-6, atol=1e-6
    )
    back = product(left.turned(), quantised(random(5, 3), FORWARD).turned(), torch.float32)
    assert back.shape == (16, 3)


@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_rounded_operands(bias):
    x, weight, added = (
        one.requires_grad_()
        for one in (random(2, 8, 16), random(32, 16, seed=1), random(32, seed=2))
    )
    out = linear(x, weight, added if bias else None)
    pull = random(2, 8, 32, seed=3)
    found = torch.autograd.grad(out, [x, weight, *([added] if bias else [])], pull)

    def rounded(one, dtype):
        made = quantised(one.detach().flatten(0, -2), dtype)
        return made.numbers.double() * made.scale.double()

    a, w, g = rounded(x, FORWARD), rounded(weight, FORWARD), rounded(pull, BACKWARD)
    wanted = [g @ w, g.T @ a]
    near = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(out.double().flatten(0, 1), a @ w.T + (added if bias else 0), **near)
    for mine, other in zip(found, wanted, strict=False):
        torch.testing.assert_close(mine.double().reshape(other.shape), other, **near)
    if bias:
        torch.testing.assert_close(found[2], pull.sum((0, 1)))
    exact = torch.autograd.grad(torch.nn.functional.linear(x, weight), weight, pull)[0]
    assert 1e-3 < (found[1] - exact).norm() / exact.norm() < 0.1  # it is 8 bits


SHAPE = ModelShape(layers=2, width=32, heads=2, ffn_size=48, vocab=40, context=16)


def trained(words, precision):
    """Loss and gradients of a small model."""
    batch = Batch(global_batch=2, micro_batch=2)
    layout = parse_layout(words)
    plan = make_plan(SHAPE, layout, batch, sequence=16, method=Method(precision))
    mesh = connect_mesh(layout, SingleRank(), torch.device("cpu"))
    placed = apply(plan, mesh=mesh, fill=random_init(weights(SHAPE), 5))
    tokens = torch.arange(32).view(2, 16) % 40
    hidden = placed.model(tokens, torch.arange(16).expand(2, 16))
    loss = placed.loss(hidden, tokens.roll(1, 1))
    loss.backward()
    return float(loss.detach()), torch.cat([unit.gradients for unit in placed.units.values()])


def test_a_model_in_eight_bits_is_near_the_one_in_sixteen_on_parameters_and_handles_alike():
    (low, mine), (bf16, theirs) = trained("dp1 x1", "fp8"), trained("dp1 x1", "bf16")
    handles, through = trained("dp1 x1 recompute=full", "fp8")
    assert low != bf16 and abs(low - bf16) < 0.02 * bf16
    assert 0.01 < (mine - theirs).norm() / theirs.norm() < 0.3
    assert handles == low
    torch.testing.assert_close(through, mine, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((9, 0), ""),
        ((8, 9), ""),
        ((8, 0), "A100 has 8.0; use method.precision=bf16"),
        ((7, 5), "A100 has 7.5; use method.precision=float32"),
        (None, "this run computes on the A100; use method.precision=bf16"),
    ],
)
def test_a_device_without_eight_bits_is_told_what_to_use(capability, said):
    found = lacks("fp8", "A100", capability)
    assert found.endswith(said) and bool(found) == bool(said)
    assert lacks("bf16", "A100", capability) == ""


def test_what_eight_bits_cannot_do_yet_is_refused_in_a_sentence():
    assert unsupported(SHAPE, Layout(), precision="fp8") == []
    (tp,) = unsupported(SHAPE, parse_layout("tp2"), precision="fp8")
    assert "each by its own scale; use method.precision=bf16" in tp
    (size,) = unsupported(replace(SHAPE, ffn_size=50), Layout(), precision="fp8")
    assert "model.ffn_size is 50" in size
    assert unsupported(LLAMA, Layout(), precision="bf16") == []
