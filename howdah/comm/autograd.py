"""Autograd duals: what a collective of the forward pass owes in the backward pass.

Two kinds of tensors meet at the border of a parallel region: one that all ranks hold alike, and
one of which each rank holds a part (a slice, or a term of a sum).

    forward                         backward                 leads from → to
    copy_to        nothing          all-reduce               alike      → parts that differ
    all_reduce     all-reduce       nothing                  terms      → their sum, alike
    all_gather     all-gather       reduce-scatter           slices     → whole
    reduce_scatter reduce-scatter   all-gather               terms      → slices of their sum
    all_to_all     all-to-all       all-to-all, turned       rows       → rows elsewhere

`copy_to` and `all_reduce` are the pair f and g of Megatron-LM (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053): the loss behind them is one, held alike by all ranks. The
others are the exact transposes of each other: the loss is the sum of what the ranks compute.
Tensors are cut along `dim` into shares (`plan.flat.share`), which may be uneven.

They are for models of one's own over a `Group`. howdah's forms do not use them: their operations
start a message of the backward pass early and compute meanwhile (`parallel/tensor.py`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from howdah.comm.group import Group
from howdah.plan.flat_buffers import share


def copy_to(x: Tensor, group: Group) -> Tensor:
    """`x`, the same on all ranks, as the input of computations that differ by rank."""
    return _CopyTo.apply(x, group)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the terms `x` over the ranks, a fresh tensor."""
    return _AllReduce.apply(x, group)


def all_gather(x: Tensor, group: Group, *, whole: int, dim: int = 0) -> Tensor:
    """The slices of all ranks side by side; `whole` is how long `dim` becomes."""
    return _AllGather.apply(x, group, whole, dim)


def reduce_scatter(x: Tensor, group: Group, *, dim: int = 0) -> Tensor:
    """The rank's slice, along `dim`, of the sum of the terms `x`."""
    return _ReduceScatter.apply(x, group, dim)


def all_to_all(x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Rows of `x` to the other ranks, and rows from them, in rank order.

    sent, received  rows for and from each rank
    """
    return _AllToAll.apply(x, group, sent, received)


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def _gather(x: Tensor, group: Group, whole: int, dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    out = rows.new_empty(whole, *rows.shape[1:])
    group.all_gather(out, rows)
    return out.movedim(0, dim)


def _scatter(x: Tensor, group: Group, dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    start, stop = share(len(rows), group.size, group.rank)
    out = rows.new_empty(stop - start, *rows.shape[1:])
    group.reduce_scatter(out, rows)
    return out.movedim(0, dim)


def _exchange(x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    group.all_to_all(out, x, sent=sent, received=received)
    return out


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _sum(gradient, ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, whole: int, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(x, group, whole, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _scatter(gradient, ctx.group, ctx.dim), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.whole = group, dim, x.shape[dim]
        return _scatter(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _gather(gradient, ctx.group, ctx.whole, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
    ) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _exchange(x, group, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _exchange(gradient, ctx.group, ctx.received, ctx.sent), None, None, None
