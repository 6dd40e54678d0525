"""Compiles the blocks of a model with torch.compile, so that all of them share one compiled code.

torch.compile compiles a function again for every value that it meets while it reads the function,
and gives up after eight times. Two things differ from block to block or from step to step: the
name that a block's dropout noise depends on, and how a micro-batch is cut into documents. The two
functions that read them are therefore left as they are:

    norm, q k v, rotation  |  attention inside documents  |  o, [dropout], norm, feed-forward ...
    compiled                  as it is                       compiled

Attention is one call of a fast kernel per document, in which there is nothing to compile.
"""

import torch

from howdah.model.attention import attend
from howdah.model.transformer import Block, Transformer, drop


def compile_blocks(model: Transformer, *, backend: str = "inductor") -> None:
    """Compiles all blocks of `model`, at their first call, with a `backend` of torch.compile."""
    attend_plainly, drop_plainly = torch.compiler.disable(attend), torch.compiler.disable(drop)
    for block in model.layers.values():
        assert isinstance(block, Block)
        block.attention.core, block.drop = attend_plainly, drop_plainly
        block.compile(backend=backend)
