"""Compiled blocks: they share one compiled code, whatever their number and their documents.

Every block was compiled by itself, because its name stood in what was compiled: from the ninth on,
torch gave up and ran them eagerly. Rows packed in another way were a reason to compile again too.
"""

import pytest
import torch

from howdah.model.noise import Noise
from howdah.model.transformer import Transformer
from howdah.shapes.shape import ModelShape

SHAPE = ModelShape(layers=10, width=16, heads=2, ffn_size=32, vocab=20, context=16)
TOKENS = torch.arange(32).reshape(2, 16) % 20
POSITIONS = torch.arange(16).expand(2, 16)


def model(dropout):
    built = Transformer(SHAPE, dropout=dropout)
    for number, parameter in enumerate(built.parameters()):
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))
    return built


def packed(step):
    """Documents of two rows, cut elsewhere at each step; every third has one document a row."""
    if step % 3 == 0:
        return torch.zeros(2, 16, dtype=torch.int64)
    return (torch.arange(16) > torch.tensor([[step], [15 - step]])).long()


def outputs(built, steps):
    for step in steps:
        noise = Noise(1, step, torch.tensor([2 * step, 2 * step + 1]))
        yield built(TOKENS, POSITIONS, packed(step), noise=noise)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's compiler looks at tensors in ways that warn
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_ten_blocks_are_compiled_once_each_kind(dropout):
    from torch._dynamo.utils import counters

    from howdah.parallel.compile import compile_blocks

    torch.compiler.reset()
    counters.clear()
    compiled = model(dropout)
    compile_blocks(compiled, backend="eager")
    [*outputs(compiled, range(3))]  # rows of one document, and packed rows
    graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs < SHAPE.layers
    found = [*outputs(compiled, range(3, 12))]
    assert counters["stats"]["unique_graphs"] == graphs
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    for mine, plain in zip(found, outputs(model(dropout), range(3, 12)), strict=True):
        assert torch.equal(mine, plain)
    torch.compiler.reset()
