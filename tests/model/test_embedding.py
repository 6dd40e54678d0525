"""The embedding against torch's own, and its sums over frequent tokens."""

import pytest
import torch
import torch.nn.functional as F

from howdah.model.embedding import Embedding

ROWS, WIDTH = 9, 4


def table(dtype):
    embedding = Embedding(ROWS, WIDTH)
    draw = torch.Generator().manual_seed(0)
    embedding.weight.data = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64).to(dtype)
    return embedding


@pytest.mark.parametrize("sizes", [(12,), (3, 4), (2, 3, 2)])
def test_value_and_gradient_equal_torch(sizes):
    embedding = table(torch.float64)
    indices = torch.randint(0, ROWS, sizes, generator=torch.Generator().manual_seed(1))
    mine, theirs = embedding(indices), F.embedding(indices, embedding.weight)
    assert torch.equal(mine, theirs)
    pull = torch.linspace(-1, 1, mine.numel(), dtype=torch.float64).view_as(mine)
    gradients = [torch.autograd.grad(out, embedding.weight, pull)[0] for out in (mine, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_frequent_tokens_gradient_is_rounded_once(dtype):
    """Added one by one in bfloat16, 2000 ones come to 256."""
    embedding = table(dtype)
    embedding(torch.full((2, 1000), 3)).sum().backward()
    assert embedding.weight.grad.dtype == dtype
    assert (embedding.weight.grad[3] == 2000).all()


def test_a_gradient_may_be_kept_wide():
    embedding = table(torch.bfloat16)
    embedding.weight.grad_dtype = torch.float32
    embedding(torch.full((2001,), 3)).sum().backward()
    assert embedding.weight.grad.dtype == torch.float32
    assert (embedding.weight.grad[3] == 2001).all()
