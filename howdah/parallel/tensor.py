"""Tensor parallelism: every matrix of a block is cut, and its parts work on the same tokens.

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.) The first matrices of a sub-layer are cut
by columns of their output, the last by rows of its input, so that nothing is exchanged between:

    attention       q, k, v: some heads        →  attend  →  o: those heads      → sum
    feed-forward    gate, up: some columns     →  act     →  down: those columns → sum
                 f                                                               g
    f   forward: nothing       backward: all-reduce of the gradient of the input
    g   forward: all-reduce    backward: nothing

Embedding and head are cut by rows of the vocabulary. A token's row is here, or zero, and the
parts are summed; of the logits only the head's loss sees parts (`model/loss.py`).

What each rank holds is decided in `plan/sharding.py`; a weight lies in its unit as that box. The
model stays plain: `split` puts operations in the place of its linears and embeddings, which know
the region of the region (`sequence.py`) and hide what they can:

    q, k, v (gate and up) are one operation (column-parallel linears): one message serves them all
    their backward starts the sum of the input's gradient, and adds those of the weights meanwhile
    under sp it gathers the input once more while it computes that gradient, unless it was kept
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.loss import add_product
from howdah.model.transformer import Block, Transformer
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, WeightStore, add_bias, embedding
from howdah.parallel.tensor_border import TpRegion, TpVocabShards
from howdah.plan.flat_buffers import share
from howdah.plan.plan import Plan
from howdah.plan.sharding import CUT_BY_TP, tokens
from howdah.shapes.part import Part
from howdah.shapes.weights import part_weights

Linear = tuple[Handle, Handle | None]  # weight and bias


def split(model: Transformer, plan: Plan, region: TpRegion, store: WeightStore) -> None:
    """Replaces the linears and embeddings of `model` by tensor-parallel operations.

    The table of weights says which dim of a matrix tp cuts. Those of one module that are cut along
    their first dim share an input, and are computed together; one that is cut along its last dim
    gives the output of its sub-layer.
    """
    for block in cast(Iterable[Block], model.layers.values()):
        matrices = [w for w in part_weights(plan.shape, Part(block.name)) if len(w.dims) == 2]
        for path, found in groupby(matrices, key=lambda weight: weight.name.rsplit(".", 2)[0]):
            inside = model.get_submodule(path)
            columns: list[str] = []
            rows: list[str] = []
            for weight in found:
                leaf = weight.name.rsplit(".", 2)[1]
                cut = [dim in CUT_BY_TP for dim in weight.dims]
                if any(cut):
                    (columns if cut[0] else rows).append(leaf)
            linear = {leaf: _linear(f"{path}.{leaf}", inside, store) for leaf in columns + rows}
            together = Columns([linear[leaf] for leaf in columns], region)
            for index, leaf in enumerate(columns):
                setattr(inside, leaf, Column(together, index))
            for leaf in rows:
                setattr(inside, leaf, Row(*linear[leaf], region))
    if hasattr(model, "embedding"):
        model.embedding = VocabEmbedding(  # type: ignore[assignment]
            Handle("embedding.weight", store), region, _first_row(plan, region)
        )
    if region.sliced and hasattr(model, "positions"):
        model.positions = SliceEmbedding(  # type: ignore[assignment]
            Handle("positions.weight", store), region
        )


def region_of(plan: Plan, mesh: Mesh) -> TpRegion:
    """The region of all regions of this rank."""
    keeps = plan.layout.inputs == "gathered"
    return TpRegion(mesh.tp, tokens(plan, mesh.rank), plan.layout.sp, keeps)


def vocab_shards(plan: Plan, region: TpRegion) -> TpVocabShards:
    """Who holds the other rows of the head."""
    return TpVocabShards(region, _first_row(plan, region), plan.shape.vocab)


def _first_row(plan: Plan, region: TpRegion) -> int:
    """Of the vocabulary, the first that is here."""
    return share(plan.shape.vocab, region.group.size, region.group.rank)[0]


def _linear(path: str, inside: nn.Module, store: WeightStore) -> Linear:
    plain = getattr(inside, path.rpartition(".")[2])
    bias = Handle(f"{path}.bias", store) if plain.bias is not None else None
    return Handle(f"{path}.weight", store), bias


# -- operations ------------------------------------------------------------------


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, linears: Sequence[Linear], region: TpRegion) -> Any:
        whole = region.gather_in(x, now=True)()
        ctx.save_for_backward(whole if region.keeps else x)
        ctx.linears, ctx.region = linears, region
        return tuple(F.linear(whole, w.value(), b.value() if b else None) for w, b in linears)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        pending = (lambda: x) if ctx.region.keeps else ctx.region.gather_in(x.detach())
        rows = [gradient.flatten(0, -2) for gradient in gradients]
        d_x = _input_gradient(rows, ctx.linears)
        summed = ctx.region.reduce_out(d_x.view(*gradients[0].shape[:-1], -1))
        inputs = pending().flatten(0, -2)
        for (weight, bias), row in zip(ctx.linears, rows, strict=True):
            _add_gradients(weight, bias, row, inputs)
        return summed(), None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Handle, bias: Handle | None, region: TpRegion
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.region = weight, bias, region
        out = region.reduce_out(F.linear(x, weight.value()), now=True)()
        return out.add_(bias.value()) if bias else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        pending = ctx.region.gather_in(gradient)
        if ctx.bias:  # added behind the sum: its gradient is that of the positions that are here
            add_bias(ctx.bias, gradient.flatten(0, -2))
        whole = pending()
        d_x = whole @ ctx.weight.value()
        _add_gradients(ctx.weight, None, whole.flatten(0, -2), x.detach().flatten(0, -2))
        return d_x, None, None, None


class _VocabEmbedding(torch.autograd.Function):
    """Row t - first of the weight for a token t, or zero where another part has it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, of: "VocabEmbedding") -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.of, rows = of, of.weight.value()
        places, elsewhere = _places(tokens, of.first, len(rows))
        out = F.embedding(places, rows).masked_fill_(elsewhere[..., None], 0)
        return of.region.reduce_out(out, now=True)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        of, whole = ctx.of, ctx.of.region.gather_in(gradient, now=True)()

        def add(out: Tensor) -> None:
            places, elsewhere = _places(tokens, of.first, len(out))
            here = ~elsewhere
            out.index_add_(0, places[here], whole[here].to(out.dtype))

        of.weight.add(add)
        return None, None, None


def _places(tokens: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """The rows of tokens, and which of them are not among those that are here."""
    places = tokens - first
    elsewhere = (places < 0) | (places >= rows)
    return places.masked_fill(elsewhere, 0), elsewhere


def _input_gradient(rows: Sequence[Tensor], linears: Sequence[Linear]) -> Tensor:
    """What each of `linears` gives to the gradient of their input, together."""
    first, *others = zip(rows, linears, strict=True)
    total = first[0] @ first[1][0].value()
    for row, (weight, _) in others:
        total.addmm_(row, weight.value())
    return total


def _add_gradients(weight: Handle, bias: Handle | None, rows: Tensor, inputs: Tensor) -> None:
    if bias:
        add_bias(bias, rows)
    weight.add(lambda out: add_product(out, rows.T, inputs))


# -- modules, in the place of those of a plain model ---------------------------------


class Columns:
    """Linears of one input, computed together when the first of them is called."""

    def __init__(self, linears: Sequence[Linear], region: TpRegion) -> None:
        self.linears, self.region = linears, region
        self._outs: dict[int, Tensor] = {}

    def take(self, place: int, x: Tensor) -> Tensor:
        """The output of the linear at `place`; each is taken once for every input."""
        if not self._outs:
            if torch.is_grad_enabled() and x.requires_grad:
                for weight, bias in self.linears:
                    _use(weight, bias)
            self._outs = dict(enumerate(_Columns.apply(x, self.linears, self.region)))
        return self._outs.pop(place)


class Column(nn.Module):
    """Takes the place of one of the linears of a shared input: [b, s, in] → [b, S, out]; under sp
    from a slice of the positions to all.
    """

    def __init__(self, together: Columns, place: int) -> None:
        super().__init__()
        self.together, self.place = together, place
        self.weight, self.bias = together.linears[place]

    def forward(self, x: Tensor) -> Tensor:
        """The columns of this rank."""
        return self.together.take(self.place, x)


class Row(nn.Module):
    """Takes the place of a linear whose input is cut: [b, S, in] → [b, s, out], summed over the
    parts; under sp from all positions to a slice. The bias is added once.
    """

    def __init__(self, weight: Handle, bias: Handle | None, region: TpRegion) -> None:
        super().__init__()
        self.weight, self.bias, self.region = weight, bias, region

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the parts."""
        if torch.is_grad_enabled() and x.requires_grad:
            _use(self.weight, self.bias)
        return _Row.apply(x, self.weight, self.bias, self.region)


class VocabEmbedding(nn.Module):
    """Takes the place of the embedding of tokens; `first` is the first row that is here."""

    def __init__(self, weight: Handle, region: TpRegion, first: int) -> None:
        super().__init__()
        self.weight, self.region, self.first = weight, region, first
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows for tokens [b, S] → [b, s, h]."""
        if torch.is_grad_enabled():
            _use(self.weight, None)
        return _VocabEmbedding.apply(self.anchor, tokens, self)


class SliceEmbedding(nn.Module):
    """Takes the place of an embedding that is whole here, for the positions that are here."""

    def __init__(self, weight: Handle, region: TpRegion) -> None:
        super().__init__()
        self.weight, self.region = weight, region
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, index: Tensor) -> Tensor:
        """Rows for index [b, S] → [b, s, h]."""
        return embedding(self.region.own_slice(index), self.weight, self.anchor)


def _use(weight: Handle, bias: Handle | None) -> None:
    """Tells the store that a backward pass will follow."""
    weight.expect_gradient()
    if bias:
        bias.expect_gradient()
