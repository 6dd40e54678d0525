"""Recomputation (activation checkpointing): what backward needs is computed again instead of kept.

    recompute=full        forward    x0 ─ block 0 ─ x1 ─ block 1 ─ x2        kept: x0, x1
                          backward            x1 ─ block 1 again ─ its backward
                                     x0 ─ block 0 again ─ its backward

    recompute=selective   kept: q, k, v and the output of attention; not the tensors between them

Full keeps only a block's input, and costs a third more of the block's flops (Chen et al. 2016,
https://arxiv.org/abs/1604.06174). Selective drops what attention keeps inside, which is much memory
for few flops (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).

Not all blocks have to be recomputed: the layout can choose some (`plan/chosen_blocks.py`).

The first run has no graph, so own operations expect no gradient for it; the second run, in
backward, has one. Noise is a function of positions (`model/noise.py`), so the second run drops the
same elements as the first, and no generator state is restored. Messages that the first run sends to
other ranks are sent again by the second.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.attention import Core
from howdah.model.block import BlockContext, BlockRun
from howdah.model.documents import Mask
from howdah.model.transformer import Transformer
from howdah.plan.plan import Plan

BlockFunction = Callable[..., Tensor]  # takes tensors


def recompute(model: Transformer, plan: Plan) -> None:
    """Makes the blocks of `model` keep what the plan selects, and recompute the rest in
    backward.
    """
    for block in model.blocks:
        kind = plan.recompute[block.part]
        if kind == "full":
            block.run = _block_again(block.sublayers)
        elif kind == "selective":
            for attention in (block.attention, *([block.cross] if block.crosses else [])):
                attention.core = _core_again(attention.core)


def again(run: BlockFunction, *tensors: Tensor) -> Tensor:
    """Returns run(*tensors) and keeps only `tensors`: `run` runs a second time in backward."""
    return _Again.apply(run, *tensors)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: BlockFunction, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.run = run
        return run(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        wanted = ctx.needs_input_grad[1:]
        pairs = zip(ctx.saved_tensors, wanted, strict=True)
        inputs = [tensor.detach().requires_grad_(want) for tensor, want in pairs]
        with torch.enable_grad():
            out = ctx.run(*inputs)
        torch.autograd.backward(out, gradient)
        return None, *(tensor.grad for tensor in inputs)


def _block_again(forward: BlockRun) -> BlockRun:
    def block(x: Tensor, context: BlockContext) -> Tensor:
        # The angles are kept, too, once for all blocks: as an argument, so that they are counted.
        # And what an encoder has made, which gets a gradient from every block.
        shared = {"rotary": context.rotary, "source": context.source}
        kept = {n: x for n, x in shared.items() if x is not None and x.is_floating_point()}

        def run(x: Tensor, *tensors: Tensor) -> Tensor:
            given: dict[str, Any] = dict(zip(kept, tensors, strict=True))
            return forward(x, replace(context, **given))

        return again(run, x, *kept.values())

    return block


def _core_again(core: Core) -> Core:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return again(lambda q, k, v: core(q, k, v, mask), q, k, v)

    return attend
