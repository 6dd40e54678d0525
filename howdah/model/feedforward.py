"""The feed-forward layer: SwiGLU or GEGLU (Shazeer 2020), GELU or ReLU between two matrices."""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import PLAIN, Islands
from howdah.shapes.shape import FeedForward as Activation
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


def activated(x: Tensor, kind: Activation) -> Tensor:
    """What stands between two matrices without a gate."""
    if kind == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="none" if kind == "gelu_exact" else "tanh")


class FeedForward(nn.Module):
    """The feed-forward layer of a block: down(act(gate x) · up x), or down(act(up x)).

    inner  its inner width; None: that of the shape
    build  makes a matrix of (columns, rows, whether it has a bias)
    """

    def __init__(
        self,
        shape: ModelShape,
        inner: int | None = None,
        build: Callable[[int, int, bool], nn.Module] = nn.Linear,
    ) -> None:
        super().__init__()
        self.kind, self.islands = shape.feedforward, PLAIN
        inner = shape.ffn_size if inner is None else inner
        if shape.gated:
            self.gate = build(shape.width, inner, shape.bias)
        self.up = build(shape.width, inner, shape.bias)
        self.down = build(inner, shape.width, shape.bias)

    def forward(self, x: Tensor, *of: Any) -> Tensor:
        """Map x [..., h] → [..., h]. All matrices are given what comes behind x, too."""
        if self.kind == "swiglu":
            inner = swiglu(self.gate(x, *of), self.up(x, *of), self.islands)
        elif self.kind == "geglu":
            inner = F.gelu(self.gate(x, *of), approximate="tanh") * self.up(x, *of)
        else:
            inner = activated(self.up(x, *of), self.kind)
        return cast(Tensor, self.down(inner, *of))
