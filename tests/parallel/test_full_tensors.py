"""Whole tensors by name: fresh copies of the global shape, alike on every rank."""

import numpy as np
import pytest
import torch
from tiny import SHAPE, TIED, micro, place

from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.parallel.full_tensors import full_gradient, full_parameter, full_state, parameter_names
from howdah.plan.method import Method
from howdah.shapes.weights import weights
from howdah.train.step import StepContext, train_step

NAME = "layers.0.feedforward.down.weight"


def trained(transport, *, shape=SHAPE, micros=4, precision="float64"):
    """A placed model after one update from `micros` micro-batches shared out over the ranks."""
    mesh, placed = place(transport, shape=shape, precision=precision)
    own = [micro(n, shape=shape) for n in range(mesh.rank, micros, transport.size)]
    train_step(StepContext(placed, mesh, Method(precision), 5), own, step=0, rate=0.1)
    mesh.close()
    return placed


def test_names_are_those_of_the_table():
    for shape in (SHAPE, TIED):
        names = parameter_names(place(SingleRank(), shape=shape)[1])
        assert sorted(names) == sorted(weight.name for weight in weights(shape))


def test_tensors_are_those_of_the_model_and_fresh():
    placed = trained(SingleRank())
    for weight in weights(SHAPE):
        parameter = placed.model.get_parameter(weight.name)
        assert full_parameter(placed, weight.name).shape == weight.shape
        assert torch.equal(full_parameter(placed, weight.name), parameter.detach())
        assert torch.equal(full_gradient(placed, weight.name), parameter.grad)
    full_parameter(placed, NAME).zero_()
    full_gradient(placed, NAME).zero_()
    full_state(placed, NAME, "exp_avg").zero_()
    for tensor in (full_parameter(placed, NAME), full_gradient(placed, NAME)):
        assert tensor.abs().sum() > 0
    assert full_state(placed, NAME, "exp_avg").abs().sum() > 0


def test_states_follow_from_the_gradient():
    """After one update of Adam the first moment is (1 - β₁)·g and the second (1 - β₂)·g²."""
    placed = trained(SingleRank(), shape=TIED)
    for name in parameter_names(placed):
        gradient = full_gradient(placed, name)
        torch.testing.assert_close(full_state(placed, name, "exp_avg"), 0.1 * gradient)
        torch.testing.assert_close(full_state(placed, name, "exp_avg_sq"), 0.05 * gradient**2)


def test_bf16_parameters_are_told_in_float32():
    placed = trained(SingleRank(), precision="bf16")
    master = full_parameter(placed, NAME)
    assert master.dtype == full_gradient(placed, NAME).dtype == torch.float32
    assert not torch.equal(master, master.to(torch.bfloat16).float())


def everything(transport):
    placed = trained(transport)
    return {
        name: (
            full_parameter(placed, name).numpy(),
            full_gradient(placed, name).numpy(),
            full_state(placed, name, "exp_avg_sq").numpy(),
        )
        for name in parameter_names(placed)
    }


def test_all_ranks_tell_the_same_as_one_device(workers):
    expected = everything(SingleRank())
    for told in workers.run(everything, ranks=2):
        assert told.keys() == expected.keys()
        for name, tensors in told.items():
            for mine, theirs in zip(tensors, expected[name], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-14)


def test_unknown_names_are_told_with_the_nearest():
    _, placed = place(SingleRank())
    with pytest.raises(UserError, match=r"'layers\.0\.feedforward\.down'.*did you mean"):
        full_parameter(placed, "layers.0.feedforward.down")
    with pytest.raises(UserError, match=r"did you mean 'norm\.weight'"):
        full_gradient(placed, "norm.weights")
    with pytest.raises(UserError, match=r"no state 'exp_av'.*did you mean 'exp_avg'"):
        full_state(placed, "norm.weight", "exp_av")
