"""Own operations: linear, embedding and norm that refer to their weight by a handle, not a tensor.

A tensor that autograd has saved cannot be freed, cannot be replaced by a newer version, and gets
its gradient when autograd decides. With a handle all of this is possible: it only names the weight.
The store of the weights supplies the values when they are needed, and receives what is to be added
to the gradient.

    forward     weight = handle.value()                      gathered, if it was released
                y = x · weightᵀ                              saved: x and the handle
    backward    dx = dy · handle.value()
                handle.add(out ↦ out += dyᵀ · x)             at once, or later

One mechanism serves ZeRO-3 (weights are gathered and released), zero-bubble pipelines (weight
gradients are deferred), pipelines with several versions of a weight, and layers on the host: each
is a WeightStore.

The weight gradient is added directly to the tensor that keeps it, in at least float32. Where the
dtypes agree, no other tensor of its size is made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model import fp8
from howdah.model.adapter import AdaptedLinear, Magnitude, row_lengths
from howdah.model.embedding import Embedding
from howdah.model.grouped import ExpertMatrix, Sizes
from howdah.model.islands import PLAIN, Drop, Islands, promoted
from howdah.model.loss import NONE, Add, Terms, VocabShards, add_product, chunks, cross_entropy_sum
from howdah.model.moe import Choice, Router
from howdah.model.norm import AnyNorm, How, normed
from howdah.model.relative import RelativeTable
from howdah.model.transformer import HeadBias, Transformer
from howdah.shapes.marks import ALL, Marks


class WeightStore(Protocol):
    """An object that has weights and their gradients."""

    def value(self, name: str) -> Tensor:
        """The weight `name`, in the compute dtype; valid until the operation ends."""
        ...

    def rows(self, name: str, index: Tensor) -> Tensor:
        """The rows of a table for index [...] → [..., h]."""
        ...

    def expect_gradient(self, name: str) -> None:
        """Records that a forward pass has used the weight: one more `add` will follow."""
        ...

    def add(self, name: str, add: Add, *, now: bool = False) -> None:
        """Adds a term to the weight's gradient: calls `add` with the gradient, at once if `now`,
        otherwise at once or later.
        """
        ...

    def add_rows(self, name: str, index: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, h] to those rows of a gradient whose numbers are `index` [n]."""
        ...


@dataclass(frozen=True)
class Handle:
    """A weight, by its name in a store.

    trains  whether it has a gradient; else none is expected, and none is computed
    """

    name: str
    store: WeightStore
    trains: bool = True

    def value(self) -> Tensor:
        """The weight in the compute dtype; valid until the operation ends."""
        return self.store.value(self.name)

    def rows(self, index: Tensor) -> Tensor:
        """The rows of a table for index [...] → [..., h]."""
        return self.store.rows(self.name, index)

    def expect_gradient(self) -> None:
        """Records that a forward pass has used the weight: one more `add` will follow."""
        if self.trains:
            self.store.expect_gradient(self.name)

    def add(self, add: Add, *, now: bool = False) -> None:
        """Adds a term to the gradient: `add` is called with it, at once if `now`, or later."""
        if self.trains:
            self.store.add(self.name, add, now=now)

    def add_rows(self, index: Tensor, rows: Tensor) -> None:
        """Adds `rows` [n, h] to those rows of the gradient whose numbers are `index` [n]."""
        if self.trains:
            self.store.add_rows(self.name, index, rows)


def linear(x: Tensor, weight: Handle, bias: Handle | None = None) -> Tensor:
    """x [..., in] · weightᵀ [out, in] + bias [out] → [..., out]."""
    _note_use(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def embedding(tokens: Tensor, weight: Handle, anchor: Tensor) -> Tensor:
    """Rows of weight [V, h] for tokens [...] → [..., h].

    anchor  any tensor that requires a gradient: tokens do not, and autograd would skip the backward
    """
    _note_use(anchor, weight)
    return _Embedding.apply(anchor, tokens, weight)


def norm(
    x: Tensor, weight: Handle, bias: Handle | None, epsilon: float, islands: Islands = PLAIN
) -> Tensor:
    """RMSNorm of x [..., h]; with a bias, LayerNorm."""
    _note_use(x, weight, bias)
    return normed(x, weight, bias, How(epsilon, islands))


def head_loss(  # noqa: PLR0913
    hidden: Tensor,
    weight: Handle,
    labels: Tensor,
    *,
    bias: Handle | None = None,
    shards: VocabShards | None = None,
    terms: Terms = NONE,
    islands: Islands = PLAIN,
) -> Tensor:
    """The summed cross-entropy of `model/loss.py`: hidden [..., h], weight [V, h], labels [...].

    bias    [V] of the logits
    shards  the ranks that hold the other rows of the weight; None: this rank holds all rows
    terms   what is added to the cross-entropy
    islands  the functions of a chunk
    """
    for _ in chunks(labels.numel()):  # each chunk adds a term to the gradient
        _note_use(hidden, weight, bias)
    return cross_entropy_sum(
        hidden, weight, labels, bias=bias, shards=shards, terms=terms, islands=islands
    )


def add_bias(bias: Handle | None, rows: Tensor) -> None:
    """Adds the sum of `rows` [n, out] to the gradient of a bias, if there is one; until then, only
    the sum is kept.
    """
    if bias is None or not bias.trains:
        return
    total = rows.sum(0, dtype=promoted(rows.dtype))
    bias.add(lambda out: out.add_(total))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Handle, bias: Handle | None) -> Tensor:
        ctx.save_for_backward(x if weight.trains else None)
        ctx.weight, ctx.bias = weight, bias
        return F.linear(x, weight.value(), bias.value() if bias else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        d_x = gradient @ ctx.weight.value()
        add_bias(ctx.bias, rows)
        if x is not None:
            inputs = x.flatten(0, -2)
            ctx.weight.add(lambda out: add_product(out, rows.T, inputs))
        return d_x, None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, weight: Handle) -> Tensor:
        ctx.save_for_backward(tokens if weight.trains else None)
        ctx.weight = weight
        return weight.rows(tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        if tokens is None:
            return None, None, None
        ctx.weight.add_rows(tokens.flatten(), gradient.flatten(0, -2))
        return None, None, None


def _note_use(through: Tensor, *handles: Handle | None) -> None:
    """Notifies the stores that the weights are used, if a backward pass will follow."""
    if torch.is_grad_enabled() and through.requires_grad:
        for handle in handles:
            if handle:
                handle.expect_gradient()


# -- modules that replace those of a plain model --------------------------------------


class OwnLinear(nn.Module):
    """Replaces nn.Linear.

    low  whether it multiplies in 8 bits
    """

    def __init__(self, weight: Handle, bias: Handle | None) -> None:
        super().__init__()
        self.weight, self.bias, self.low = weight, bias, False

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] → [..., out]."""
        if self.low:
            _note_use(x, self.weight, self.bias)
            return fp8.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


class OwnAdaptedLinear(OwnLinear):
    """Replaces AdaptedLinear; `lora_a` and `lora_b` in it are own operations, too."""

    lora_a: OwnLinear
    lora_b: OwnLinear
    lora_magnitude: "OwnMagnitude | None"

    def __init__(self, weight: Handle, bias: Handle | None, scale: float) -> None:
        super().__init__(weight, bias)
        self.scale, self.lora_magnitude = scale, None  # until it is put in, if there is one

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., in] → [..., out]."""
        low, magnitude = self.lora_b(self.lora_a(x)), self.lora_magnitude
        if magnitude is None:
            return torch.add(super().forward(x), low, alpha=self.scale)
        v = torch.add(linear(x, self.weight), low, alpha=self.scale)
        base, a, b = (one.weight.value() for one in (self, self.lora_a, self.lora_b))
        return magnitude.forward(v, row_lengths(base, a, b, self.scale), self.bias)


class OwnMagnitude(Magnitude):
    """Replaces Magnitude."""

    def __init__(self, weight: Handle) -> None:
        nn.Module.__init__(self)
        self.weight: Handle = weight

    def forward(self, v: Tensor, norms: Tensor, bias: Any) -> Tensor:
        """v [.., out] · m/norms + bias."""
        _note_use(v, self.weight, bias)
        return super().forward(v, norms, bias)


class OwnEmbedding(nn.Module):
    """Replaces Embedding."""

    def __init__(self, weight: Handle) -> None:
        super().__init__()
        self.weight = weight
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, index: Tensor) -> Tensor:
        """Rows for index [...] → [..., h]."""
        return embedding(index, self.weight, self.anchor)


class OwnNorm(AnyNorm):
    """Replaces RMSNorm and LayerNorm."""

    def __init__(self, weight: Handle, bias: Handle | None, epsilon: float) -> None:
        super().__init__(epsilon)
        self.weight: Handle = weight
        self.bias: Handle | None = bias

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x [..., h]."""
        _note_use(x, self.weight, self.bias)
        return super().forward(x)

    def behind(self, x: Tensor, y: Tensor, drop: Drop | None) -> tuple[Tensor, Tensor]:
        """(x + dropout(y), its norm), for x and y [b, s, h]."""
        _note_use(y, self.weight, self.bias)
        return super().behind(x, y, drop)


class OwnRelativeTable(RelativeTable):
    """Replaces RelativeTable."""

    def __init__(self, weight: Handle) -> None:
        nn.Module.__init__(self)
        self.weight: Handle = weight

    def expected(self) -> None:
        """Expects one more term of the table's gradient: a block has used it."""
        self.weight.expect_gradient()


class OwnRouter(Router):
    """Replaces Router."""

    def __init__(self, plain: Router, weight: Handle, bias: Handle | None) -> None:
        nn.Module.__init__(self)
        self.experts = plain.experts
        self.weight: Handle = weight
        self.bias: Handle | None = bias

    def forward(self, x: Tensor, *of: Any, **how: Any) -> Choice:
        """The choice for tokens x [b, s, h]."""
        _note_use(x, self.weight, self.bias)
        return super().forward(x, *of, **how)


class OwnExpertMatrix(ExpertMatrix):
    """Replaces ExpertMatrix."""

    def __init__(self, weight: Handle) -> None:
        nn.Module.__init__(self)
        self.weight: Handle = weight

    def forward(self, x: Tensor, sizes: Sizes) -> Tensor:
        """Map rows x [n, in] → [n, out], each by its expert's matrix."""
        _note_use(x, self.weight)
        return super().forward(x, sizes)


def own_operations(model: nn.Module, store: WeightStore, marks: Marks = ALL) -> None:
    """Replaces linears, embeddings, norms, tables of relative positions, routers and experts of
    `model` by own operations. The model then has no parameters; `store` has their weights under
    the names that they had.

    marks  what is trained
    """
    for path, module in list(model.named_modules()):
        own = _own(path, module, store, marks)
        if own is not None:
            if isinstance(own, OwnEmbedding):
                own.anchor.requires_grad_("embedding" not in marks.still)
            parent, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(parent), leaf, own)


def in_eight_bits(model: Transformer) -> None:
    """Makes the linears of all blocks multiply in 8 bits (`model/fp8.py`)."""
    for path, module in list(model.layers.named_modules()):
        if isinstance(module, OwnLinear):
            module.low = True
        elif isinstance(module, nn.Linear):
            parent, _, leaf = path.rpartition(".")
            setattr(model.layers.get_submodule(parent), leaf, fp8.Fp8Linear(module))


def handle_of(name: str, store: WeightStore, marks: Marks) -> Handle:
    """The weight `name`, which may be frozen."""
    return Handle(name, store, marks.trains(name))


def _own(path: str, module: nn.Module, store: WeightStore, marks: Marks) -> nn.Module | None:
    weight = handle_of(f"{path}.weight", store, marks)
    has_bias = getattr(module, "bias", None) is not None
    bias = handle_of(f"{path}.bias", store, marks) if has_bias else None
    if isinstance(module, AdaptedLinear):
        return OwnAdaptedLinear(weight, bias, module.scale)
    if isinstance(module, nn.Linear | HeadBias):  # of which the bias alone is asked for
        return OwnLinear(weight, bias)
    if isinstance(module, AnyNorm):
        return OwnNorm(weight, bias, module.epsilon)
    if isinstance(module, Router):
        return OwnRouter(module, weight, bias)
    kinds = (own(weight) for kind, own in OF_A_WEIGHT.items() if isinstance(module, kind))
    return next(kinds, None)


OF_A_WEIGHT: dict[type[nn.Module], Callable[[Handle], nn.Module]] = {
    Embedding: OwnEmbedding,
    RelativeTable: OwnRelativeTable,
    ExpertMatrix: OwnExpertMatrix,
    Magnitude: OwnMagnitude,
}
