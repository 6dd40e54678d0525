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
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from howdah.model.feedforward import FeedForward
from howdah.model.grouped import ExpertMatrix, Sizes, give
from howdah.model.islands import promoted
from howdah.model.loss import add_product
from howdah.model.norm import Weight, keep, trained, value_of
from howdah.model.places import Combine, Places, Spread, kept_places, places
from howdah.model.region import WHOLE
from howdah.model.sequences import WHOLE_SEQUENCES, Sequences
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
    sequences  how the tokens here lie in their sequences
    """

    how: Routing
    rows: Tensor
    tokens: float
    loads: dict[str, Load] = field(default_factory=dict)
    sequences: Sequences = WHOLE_SEQUENCES


# -- the router --------------------------------------------------------------------


class Hits(NamedTuple):
    """How often each expert was chosen.

    runs    [n, b, E] in each run of the tokens here (`model/sequences.py`)
    before  [n, b, E] in what is before each run of its sequence
    every   [b, E] in whole sequences
    """

    runs: Tensor
    before: Tensor
    every: Tensor


class Choice(NamedTuple):
    """For each token its k experts: their numbers [b, s, k], and their weights [b·s, k] of at least
    float32. In training also how often each expert was chosen.
    """

    numbers: Tensor
    weights: Tensor
    hits: Hits | None


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
        numbers, hits = choose(scores, value_of(self.bias), self.experts), None
        if balancing is not None:
            hits = count_hits(numbers, self.experts.count, balancing)
            load, gradient = _balance(plain, scores, hits, (self.experts, balancing))
            balancing.loads[name] = load
            if balancing.how.adds_loss:  # kept by all ranks alike, so that they hold equal bytes
                more = gradient if adds else gradient * 0
                logits = cast(Tensor, _WithGradient.apply(logits, more))
        chosen = _scores(logits, self.experts.scores).gather(-1, numbers).flatten(0, 1)
        if self.experts.normalise:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return Choice(numbers, chosen, hits)


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
        keep(ctx, (x if trained(weight) else None,), (weight, bias), [])
        ctx.dtype, wide = x.dtype, promoted(x.dtype)
        return x.to(wide) @ cast(Tensor, value_of(weight)).to(wide).T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        value = cast(Tensor, value_of(ctx.handles[0] or weight)).to(grad.dtype)
        d_weight: Tensor | None = None
        d_x = (grad @ value).to(ctx.dtype)
        if x is not None:
            rows, inputs = grad.flatten(0, -2), x.flatten(0, -2).to(grad.dtype)
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


def count_hits(numbers: Tensor, count: int, balancing: Balancing) -> Hits:
    """How often each of `count` experts was chosen by `numbers` [b, s, k]. Where ranks share
    sequences, they tell each other if a loss or a capacity asks for it, and else stay alone.
    """
    runs = []
    for some in numbers.split(balancing.sequences.runs(numbers.shape[1]), 1):
        hits = torch.zeros(len(some), count, dtype=torch.int32, device=some.device)
        ones = hits.new_ones(1, 1).expand(len(some), some[0].numel())
        runs.append(hits.scatter_add_(1, some.flatten(1), ones))
    mine = torch.stack(runs)
    if balancing.how.asks_sequences:
        return Hits(mine, *balancing.sequences.hear(mine))
    return Hits(mine, torch.zeros_like(mine), mine.sum(0))


def _balance(
    logits: Tensor, scores: Tensor, hits: Hits, of: tuple[Experts, Balancing]
) -> tuple[Load, Tensor]:
    """What a router notes of a micro-batch, and the gradient of its losses by the logits [b, s, E],
    divided as the loss will be. Of a sequence that ranks share, each notes the part of its tokens.
    """
    (experts, balancing), (_, s, count) = of, logits.shape
    how, rows = balancing.how, balancing.rows.to(logits.dtype)
    length = balancing.sequences.length(s)
    often = hits.every.to(logits.dtype) * (count / (experts.top_k * length))
    shares = scores if experts.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
    sizes = logits.logsumexp(-1, keepdim=True)
    balance, large = (often * shares.sum(1)).sum(-1), sizes.square().sum((1, 2))
    loss = (rows * (how.balance_loss * balance + how.z_loss * large)).sum() / length
    slope = shares * (often[:, None] - (often[:, None] * shares).sum(-1, keepdim=True))
    if experts.scores != "softmax":
        slope = slope * (1 - scores)
    gradient = how.balance_loss * slope + 2 * how.z_loss * sizes * logits.softmax(-1)
    gradient = gradient * (rows / (length * balancing.tokens))[:, None, None]
    counted = (hits.runs * (balancing.rows > 0)[:, None]).to(torch.float64)
    most = expert_places(experts, length, how.capacity) if how.capacity else length
    beyond = (hits.before + counted - most).clamp_(min=0).minimum(counted)
    return Load(loss, counted.sum((0, 1)), beyond.sum()), gradient


# -- to the experts and back -------------------------------------------------------


def places_of(choice: Choice, experts: Experts, balancing: Balancing | None) -> Places:
    """The places of a choice; without `balancing` nothing is dropped. Of whole sequences a capacity
    takes as much of each; what comes first in sequences that ranks share is anywhere.
    """
    capacity = balancing.how.capacity if balancing else 0.0
    if balancing is None or choice.hits is None or not (capacity and balancing.sequences.shared):
        return places(choice.numbers, experts, capacity)
    sequences, here = balancing.sequences, choice.numbers.shape[1]
    most = expert_places(experts, sequences.length(here), capacity)
    return kept_places(choice.numbers, choice.hits.before, sequences.runs(here), most)


class Numbering(NamedTuple):
    """Where experts are, if not by number: the expert at each place, and the place of each [E]."""

    order: Tensor
    place: Tensor


def placed(choice: Choice, by: Numbering | None) -> Choice:
    """A choice of experts by their places."""
    if by is None:
        return choice
    hits = choice.hits and choice.hits._replace(before=choice.hits.before[..., by.order])
    return choice._replace(numbers=by.place[choice.numbers], hits=hits)


Feed = Callable[[Tensor, Sizes], Tensor]
Beside = Callable[[], Tensor | None]
Both = tuple[Tensor, Tensor | None]
Exchange = Callable[[Feed, Tensor, Places, Beside], Both]


def _here(experts: Feed, x: Tensor, at: Places, beside: Beside) -> Both:
    made = beside()
    return experts(x, at.sizes), made


# -- all of it ---------------------------------------------------------------------


class WithExperts(nn.Module):
    """What a block has in the place of its feed-forward.

    region    the border of the sub-layer
    exchange  runs experts on rows sorted by expert, at these places, and besides the shared expert;
              some layouts have the experts on several ranks
    numbering  of the experts there, where these are not by number
    """

    numbering: Numbering | None = None

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

        The shared expert is computed before the others: its weights are those of the block, and
        those of the routed experts come and go after them.
        """
        of, x = self.router.experts, self.region.enter(x)
        choice = self.router(x, name, balancing, adds=self.region.first)
        choice = placed(choice, self.numbering)
        at = places_of(choice, of, balancing)
        taken = cast(Tensor, Spread.apply(x.flatten(0, 1), at))
        made, shared = self.exchange(self.experts, taken, at, partial(self._shared, x))
        out = cast(Tensor, Combine.apply(made, choice.weights, at, of.scale)).view_as(x)
        return self.region.leave(out if shared is None else out + shared)

    def _shared(self, x: Tensor) -> Tensor | None:
        """What the shared expert makes of x [b, s, h]; None where there is none."""
        of = self.router.experts
        if not of.shared:
            return None
        out = cast(Tensor, self.shared(x))
        return self.shared_gate(x).sigmoid() * out if of.shared_gate else out
