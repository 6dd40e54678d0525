"""Autograd duals: gradients against small differences of the whole loss, and against one device.

The loss of the transposed pairs is the sum over the ranks of <weights of the rank, its output>.
It is linear, so a step of any size gives its slope exactly, up to rounding. Every rank moves
every element of every rank's input and looks how the whole loss changes.
"""

import numpy as np
import pytest
import torch

from howdah.comm import autograd
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.plan.flat_buffers import share

SIZES = [1, 2, 3]
LENGTH = 7  # not divisible by 2 or 3


def group_of(transport):
    return Group(transport, axis="tp", counters=Counters())


def rows_between(size):
    """Rows that each rank sends to each, some none."""
    return [[(2 * i + j) % 3 for j in range(size)] for i in range(size)]


def operations(group):
    """By name: the shape of this rank's input, and the operation."""
    start, stop = share(LENGTH, group.size, group.rank)
    table = rows_between(group.size)
    sent, received = table[group.rank], [row[group.rank] for row in table]
    return {
        "all_gather": (
            (stop - start, 2),
            lambda x: autograd.all_gather(x, group, whole=LENGTH),
        ),
        "all_gather, dim 1": (
            (2, stop - start),
            lambda x: autograd.all_gather(x, group, whole=LENGTH, dim=1),
        ),
        "reduce_scatter": ((LENGTH, 2), lambda x: autograd.reduce_scatter(x, group)),
        "reduce_scatter, dim -1": (
            (2, LENGTH),
            lambda x: autograd.reduce_scatter(x, group, dim=-1),
        ),
        "all_to_all": ((sum(sent), 2), lambda x: autograd.all_to_all(x, group, sent, received)),
    }


def slopes(transport, name):
    """The gradient by autograd, and by differences, of this rank's input."""
    group = group_of(transport)
    shape, operation = operations(group)[name]
    draw = torch.Generator().manual_seed(group.rank)
    x = torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
    out = operation(x)
    weights = torch.randn(out.shape, generator=draw, dtype=torch.float64)

    def loss():
        (total,) = group.sum_scalars([float((weights * operation(x)).sum())])
        return total

    (weights * out).sum().backward()
    counts = [0.0] * group.size
    counts[group.rank] = float(x.numel())
    before, found = loss(), torch.zeros_like(x)
    for rank, count in enumerate(group.sum_scalars(counts)):
        for element in range(int(count)):
            with torch.no_grad():
                if rank == group.rank:
                    x.view(-1)[element] += 1
                slope = loss() - before
                if rank == group.rank:
                    x.view(-1)[element] -= 1
                    found.view(-1)[element] = slope
    group.close()
    return x.grad.numpy(), found.numpy()


NAMES = [
    "all_gather",
    "all_gather, dim 1",
    "reduce_scatter",
    "reduce_scatter, dim -1",
    "all_to_all",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_slopes_of_the_whole_loss(workers, size, name):
    for gradient, slope in workers.run(slopes, name, ranks=size):
        np.testing.assert_allclose(gradient, slope, rtol=0, atol=1e-12)


def two_layers(transport, tokens, up, down):
    """tanh(x·up)·down with the hidden features cut over the ranks: f before, g behind."""
    group = group_of(transport)
    start, stop = share(up.shape[1], group.size, group.rank)
    x = torch.from_numpy(tokens).requires_grad_()
    mine = torch.from_numpy(up[:, start:stop]).requires_grad_()
    back = torch.from_numpy(down[start:stop]).requires_grad_()
    hidden = torch.tanh(autograd.copy_to(x, group) @ mine)
    out = autograd.all_reduce(hidden @ back, group)
    (out**2).sum().backward()  # the same loss on every rank, counted once
    group.close()
    return out.detach().numpy(), x.grad.numpy(), mine.grad.numpy(), back.grad.numpy()


@pytest.mark.parametrize("size", SIZES)
def test_copy_to_and_all_reduce_equal_one_device(workers, size):
    draw = np.random.default_rng(1)
    tokens, up, down = (draw.normal(size=s) for s in ((4, 5), (5, LENGTH), (LENGTH, 3)))
    x, first, second = (torch.from_numpy(a).requires_grad_() for a in (tokens, up, down))
    out = torch.tanh(x @ first) @ second
    (out**2).sum().backward()
    for rank, found in enumerate(workers.run(two_layers, tokens, up, down, ranks=size)):
        start, stop = share(LENGTH, size, rank)
        expected = (out.detach(), x.grad, first.grad[:, start:stop], second.grad[start:stop])
        for mine, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-12, atol=1e-13)
