"""Compiles what can be compiled of a model, with torch.compile; blocks share one compiled code.

Which way depends on the layout:

    blocks whose weights are parameters     the whole block is one graph, attention in it as one
    (single, dp, zero1, zero2)              operator (`model/varlen.py`); not those with experts
    blocks of own operations                islands (`model/islands.py`): norms with residuals and
    (tp, pp, zero3, recompute)              dropout, rotary positions, the gate; the rest stays

Everywhere the loss and the last norm are islands. torch.compile compiles a function again for each
value that it meets while it reads the function, and gives up after eight times. So a block is given
what differs from step to step as tensors: how its rows are cut into documents, and the numbers that
its dropout noise depends on.

So a block is compiled once for rows that hold several documents, whatever their number, and once
for rows of one document each, which need no mask.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from howdah.model.block import Block
from howdah.model.documents import cut_to_tensors
from howdah.model.islands import compiled
from howdah.model.transformer import Transformer


def compile_model(model: Transformer, *, whole: bool, backend: str = "inductor") -> None:
    """Compiles `model`, at the first call of each function, with a `backend` of torch.compile.

    whole  whether blocks are compiled whole: their weights must be parameters
    """
    islands = compiled(backend)
    if whole:
        model.cut = cut_to_tensors
    dense = [block for block in model.blocks if not block.sparse]
    blocks = {id(inside) for block in dense for inside in block.modules()}
    for module in model.modules():
        if hasattr(module, "islands") and not (whole and id(module) in blocks):
            setattr(module, "islands", islands)  # noqa: B010
    for block in dense if whole else ():
        block.body = _without_gradients(block, torch.compile(block.both, backend=backend))


def _without_gradients(block: Block, body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Hides the gradients of a block's weights from the compiler while it runs: it breaks the graph
    at each that is wider than its weight (float32 beside bf16). Nothing of a forward reads them.
    """
    weights = list(block.parameters())

    def run(*given: Any, **words: Any) -> Tensor:
        kept = [weight.grad for weight in weights]
        for weight in weights:
            weight.grad = None
        try:
            return body(*given, **words)
        finally:
            for weight, gradient in zip(weights, kept, strict=True):
                weight.grad = gradient

    return run
