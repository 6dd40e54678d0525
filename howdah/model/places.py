"""From the tokens of a micro-batch to the rows that its experts take, and back.

    choices    token 0: b a    token 1: a c    token 2: c a        two of the experts a, b, c each
    rows       a: 0 1 2   b: 0   c: 1 2                            sorted by expert, then by token
    slots      3 0 1 4 5 2                                         the row of each choice

Experts take all rows that come, or with a capacity so many of each sequence: then some choices have
no row, and some rows no token, and are zero.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.grouped import Sizes
from howdah.model.islands import promoted
from howdah.shapes.dims import expert_places
from howdah.shapes.shape import Experts


class Places(NamedTuple):
    """Where each choice of a token is among the rows that the experts take.

    slots  [T·k] the row of each choice; n where it was dropped
    rows   [n] the token of each row; T where the row stays empty
    sizes  rows of each expert
    holes  whether there may be dropped choices and empty rows
    fixed  whether the sizes follow from the numbers of tokens alone
    """

    slots: Tensor
    rows: Tensor
    sizes: Sizes
    holes: bool
    fixed: bool = False


def kept_places(numbers: Tensor, before: Tensor, runs: tuple[int, ...], most: int) -> Places:
    """The places of the choices `numbers` [b, s, k] that an expert takes, which takes `most` of a
    sequence: sorted by expert, then by token. As many rows as there are choices; those behind the
    last expert's are empty.

    before  [n, b, E] how often each expert was chosen before each run of tokens
    runs    the lengths of the runs
    """
    (b, s, k), count = numbers.shape, before.shape[2]
    chosen = numbers.new_zeros(b, s, count).scatter_(2, numbers, 1)
    queued = [x.cumsum(1) + n[:, None] for x, n in zip(chosen.split(runs, 1), before, strict=True)]
    dropped = (torch.cat(queued, 1).gather(2, numbers) > most).flatten()
    by = numbers.flatten().masked_fill(dropped, count)
    order, slots = by.argsort(stable=True), torch.empty_like(by)
    slots[order] = torch.arange(len(by), device=by.device)
    rows = (order // k).masked_fill_(dropped[order], b * s)
    sizes = by.bincount(minlength=count + 1)[:count]
    return Places(slots.masked_fill_(dropped, len(by)), rows, _on_host(sizes), holes=True)


def places(numbers: Tensor, experts: Experts, capacity: float = 0.0) -> Places:
    """The places of all choices `numbers` [b, s, k]: sorted by expert, then by token. With a
    capacity every expert has as many rows for each sequence, and takes the first tokens that come.
    """
    (b, s, k), flat = numbers.shape, numbers.flatten()
    if capacity == 0:
        order, slots = flat.argsort(stable=True), torch.empty_like(flat)
        slots[order] = torch.arange(len(flat), device=flat.device)
        sizes = flat.bincount(minlength=experts.count)
        return Places(slots, order // k, _on_host(sizes), holes=False)
    most = expert_places(experts, s, capacity)
    chosen = numbers.new_zeros(b, s, experts.count).scatter_(2, numbers, 1)
    before = (chosen.cumsum(1) - 1).gather(2, numbers)
    row = torch.arange(b, device=flat.device)[:, None, None]
    total = experts.count * b * most
    slots = ((numbers * b + row) * most + before).masked_fill_(before >= most, total).flatten()
    rows = numbers.new_full((total + 1,), b * s)
    rows[slots] = torch.arange(len(flat), device=flat.device) // k
    return Places(slots, rows[:total], (b * most,) * experts.count, holes=True, fixed=True)


def _on_host(sizes: Tensor) -> Sizes:
    """On a CPU as numbers; those of a GPU stay there, and nobody waits for them."""
    return tuple(sizes.tolist()) if sizes.is_cpu else sizes


class Spread(torch.autograd.Function):
    """The rows that the experts take, [n, h], of tokens [T, h]; empty rows are zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Places) -> Tensor:
        ctx.save_for_backward(at.slots)
        ctx.tokens, ctx.holes = len(x), at.holes
        return _taken(x, at.rows, at.holes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        copies = _taken(grad, slots, ctx.holes).unflatten(0, (ctx.tokens, -1))
        return copies.sum(1, dtype=promoted(grad.dtype)).to(grad.dtype), None


class Combine(torch.autograd.Function):
    """For each token the weighted sum [T, h] of its experts' outputs, y [n, h]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, at: Places, scale: float) -> Tensor:
        ctx.save_for_backward(y, weights, at.slots)
        ctx.holes, ctx.scale = at.holes, scale
        mine = _taken(y, at.slots, at.holes).view(*weights.shape, -1).to(weights.dtype)
        return (mine * (weights * scale)[..., None]).sum(1).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        y, weights, slots = ctx.saved_tensors
        wide = grad.to(weights.dtype)[:, None]
        mine = _taken(y, slots, ctx.holes).view(*weights.shape, -1).to(weights.dtype)
        d_weights = (mine * wide).sum(-1) * ctx.scale
        copies = (wide * (weights * ctx.scale)[..., None]).to(y.dtype).flatten(0, 1)
        d_y = y.new_zeros(len(y) + 1, y.shape[1])  # what was dropped goes to the row behind
        d_y[slots.clamp(max=len(y))] = copies
        return d_y[:-1], d_weights, None, None


def _taken(x: Tensor, index: Tensor, holes: bool) -> Tensor:
    """The rows of x [n, h] at `index`; zero where that is n or more."""
    if not holes:
        return x.index_select(0, index)
    if len(x) == 0:  # a rank's tokens may all have been dropped
        return x.new_zeros(len(index), x.shape[1])
    found = x.index_select(0, index.clamp(max=len(x) - 1))
    return found.masked_fill_((index >= len(x))[:, None], 0)
