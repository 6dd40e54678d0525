"""The global norm, and updates clipped by it, as torch computes them on ordinary parameters."""

from dataclasses import replace

import pytest
import torch

from howdah.optim.clip import LONG, _update_unseen, clipped_update, squared_norm
from howdah.optim.optimizers import Range, build_optimizer, make_states, set_rate
from howdah.plan.method import Optimizer

SIZES = (7, 1, 64, 1000)
OPTIMIZERS = {
    "adamw": Optimizer("adamw"),
    "adam": Optimizer("adam"),
    "sgd": Optimizer("sgd", momentum=0.9),
    "plain sgd": Optimizer("sgd", momentum=0.0),
    "rmsprop": Optimizer("rmsprop", momentum=0.9),
    "plain rmsprop": Optimizer("rmsprop", momentum=0.0),
}


def gradients(dtype, scale=1.0):
    draw = torch.Generator().manual_seed(3)
    return [scale * torch.randn(size, generator=draw, dtype=dtype) for size in SIZES]


def norm_of(flats):
    return squared_norm(flats).sqrt()


def unseen(optimizer, flats, *, square, limit):
    """The update of a GPU, whose host does not know the norm."""
    _update_unseen(optimizer, flats, norm=square.sqrt(), limit=limit)


class Trained:
    """Some masters with their optimizer; each update takes its gradients anew."""

    def __init__(self, name, dtype):
        draw = torch.Generator().manual_seed(4)
        self.masters = [torch.randn(size, generator=draw, dtype=dtype) for size in SIZES]
        self.gradients = [torch.zeros_like(master) for master in self.masters]
        ranges = [
            Range("unit", 0, len(master), True, master, gradient)
            for master, gradient in zip(self.masters, self.gradients, strict=True)
        ]
        settings = replace(OPTIMIZERS[name], weight_decay=0.1)
        self.optimizer = build_optimizer(settings, ranges)
        make_states(settings, self.optimizer, ranges, step=0)
        set_rate(self.optimizer, 1e-2)
        self.update_by = clipped_update  # or `unseen`

    def update(self, flats, *, limit=1.0):
        torch._foreach_copy_(self.gradients, flats)
        self.update_by(self.optimizer, self.gradients, square=squared_norm(flats), limit=limit)

    def tensors(self):
        states = [self.optimizer.state[master] for master in self.masters]
        every = [*self.masters, *(tensor for state in states for tensor in state.values())]
        return [tensor.clone() for tensor in every]


# -- the norm ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("limit", [0.5, 1.0, 1e6])
def test_the_norm_and_the_clipped_gradients_are_torchs(dtype, limit):
    theirs = [torch.nn.Parameter(torch.zeros_like(flat)) for flat in gradients(dtype)]
    for parameter, gradient in zip(theirs, gradients(dtype), strict=True):
        parameter.grad = gradient
    mine = Trained("plain sgd", dtype)
    norm = float(norm_of(gradients(dtype)))
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit)
    tight = 1e-6 if dtype == torch.float32 else 1e-14
    assert norm == pytest.approx(float(expected), rel=tight)
    mine.update(gradients(dtype), limit=limit)
    for flat, parameter in zip(mine.gradients, theirs, strict=True):
        torch.testing.assert_close(flat, parameter.grad, rtol=tight, atol=0)
    assert (float(norm_of(mine.gradients)) < norm / 2) == (limit < norm / 2)


def test_the_norm_is_the_one_that_the_host_added_up():
    """Before GPUs, buffer by buffer; a run's numbers must not change by a bit."""
    flats = [flat for unit in range(12) for flat in gradients(torch.float32, scale=0.7**unit)]
    before = sum(float(torch.linalg.vector_norm(flat)) ** 2 for flat in flats)
    assert float(squared_norm(flats)) == before
    assert squared_norm(flats).dtype == torch.float64


@pytest.mark.parametrize("size", [LONG, 3 * 10**6 + 7])
def test_the_norm_of_a_long_buffer_is_exact(size):
    """torch's own, on a CPU in float32, is 6e-5 off for three million numbers."""
    flat = torch.randn(size, generator=torch.Generator().manual_seed(5))
    expected = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
    assert float(norm_of([flat])) == pytest.approx(expected, rel=1e-7)
    assert squared_norm([flat]).shape == () and squared_norm([flat]).dtype == torch.float64


def test_padding_of_zeros_counts_for_nothing():
    flat = gradients(torch.float64)[2]
    padded = torch.cat([flat, torch.zeros(9, dtype=torch.float64)])
    assert float(squared_norm([padded])) == pytest.approx(float(squared_norm([flat])), rel=1e-15)


def test_buffers_add_up_in_float64():
    """float32 has no room for 1 beside 1e8."""
    flats = [torch.tensor([1e4]), *([torch.tensor([1.0])] * 10)]
    assert float(squared_norm(flats)) == 1e8 + 10


def test_nothing_has_a_norm_of_zero():
    assert float(squared_norm([])) == float(squared_norm([torch.zeros(0)])) == 0.0


# -- the update --------------------------------------------------------------------


def test_a_limit_of_zero_never_clips_and_a_norm_of_zero_stays_finite():
    trained, flats = Trained("adamw", torch.float32), gradients(torch.float32, scale=1e6)
    trained.update(flats, limit=0.0)
    assert all(map(torch.equal, trained.gradients, flats))
    trained.update([torch.zeros_like(flat) for flat in flats], limit=1.0)
    assert all(tensor.isfinite().all() for tensor in trained.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("limit", [0.0, 0.5, 1e6])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_that_the_host_does_not_see_is_the_same(name, limit, dtype):
    """Within rounding: a fused kernel divides by norm/limit where the host multiplies."""
    seen, blind = Trained(name, dtype), Trained(name, dtype)
    blind.update_by = unseen
    for step in range(3):
        seen.update(gradients(dtype, scale=step + 1.0), limit=limit)
        blind.update(gradients(dtype, scale=step + 1.0), limit=limit)
    tight = 1e-5 if dtype == torch.float32 else 1e-13
    for mine, other in zip(seen.tensors(), blind.tensors(), strict=True):
        torch.testing.assert_close(mine, other, rtol=tight, atol=tight)
        assert limit == 0.5 or torch.equal(mine, other)  # a factor of 1 rounds nothing


@pytest.mark.parametrize("how", [clipped_update, unseen])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_norm_that_is_not_finite_changes_nothing(name, wrong, how):
    trained = Trained(name, torch.float32)
    trained.update(gradients(torch.float32))
    trained.update_by = how
    before, flats = trained.tensors(), gradients(torch.float32)
    flats[2][5] = wrong
    trained.update(flats)
    for mine, old in zip(trained.tensors(), before, strict=True):
        assert torch.equal(mine, old)
    trained.update(gradients(torch.float32))  # and the next one is an update again
    assert not torch.equal(trained.masters[0], before[0])
    assert all(tensor.isfinite().all() for tensor in trained.tensors())
