"""A mixture of experts: each token passes a few of many feed-forwards, which a router chooses.

    x [b, s, h] ─┬─ router ── scores of E experts ── the k best, and their weights w
                 ├─ a copy for each choice, sorted by expert ── feed-forward of its expert ── y
                 │                            sum of w·y over the k choices of a token ──┐
                 └─ shared expert, which all tokens pass ──────────────────────────────── + ── out

(Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; DeepSeekMoE, https://arxiv.org/abs/2401.06066.)
A router scores by softmax or sigmoid, in at least float32, may choose among groups of experts first
and may add a bias to the scores that it chooses by, but not to the weights (`shapes/shape.py`,
Experts). Experts take all tokens that come (dropless), or with a capacity so many of each sequence.

What training adds is in `Balancing`: losses that keep the experts evenly busy, and the capacity
(`plan/method.py`, Routing, has the formulas). All of it is per sequence, so it does not depend on
which sequences share a micro-batch. The losses enter where the logits are: their gradient is added
to that of the logits, and their value is noted for the training step. So no stage of a pipeline has
to send a loss to the next.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.feedforward import FeedForward
from howdah.model.grouped import ExpertMatrix, Sizes, give
from howdah.model.islands import promoted
from howdah.model.loss import add_product
from howdah.model.norm import Weight, keep, value_of
from howdah.model.region import WHOLE
from howdah.plan.method import Routing
from howdah.shapes.dims import expert_places
from howdah.shapes.shape import Experts, ModelShape


class Load(NamedTuple):
    """What one router did with a micro-batch.

    loss     the sum of its losses, a scalar
    tokens   [E] choices that fell on each expert, of rows that count
    dropped  how many of them were beyond the capacity, a scalar
    """

    loss: Tensor
    tokens: Tensor
    dropped: Tensor


@dataclass(frozen=True)
class Balancing:
    """What training asks of all routers in one micro-batch.

    how     constants of the losses, and the capacity
    rows    [b] what the losses of each row count for: its labelled tokens. A row without any is
            padding, and its choices are not counted
    tokens  what the sum of the losses will be divided by
    loads   by name of the block, what its router found; it is written by the forward pass
    """

    how: Routing
    rows: Tensor
    tokens: float
    loads: dict[str, Load] = field(default_factory=dict)


# -- the router --------------------------------------------------------------------


class Choice(NamedTuple):
    """For each token its k experts: their numbers [b, s, k], and their weights [b·s, k] of at least
    float32.
    """

    numbers: Tensor
    weights: Tensor


class Router(nn.Module):
    """Scores all experts for each token, and chooses.

    bias  is added to the scores for the choice alone; its gradient is zero
    """

    weight: Weight
    bias: Weight | None

    def __init__(self, experts: Experts, width: int) -> None:
        super().__init__()
        self.experts = experts
        self.weight = nn.Parameter(torch.empty(experts.count, width))
        self.bias = nn.Parameter(torch.empty(experts.count)) if experts.bias else None

    def forward(
        self, x: Tensor, name: str, balancing: Balancing | None, *, adds: bool = True
    ) -> Choice:
        """The choice for tokens x [b, s, h].

        name  of the block, for what is noted in `balancing`
        adds  whether this rank adds the gradient of the losses
        """
        logits = cast(Tensor, _Logits.apply(x, self.weight, self.bias))
        plain = logits.detach()
        scores = _scores(plain, self.experts.scores)
        numbers = choose(scores, value_of(self.bias), self.experts)
        if balancing is not None:
            load, gradient = _balance(plain, scores, numbers, (self.experts, balancing))
            balancing.loads[name] = load
            if balancing.how.adds_loss:  # kept by all ranks alike, so that they hold equal bytes
                more = gradient if adds else gradient * 0
                logits = cast(Tensor, _WithGradient.apply(logits, more))
        chosen = _scores(logits, self.experts.scores).gather(-1, numbers).flatten(0, 1)
        if self.experts.normalise:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return Choice(numbers, chosen)


def _scores(logits: Tensor, kind: str) -> Tensor:
    return logits.softmax(-1) if kind == "softmax" else logits.sigmoid()


@torch.no_grad()
def choose(scores: Tensor, bias: Tensor | None, experts: Experts) -> Tensor:
    """The numbers [..., k] of the experts with the best of `scores` [..., E], of the best groups
    where experts are in groups (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.1.2).
    """
    if bias is not None:
        scores = scores + bias
    if experts.top_groups < experts.groups:
        grouped = scores.unflatten(-1, (experts.groups, -1))
        best = grouped.topk(experts.group_best).values.sum(-1).topk(experts.top_groups).indices
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
        scores = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(-2)
    return scores.topk(experts.top_k).indices


class _Logits(torch.autograd.Function):
    """x · weightᵀ in at least float32. The bias is only told that its gradient is zero: it has a
    place beside other gradients, whose sum waits for it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight, bias: Weight | None) -> Tensor:
        keep(ctx, (x,), (weight, bias), [])
        wide = promoted(x.dtype)
        return x.to(wide) @ cast(Tensor, value_of(weight)).to(wide).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        rows, inputs = grad.flatten(0, -2), x.flatten(0, -2).to(grad.dtype)
        value = cast(Tensor, value_of(ctx.handles[0] or weight)).to(grad.dtype)
        d_x = (grad @ value).to(x.dtype)
        d_weight = give(ctx, 0, weight, lambda out: add_product(out, rows.T, inputs))
        return d_x, d_weight, give(ctx, 1, bias, lambda out: None)


class _WithGradient(torch.autograd.Function):
    """`logits`, whose gradient is larger by `more`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, more: Tensor) -> Tensor:
        ctx.save_for_backward(more)
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + ctx.saved_tensors[0], None


# -- balance -----------------------------------------------------------------------


def _balance(
    logits: Tensor, scores: Tensor, numbers: Tensor, of: tuple[Experts, Balancing]
) -> tuple[Load, Tensor]:
    """What a router notes of a micro-batch, and the gradient of its losses by the logits [b, s, E],
    divided as the loss will be.
    """
    (experts, balancing), (b, s, count) = of, logits.shape
    how, rows = balancing.how, balancing.rows.to(logits.dtype)
    hits = logits.new_zeros(b, count)
    hits.scatter_add_(1, numbers.flatten(1), hits.new_ones(1, 1).expand(b, numbers[0].numel()))
    often = hits * (count / (experts.top_k * s))
    shares = scores if experts.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
    sizes = logits.logsumexp(-1, keepdim=True)
    balance, large = (often * shares.mean(1)).sum(-1), sizes.square().mean((1, 2))
    loss = (rows * (how.balance_loss * balance + how.z_loss * large)).sum()
    slope = shares * (often[:, None] - (often[:, None] * shares).sum(-1, keepdim=True))
    if experts.scores != "softmax":
        slope = slope * (1 - scores)
    gradient = how.balance_loss * slope + 2 * how.z_loss * sizes * logits.softmax(-1)
    gradient = gradient * (rows / (s * balancing.tokens))[:, None, None]
    counted = hits[balancing.rows > 0].to(torch.float64)
    most = expert_places(experts, s, how.capacity) if how.capacity else s
    load = Load(loss, counted.sum(0), (counted - most).clamp_(min=0).sum())
    return load, gradient


# -- to the experts and back -------------------------------------------------------


class Places(NamedTuple):
    """Where each choice of a token is among the rows that the experts take.

    slots  [T·k] the row of each choice; the number of rows where it was dropped
    rows   [n] the token of each row; T where the row stays empty
    sizes  rows of each expert
    holes  whether there may be dropped choices and empty rows
    """

    slots: Tensor
    rows: Tensor
    sizes: Sizes
    holes: bool


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
    return Places(slots, rows[:total], (b * most,) * experts.count, holes=True)


def _on_host(sizes: Tensor) -> Sizes:
    """On a CPU as numbers; those of a GPU stay there, and nobody waits for them."""
    return tuple(sizes.tolist()) if sizes.is_cpu else sizes


class _Spread(torch.autograd.Function):
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


class _Combine(torch.autograd.Function):
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
        d_y[slots] = copies
        return d_y[:-1], d_weights, None, None


def _taken(x: Tensor, index: Tensor, holes: bool) -> Tensor:
    """The rows of x [n, h] at `index`; zero where that is n."""
    if not holes:
        return x.index_select(0, index)
    found = x.index_select(0, index.clamp(max=len(x) - 1))
    return found.masked_fill_((index == len(x))[:, None], 0)


Exchange = Callable[[Callable[[Tensor, Sizes], Tensor], Tensor, Places], Tensor]


def _here(experts: Callable[[Tensor, Sizes], Tensor], x: Tensor, at: Places) -> Tensor:
    return experts(x, at.sizes)


# -- all of it ---------------------------------------------------------------------


class WithExperts(nn.Module):
    """What a block has in the place of its feed-forward.

    region    the border of the sub-layer
    exchange  runs experts on rows sorted by expert, at these places; some layouts have the experts
              on several ranks
    """

    def add_experts(self, shape: ModelShape) -> None:
        """Builds router and experts."""
        of = shape.experts
        assert of is not None, "a block without experts has a feed-forward"
        self.router, self.region = Router(of, shape.width), WHOLE
        self.exchange: Exchange = _here
        if of.shared:
            self.shared = FeedForward(shape, of.shared)
        if of.shared_gate:
            self.shared_gate = nn.Linear(shape.width, 1, bias=False)

        def stacked(columns: int, rows: int, bias: bool) -> nn.Module:
            return ExpertMatrix(of.count, columns, rows)

        self.experts = FeedForward(shape, of.ffn_size, stacked)

    def mixture(self, x: Tensor, name: str, balancing: Balancing | None) -> Tensor:
        """Map x [b, s, h] → [b, s, h] in the block called `name`. Without `balancing`, as in
        evaluation, no token is dropped.

        The shared expert is computed first: its weights are those of the block, and those of the
        routed experts come and go after them.
        """
        of, x = self.router.experts, self.region.enter(x)
        choice = self.router(x, name, balancing, adds=self.region.first)
        shared = self.shared(x) if of.shared else None
        if of.shared_gate:
            shared = self.shared_gate(x).sigmoid() * shared
        at = places(choice.numbers, of, balancing.how.capacity if balancing else 0.0)
        taken = cast(Tensor, _Spread.apply(x.flatten(0, 1), at))
        made = self.exchange(self.experts, taken, at)
        out = cast(Tensor, _Combine.apply(made, choice.weights, at, of.scale)).view_as(x)
        return self.region.leave(out if shared is None else out + shared)
