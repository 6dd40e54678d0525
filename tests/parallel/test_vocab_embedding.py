"""The embedding whose rows are cut over tp ranks: what each rank adds to its rows' gradient."""

import pytest
import torch

from howdah.base.stopwatch import Stopwatch
from howdah.comm.group import Group
from howdah.comm.transport import SingleRank
from howdah.parallel.ops import Handle
from howdah.parallel.tensor import VocabEmbedding
from howdah.parallel.tensor_border import TpRegion

VOCAB, WIDTH, FIRST, ROWS = 37, 6, 9, 13


class Rows:
    """A store with the rows of one rank, and their gradient."""

    def __init__(self, dtype):
        draw = torch.Generator().manual_seed(1)
        self.rows = torch.randn(ROWS, WIDTH, generator=draw).to(dtype)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.gradient = torch.zeros(ROWS, WIDTH, dtype=wide)

    def value(self, name):
        return self.rows

    def expect_gradient(self, name):
        pass

    def add(self, name, add, *, now=False):
        add(self.gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tokens_of_other_ranks_add_nothing_to_the_bit(dtype):
    """They were left out by a mask, for whose size a host has to wait for its GPU."""
    store, draw = Rows(dtype), torch.Generator().manual_seed(2)
    region = TpRegion(Group(SingleRank()), 40, sliced=False, keeps=False, waited=Stopwatch())
    embedding = VocabEmbedding(Handle("embedding.weight", store), region, FIRST)
    expected = store.gradient.clone()
    for _ in range(2):
        tokens = torch.randint(0, VOCAB, (3, 40), generator=draw)
        gradient = torch.randn(3, 40, WIDTH, generator=draw).to(dtype)
        here = (tokens >= FIRST) & (tokens < FIRST + ROWS)
        gradient[0, 0], here[0, 0], tokens[0, 0] = float("inf"), False, 0  # never looked at
        out = embedding(tokens)
        assert torch.equal(out[~here], torch.zeros_like(out[~here]))
        assert torch.equal(out[here], store.rows[tokens[here] - FIRST])
        out.backward(gradient)
        expected.index_add_(0, tokens[here] - FIRST, gradient[here].to(expected.dtype))
    assert expected.any()
    assert torch.equal(store.gradient.view(torch.uint8), expected.view(torch.uint8))
