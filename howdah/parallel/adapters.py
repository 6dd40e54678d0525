"""Adapters of low rank (`model/adapter.py`) in own operations, and beside matrices that tp cuts.

    columns of W are cut   A is whole on each tp rank, B is cut as W is: each rank makes A·x itself
    rows of W are cut      A is cut as W is, B is whole: W·x + s·B·(A·x) of each rank is a term of
                           the sum that follows anyway, so the forward pass sends nothing more

What is whole has a term of its gradient on each rank (`plan/sharding.py`); these are summed once
in a step, and have rank · width elements.

Lengths of rows (DoRA) are cut as rows are. Where columns of W are on several ranks, each has the
squares of its own, and the lengths are used behind the sum, with the bias.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch.nn.functional as F
from torch import Tensor, nn

from howdah.model.adapter import (
    AdaptedLinear,
    lengths,
    magnified,
    magnified_back,
    row_squares,
)
from howdah.model.loss import add_product
from howdah.parallel.ops import Handle, WeightStore, handle_of
from howdah.shapes.marks import Marks


class Sums(Protocol):
    """The tp ranks."""

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """Combines x of all ranks in place."""
        ...


@dataclass(frozen=True)
class Lengths:
    """Lengths of the rows of one matrix W, and the matrix."""

    weight: Handle
    base: Handle


@dataclass(frozen=True)
class Beside:
    """The adapter of one matrix: A [r, in], B [out, r], what their product is multiplied by; and
    lengths of rows, if it has them.
    """

    a: Handle
    b: Handle
    scale: float
    lengths: Lengths | None = None

    def expect_gradient(self) -> None:
        """Notifies the store that a backward pass will follow."""
        self.a.expect_gradient()
        self.b.expect_gradient()
        if self.lengths:
            self.lengths.weight.expect_gradient()

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

    def measured(
        self, v: Tensor, bias: Handle | None, over: Sums | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """The output of the matrix, from v [.., out], and what is kept for it: v, and the lengths
        that rows had. Without lengths to train, v itself, and nothing is kept.

        bias  added behind the lengths
        over  the ranks that have other columns of the matrix; None: all are here
        """
        if self.lengths is None:
            return v, None, None
        base, low = self.lengths.base.value(), (self.a.value(), self.b.value(), self.scale)
        squares = row_squares(base, *low)
        if over:
            over.combine(squares, "sum")
        norms = lengths(squares, base.dtype)
        return magnified(v, norms, self.lengths.weight, bias), v, norms

    def unmeasured(self, rows: Tensor, v: Tensor | None, norms: Tensor | None) -> Tensor:
        """From the gradient of the output, `rows` [n, out]: that of v. Gives lengths their own."""
        if self.lengths is None or v is None or norms is None:
            return rows
        d_v, of_m = magnified_back(rows, v, norms, self.lengths.weight)
        self.lengths.weight.add(lambda out: out.add_(of_m))
        return d_v

    def add_to_a(self, d_inner: Tensor, inputs: Tensor) -> None:
        """Gives A its gradient; inputs [n, in]."""
        self.a.add(lambda out: add_product(out, d_inner.T, inputs))


def beside(path: str, plain: nn.Module, store: WeightStore, marks: Marks) -> Beside | None:
    """The adapter of the linear at `path`, if it has one."""
    if not isinstance(plain, AdaptedLinear):
        return None
    a, b = (handle_of(f"{path}.lora_{name}.weight", store, marks) for name in "ab")
    measures = plain.lora_magnitude is not None
    m, base = (handle_of(f"{path}{one}weight", store, marks) for one in (".lora_magnitude.", "."))
    return Beside(a, b, plain.scale, Lengths(m, base) if measures else None)


def asked(weights: Sequence[Handle], besides: Sequence[Beside | None]) -> bool:
    """Whether a gradient needs the input of these matrices."""
    return any(weight.trains for weight in weights) or any(besides)
