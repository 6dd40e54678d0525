"""The embedding: a table lookup whose gradient is summed in at least float32.

A frequent token occurs hundreds of times in a micro-batch, and the gradient of its row is the sum
of as many terms. torch's own lookup adds them in the dtype of the weight: in bfloat16 the row of a
token that occurs 230 times had an error of 1.6 %. Here they are added in float32, and rounded once
if the weight's gradient is stored in bfloat16.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.islands import promoted


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = len(weight)
        return F.embedding(indices, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        wide = grad.to(promoted(grad.dtype))
        # the backward operation of torch's own lookup: it adds in a fixed order on any device
        total = torch.ops.aten.embedding_dense_backward(wide, indices, ctx.rows, -1, False)
        return total, None


class Embedding(nn.Module):
    """An embedding table: returns row i of `weight` [rows, width] for each index i."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, indices: Tensor) -> Tensor:
        """Look up indices [...] → [..., width]."""
        return cast(Tensor, _Lookup.apply(self.weight, indices))
