"""A loss of the user's own: as cross-entropy it is the built-in one, chunk by chunk."""

import pytest
import torch
import torch.nn.functional as F

from howdah.base.errors import UserError
from howdah.model.loss import Terms, cross_entropy_sum
from howdah.plan.batch import MASKED


def plain(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


def squared(logits, labels):
    return (1 - logits.softmax(-1).gather(1, labels[:, None])[:, 0]) ** 2


def made(dtype=torch.float64):
    hidden = torch.randn(2, 7, 6, dtype=dtype, requires_grad=True)
    weight = torch.randn(11, 6, dtype=dtype, requires_grad=True)
    bias = torch.randn(11, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, 11, (2, 7))
    labels[0, :3] = labels[1, 6] = MASKED
    return hidden, weight, bias, labels


def gradients(loss, *of):
    return [loss.detach(), *torch.autograd.grad(loss, of)]


@pytest.mark.parametrize("chunk", [1, 5, 2048])
@pytest.mark.parametrize("tokens", [1.0, 10.0])
def test_cross_entropy_of_ones_own_is_the_built_in_one(chunk, tokens):
    hidden, weight, bias, labels = made()
    both = [
        gradients(
            cross_entropy_sum(hidden, weight, labels, bias=bias, terms=terms, chunk=chunk) / 7.0,
            *(hidden, weight, bias),
        )
        for terms in (Terms(tokens=tokens), Terms(tokens=tokens, own=plain))
    ]
    for ours, theirs in zip(*both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("chunk", [3, 2048])
def test_another_loss_is_that_of_autograd(chunk):
    hidden, weight, bias, labels = made()
    terms = Terms(own=squared)
    ours = cross_entropy_sum(hidden, weight, labels, bias=bias, terms=terms, chunk=chunk)
    there = labels.view(-1) != MASKED
    logits = hidden.view(-1, 6)[there] @ weight.T + bias
    theirs = squared(logits, labels.view(-1)[there]).sum()
    of = hidden, weight, bias
    for one, other in zip(gradients(ours, *of), gradients(theirs, *of), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def fails(logits, labels):
    return 1 // 0


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits.sum(1)

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no gradient")


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (fails, "method.loss failed in .*test_own_loss.py, line .*: ZeroDivisionError: integer"),
        (lambda x, y: plain(x, y).mean(), r"method.loss gave \(\) for 10 tokens; it must return"),
        (lambda x, y: 0.0, "method.loss gave float for 10 tokens"),
        (lambda x, y: plain(x.detach(), y), "gave losses that autograd cannot trace back to the l"),
        (lambda x, y: Fails.apply(x), r"the gradient of method.loss failed in .*no gradient"),
    ],
)
def test_a_loss_that_is_none_is_one_sentence(own, said):
    hidden, weight, _, labels = made()
    with pytest.raises(UserError, match=said):
        cross_entropy_sum(hidden, weight, labels, terms=Terms(own=own))
