"""Tensor parallelism: every matrix of a block is cut, and the tp ranks compute on the same tokens.

(Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053.) The first matrices of a sub-layer are cut
by columns of their output, the last by rows of its input, so that nothing is sent between them:

    attention       q, k, v: some heads        →  attend  →  o: those heads      → sum
    feed-forward    gate, up: some columns     →  act     →  down: those columns → sum
    experts         the same of every expert, and all tokens routed by every rank
                 f                                                               g
    f   forward: nothing       backward: all-reduce of the gradient of the input
    g   forward: all-reduce    backward: nothing

Embedding and head are cut by rows of the vocabulary. Each tp rank looks up the tokens whose rows it
holds, with zeros for the others, and the results are summed. The logits stay sharded: only the
head's loss uses them (`model/loss.py`).

`plan/sharding.py` decides what each rank holds; a weight is stored in its unit as that box. The
model stays plain: `split` replaces its linears and embeddings by operations that communicate at the
boundary of the region (`tensor_border.py`), and hide that communication where they can:

    q, k, v (gate and up) are one operation (column-parallel linears): one message serves them all
    its backward starts the sum of the input's gradient, and meanwhile adds those of the weights
    under sp it gathers the input again while it computes that gradient, unless it was kept
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.attention import Attention, CrossAttention
from howdah.model.loss import add_product
from howdah.model.region import Region
from howdah.model.transformer import Transformer
from howdah.parallel.adapters import Beside, asked, beside
from howdah.parallel.mesh import Mesh
from howdah.parallel.ops import Handle, WeightStore, add_bias, embedding, handle_of
from howdah.parallel.tensor_border import TpRegion, TpVocabShards, WholeOnEach
from howdah.plan.flat_buffers import share
from howdah.plan.heads import heads
from howdah.plan.plan import Plan
from howdah.plan.sharding import CUT_BY_TP, tokens
from howdah.shapes.marks import Marks
from howdah.shapes.weights import Weight, part_weights

Linear = tuple[Handle, Handle | None]  # weight and bias


def split(model: Transformer, plan: Plan, region: TpRegion, store: WeightStore) -> None:
    """Replaces the linears and embeddings of `model` by tensor-parallel operations.

    The table of weights says which dims of a matrix tp cuts.
    """
    marks = plan.marks
    for block in model.blocks:
        matrices = [w for w in part_weights(plan.shape, block.part) if len(w.dims) == 2]
        cut = [weight for weight in matrices if CUT_BY_TP & set(weight.dims)]
        for path, found in groupby(cut, key=lambda weight: weight.name.rsplit(".", 2)[0]):
            inside = model.get_submodule(path)
            if not (path.endswith(".shared") or hasattr(inside, "region")):  # these have a border
                _split_module(inside, path, list(found), region, (store, marks))
        for inside in (block, block.attention):
            if hasattr(inside, "region"):
                inside.region = TpBorder(region)
        if isinstance(block.attention, Attention):
            block.attention.own = heads(plan.shape, region.group.size, region.group.rank)
    if hasattr(model, "embedding"):
        tokens = handle_of("embedding.weight", store, marks)
        table = VocabEmbedding(tokens, region, _first_row(plan, region))
        table.anchor.requires_grad_("embedding" not in marks.still)
        model.embedding = table  # type: ignore[assignment]
    for name in ("positions", "token_types"):
        if region.sliced and hasattr(model, name):
            own = SliceEmbedding(handle_of(f"{name}.weight", store, marks), region)
            own.anchor.requires_grad_("embedding" not in marks.still)
            setattr(model, name, own)


def _split_module(
    inside: nn.Module,
    path: str,
    cut: list[Weight],
    region: TpRegion,
    store: tuple[WeightStore, Marks],
) -> None:
    """Replaces the linears of one module, such as the attention of a block.

    Matrices that are cut along their first dim give columns of the output. They share an input, so
    they are computed together. One that is cut along its last dim gives the module's output.
    """
    linears = {weight.name.rsplit(".", 2)[1]: weight for weight in cut}
    columns = [leaf for leaf, weight in linears.items() if weight.dims[0] in CUT_BY_TP]
    crosses = isinstance(inside, CrossAttention)  # whose keys and values have another input
    for leaves in (columns[:1], columns[1:]) if crosses else (columns,):
        own = [_linear(f"{path}.{leaf}", inside, store) for leaf in leaves]
        low = [beside(f"{path}.{leaf}", getattr(inside, leaf), *store) for leaf in leaves]
        together = Columns(own, region, low)
        for index, leaf in enumerate(leaves):
            setattr(inside, leaf, Column(together, index))
    for leaf in linears.keys() - columns:
        low_rank = beside(f"{path}.{leaf}", getattr(inside, leaf), *store)
        setattr(inside, leaf, Row(*_linear(f"{path}.{leaf}", inside, store), region, low_rank))


def region_of(plan: Plan, mesh: Mesh) -> TpRegion:
    """The boundary of the tensor-parallel regions of this rank."""
    keeps = plan.layout.inputs == "gathered"
    return TpRegion(mesh.tp, tokens(plan, mesh.rank), plan.layout.sp, keeps, mesh.waited)


def vocab_shards(plan: Plan, region: TpRegion) -> TpVocabShards:
    """The tp ranks as the holders of the rows of the head."""
    if plan.shape.labels:
        return WholeOnEach(region, 0, plan.shape.outputs)
    return TpVocabShards(region, _first_row(plan, region), plan.shape.vocab)


def _first_row(plan: Plan, region: TpRegion) -> int:
    """The first row of the vocabulary that this rank holds."""
    return share(plan.shape.vocab, region.group.size, region.group.rank)[0]


def _linear(path: str, inside: nn.Module, store: tuple[WeightStore, Marks]) -> Linear:
    plain = getattr(inside, path.rpartition(".")[2])
    bias = handle_of(f"{path}.bias", *store) if plain.bias is not None else None
    return handle_of(f"{path}.weight", *store), bias


# -- operations ------------------------------------------------------------------


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of: "Columns") -> Any:
        linears, region = of.linears, of.region
        whole = region.gather_in(x, now=True)()
        outs, kept = [], []
        for (weight, bias), low in zip(linears, of.low, strict=True):
            behind = bias if low and low.lengths else None
            out = F.linear(whole, weight.value(), bias.value() if bias and not behind else None)
            inner = low.add_to(out, whole) if low else None
            out, v, norms = low.measured(out, behind) if low else (out, None, None)
            outs.append(out)
            kept += [inner, v, norms]
        asks = asked([weight for weight, _ in linears], of.low)
        ctx.save_for_backward((whole if region.keeps else x) if asks else None, *kept)
        ctx.of = of
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x, *kept), of = ctx.saved_tensors, ctx.of
        inner, vs, norms = kept[::3], kept[1::3], kept[2::3]
        here = of.region.keeps or x is None  # nobody asks for it
        pending = (lambda: x) if here else of.region.gather_in(x.detach())
        given = [gradient.flatten(0, -2) for gradient in gradients]
        every = zip(given, of.low, vs, norms, strict=True)
        rows = [low.unmeasured(row, v, n) if low else row for row, low, v, n in every]
        d_x = _input_gradient(rows, of.linears)
        d_inner = [
            low.back(row, d_x, u) if low else None
            for low, row, u in zip(of.low, rows, inner, strict=True)
        ]
        summed = of.region.reduce_out(d_x.view(*gradients[0].shape[:-1], -1))
        whole = pending()
        inputs = None if whole is None else whole.flatten(0, -2)
        found = zip(of.linears, of.low, given, rows, d_inner, strict=True)
        for (weight, bias), low, out, row, d in found:
            add_bias(bias, out)
            _add_gradients(weight, row, inputs)
            if low:
                low.add_to_a(d, inputs)
        return summed(), None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of: "Row") -> Tensor:
        made = F.linear(x, of.weight.value())
        inner = of.low.add_to(made, x) if of.low else None
        out, v, norms = of.region.reduce_out(made, now=True)(), None, None
        if of.low:
            out, v, norms = of.low.measured(out, of.bias, of.region)
        ctx.save_for_backward(x if asked([of.weight], [of.low]) else None, inner, v, norms)
        ctx.of = of
        return out.add_(of.bias.value()) if of.bias and v is None else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x, inner, v, norms), of = ctx.saved_tensors, ctx.of
        here = gradient.flatten(0, -2)
        if of.low and v is not None:
            gradient = of.low.unmeasured(here, v, norms).view_as(gradient)
        pending = of.region.gather_in(gradient)
        add_bias(of.bias, here)  # added after the sum: its gradient is of this rank's positions
        whole = pending()
        d_x, rows = whole @ of.weight.value(), whole.flatten(0, -2)
        inputs = None if x is None else x.detach().flatten(0, -2)
        if of.low:
            of.low.add_to_a(of.low.back(rows, d_x.view(-1, d_x.shape[-1]), inner), inputs)
        _add_gradients(of.weight, rows, inputs)
        return d_x, None


class _VocabEmbedding(torch.autograd.Function):
    """Row t - first of the weight for a token t, or zero where another tp rank holds the row."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tokens: Tensor, of: "VocabEmbedding") -> Tensor:
        ctx.save_for_backward(tokens if of.weight.trains else None)
        ctx.of, rows = of, of.weight.value()
        local, elsewhere = _local_rows(tokens, of.first, len(rows))
        out = F.embedding(local, rows).masked_fill_(elsewhere[..., None], 0)
        return of.region.reduce_out(out, now=True)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (tokens,) = ctx.saved_tensors
        if tokens is None:
            return None, None, None
        of, whole = ctx.of, ctx.of.region.gather_in(gradient, now=True)()

        def add(out: Tensor) -> None:
            # Tokens of other ranks add zeros. Leaving them out would take a copy whose size only
            # the device knows, and the host would wait for it.
            local, elsewhere = _local_rows(tokens, of.first, len(out))
            rows = whole.masked_fill(elsewhere[..., None], 0).flatten(0, -2)
            out.index_add_(0, local.reshape(-1), rows.to(out.dtype))

        of.weight.add(add)
        return None, None, None


def _local_rows(tokens: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """The local row of each token, and a mask of the tokens whose rows other tp ranks hold."""
    local = tokens - first
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


def _input_gradient(rows: Sequence[Tensor], linears: Sequence[Linear]) -> Tensor:
    """The gradient of the input that `linears` share: the sum of a term from each."""
    first, *others = zip(rows, linears, strict=True)
    total = first[0] @ first[1][0].value()
    for row, (weight, _) in others:
        total.addmm_(row, weight.value())
    return total


def _add_gradients(weight: Handle, rows: Tensor, inputs: Tensor | None) -> None:
    if weight.trains and inputs is not None:
        weight.add(lambda out: add_product(out, rows.T, inputs))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TpRegion) -> Tensor:
        ctx.region = region
        return region.gather_in(x.view_as(x), now=True)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.region.reduce_out(gradient.clone(), now=True)(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, region: TpRegion) -> Tensor:
        ctx.region = region
        return region.reduce_out(x.clone(), now=True)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.region.gather_in(gradient, now=True)(), None


class TpBorder(Region):
    """The border of a sub-layer of which each tp rank computes a term: latent attention, experts.
    What is whole inside, such as a router, has a term of its gradient on each rank, too.
    """

    def __init__(self, region: TpRegion) -> None:
        self.region, self.first = region, region.group.rank == 0

    def enter(self, x: Tensor) -> Tensor:
        """All positions of x, under sp gathered from the tp ranks."""
        return _Enter.apply(x, self.region)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' terms; under sp, of this rank's positions."""
        return _Leave.apply(x, self.region)


# -- modules that replace those of a plain model --------------------------------------


class Columns:
    """Linears of one input, computed together when the first of them is called.

    low  the adapter of each, if it has one
    """

    def __init__(
        self, linears: Sequence[Linear], region: TpRegion, low: Sequence[Beside | None] = ()
    ) -> None:
        self.linears, self.region, self.low = linears, region, low or [None] * len(linears)
        self._outs: dict[int, Tensor] = {}

    def take(self, index: int, x: Tensor) -> Tensor:
        """The output of the linear with index `index`; each output is taken once for every
        input.
        """
        if not self._outs:
            if torch.is_grad_enabled() and x.requires_grad:
                for (weight, bias), low in zip(self.linears, self.low, strict=True):
                    _use(weight, bias, low)
            self._outs = dict(enumerate(_Columns.apply(x, self)))
        return self._outs.pop(index)


class Column(nn.Module):
    """Replaces one of the linears that share an input: [b, s, in] → [b, S, out]. Under sp the input
    is a slice of the positions (s), and the output has all of them (S).
    """

    def __init__(self, together: Columns, index: int) -> None:
        super().__init__()
        self.together, self.index = together, index
        self.weight, self.bias = together.linears[index]

    def forward(self, x: Tensor) -> Tensor:
        """The columns of the output that this rank computes."""
        return self.together.take(self.index, x)


class Row(nn.Module):
    """Replaces a linear whose input is cut: [b, S, in] → [b, s, out], summed over the tp ranks.
    Under sp the input has all positions (S), and the output a slice of them (s). The bias is added
    once.
    """

    def __init__(
        self, weight: Handle, bias: Handle | None, region: TpRegion, low: Beside | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.region, self.low = weight, bias, region, low

    def forward(self, x: Tensor) -> Tensor:
        """The output, summed over the tp ranks."""
        if torch.is_grad_enabled() and x.requires_grad:
            _use(self.weight, self.bias, self.low)
        return _Row.apply(x, self)


class VocabEmbedding(nn.Module):
    """Replaces the embedding of tokens; `first` is this rank's first row of the vocabulary."""

    def __init__(self, weight: Handle, region: TpRegion, first: int) -> None:
        super().__init__()
        self.weight, self.region, self.first = weight, region, first
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Rows for tokens [b, S] → [b, s, h]."""
        if torch.is_grad_enabled() and self.anchor.requires_grad:
            _use(self.weight)
        return _VocabEmbedding.apply(self.anchor, tokens, self)


class SliceEmbedding(nn.Module):
    """Replaces an embedding that every tp rank holds whole; it looks up this rank's positions
    only.
    """

    def __init__(self, weight: Handle, region: TpRegion) -> None:
        super().__init__()
        self.weight, self.region = weight, region
        self.anchor = torch.zeros((), requires_grad=True)

    def forward(self, index: Tensor) -> Tensor:
        """Rows for index [b, S] → [b, s, h]."""
        return embedding(self.region.own_slice(index), self.weight, self.anchor)


def _use(*used: Handle | Beside | None) -> None:
    """Notifies the store that a backward pass will follow."""
    for one in used:
        if one:
            one.expect_gradient()
