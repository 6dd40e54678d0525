"""The feed-forward layer: SwiGLU (Shazeer 2020), GELU or ReLU between two matrices."""

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from howdah.shapes.shape import ModelShape


class FeedForward(nn.Module):
    """The feed-forward layer of a block: down(silu(gate x) · up x), or down(act(up x))."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.kind = shape.feedforward
        if self.kind == "swiglu":
            self.gate = nn.Linear(shape.width, shape.ffn_size, bias=shape.bias)
        self.up = nn.Linear(shape.width, shape.ffn_size, bias=shape.bias)
        self.down = nn.Linear(shape.ffn_size, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [b, s, h] → [b, s, h]."""
        if self.kind == "swiglu":
            inner = F.silu(self.gate(x)) * self.up(x)
        elif self.kind == "gelu":
            inner = F.gelu(self.up(x), approximate="tanh")
        else:
            inner = F.relu(self.up(x))
        return cast(Tensor, self.down(inner))
