"""Adapters of low rank (`model/adapter.py`) in own operations, and beside matrices that tp cuts.

    columns of W are cut   A is whole on each tp rank, B is cut as W is: each rank makes A·x itself
    rows of W are cut      A is cut as W is, B is whole: W·x + s·B·(A·x) of each rank is a term of
                           the sum that follows anyway, so the forward pass sends nothing more

What is whole has a term of its gradient on each rank (`plan/sharding.py`); these are summed once
in a step, and have rank · width elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.adapter import AdaptedLinear
from howdah.model.loss import add_product
from howdah.parallel.ops import Handle, WeightStore, handle_of
from howdah.shapes.marks import Marks


@dataclass(frozen=True)
class Beside:
    """The adapter of one matrix: A [r, in], B [out, r], and what their product is multiplied by."""

    a: Handle
    b: Handle
    scale: float

    def expect(self) -> None:
        """Notifies the store that a backward pass will follow."""
        self.a.expect_gradient()
        self.b.expect_gradient()

    def add_to(self, out: Tensor, x: Tensor) -> Tensor:
        """Adds s·B·(A·x) to what the matrix has made of x [.., in]; returns A·x, [n, r]."""
        inner = F.linear(x, self.a.value()).flatten(0, -2)
        out.view(-1, out.shape[-1]).addmm_(inner, self.b.value().T, alpha=self.scale)
        return inner

    def back(self, rows: Tensor, d_x: Tensor, inner: Tensor) -> Tensor:
        """From the gradient of the output, `rows` [n, out]: adds to that of the input, d_x [n, in],
        and gives B its own. Returns the gradient of A·x.
        """
        d_inner = (rows @ self.b.value()).mul_(self.scale)
        d_x.addmm_(d_inner, self.a.value())
        scale = self.scale
        self.b.add(lambda out: add_product(out, rows.T, inner * scale))
        return d_inner

    def add_to_a(self, d_inner: Tensor, inputs: Tensor) -> None:
        """Gives A its gradient; inputs [n, in]."""
        self.a.add(lambda out: add_product(out, d_inner.T, inputs))


def beside(path: str, plain: nn.Module, store: WeightStore, marks: Marks) -> Beside | None:
    """The adapter of the linear at `path`, if it has one."""
    if not isinstance(plain, AdaptedLinear):
        return None
    a, b = (handle_of(f"{path}.lora_{name}.weight", store, marks) for name in "ab")
    return Beside(a, b, plain.scale)


def asked(weights: Sequence[Handle], besides: Sequence[Beside | None]) -> bool:
    """Whether a gradient needs the input of these matrices."""
    return any(weight.trains for weight in weights) or any(besides)
