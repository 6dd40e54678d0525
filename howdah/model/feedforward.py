"""The feed-forward layer: SwiGLU (Shazeer 2020), GELU or ReLU between two matrices."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import PLAIN, Islands
from howdah.shapes.shape import ModelShape


class _SwiGLU(torch.autograd.Function):
    """silu(gate) · up, without keeping silu(gate): a third of what a feed-forward keeps. On a GPU
    the backward pass is one pass over memory either way; on a CPU it would take longer.
    """

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, islands: Islands) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.islands = islands
        return islands.swiglu(gate.detach(), up.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        return *ctx.islands.swiglu_backward(gate, up, grad), None


def swiglu(gate: Tensor, up: Tensor, islands: Islands = PLAIN) -> Tensor:
    """silu(gate) · up (Shazeer 2020)."""
    if gate.is_cpu and islands is PLAIN:
        return F.silu(gate) * up
    return cast(Tensor, _SwiGLU.apply(gate, up, islands))


class FeedForward(nn.Module):
    """The feed-forward layer of a block: down(silu(gate x) · up x), or down(act(up x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.kind, self.islands = shape.feedforward, PLAIN
        if self.kind == "swiglu":
            self.gate = nn.Linear(shape.width, shape.ffn_size, bias=shape.bias)
        self.up = nn.Linear(shape.width, shape.ffn_size, bias=shape.bias)
        self.down = nn.Linear(shape.ffn_size, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, h] → [b, s, h]."""
        if self.kind == "swiglu":
            inner = swiglu(self.gate(x), self.up(x), self.islands)
        elif self.kind == "gelu":
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            inner = F.relu(self.up(x))
        return cast(Tensor, self.down(inner))
