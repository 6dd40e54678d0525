"""The head and its cross-entropy as one operation, in chunks of tokens.

The logits of a long sequence are the largest tensor of a small model: s·V numbers, and as many
again for each of softmax and gradient. Here they exist for one chunk at a time:

    forward     chunk 0 | chunk 1 | ... | last chunk      only each token's log-sum-exp is kept, and
                                          ^^^^^^^^^^      the gradient of the last chunk's logits
    backward    last chunk first: two products; the others compute their logits again

So the memory is that of one chunk, and a sequence that fits in one chunk computes nothing twice:
its loss and the gradient of its logits are made in one pass over them, divided by the tokens by
which the loss will be divided. Where another gradient of the loss comes in, their ratio is
multiplied with hidden states, which are smaller. Softmax and gradient overwrite the logits: on a
CPU, allocating a new tensor of that size takes as long as the exponentials themselves.

The loss is a *sum* over tokens; the training step divides it once, by the tokens of the global
batch. With logits x and their log-sum-exp L = log Σⱼ exp xⱼ over all V entries of the vocabulary:

    loss = Σ over tokens with a label of  L - (1 - ε)·x_label - ε/V·Σⱼ xⱼ + z·L²
    its gradient by xⱼ                    (1 + 2·z·L)·softmaxⱼ - (1 - ε)·[j is the label] - ε/V

ε smooths labels (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567), z keeps L near zero (de
Brébisson and Vincent 2016, https://arxiv.org/abs/1604.08859); the default of both is 0.

The rows of the head may be sharded over tp ranks (`VocabShards`). Then each rank computes, for each
token, the maximum of its logits, their sum of exponentials, and its terms of what is subtracted
from L. Three all-reduces of one number per token combine them; logits are not sent.

A loss of the user's own (`own_loss.py`) takes the place of the formula, where all rows are here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.islands import PLAIN, Islands, Smoothed, promoted
from howdah.model.own_loss import OwnLoss, own_gradient, own_losses
from howdah.plan.batch import MASKED

CHUNK = 2048  # tokens

Add = Callable[[Tensor], object]  # adds a gradient to a tensor of the weight's shape


class Matrix(Protocol):
    """A head weight that autograd does not see: it returns its rows and takes their gradient."""

    def value(self) -> Tensor:
        """The rows of the head on this rank: [V, h], or fewer rows when they are sharded."""
        ...

    def add(self, add: Add, *, now: bool = False) -> None:
        """Takes one term of the rows' gradient: `add` adds it to a tensor. The backward pass calls
        this once for each chunk. With `now` the term must be added at once, else it may be
        deferred.
        """
        ...


class VocabShards(Protocol):
    """The ranks over which the rows of the head are sharded, as one of these ranks sees them."""

    @property
    def first(self) -> int:
        """The number of this rank's first row."""
        ...

    @property
    def vocab(self) -> int:
        """The number of rows of all ranks together."""
        ...

    @property
    def keeps(self) -> bool:
        """Whether the result of `gather_in` is kept for the backward pass; else it is gathered
        again there.
        """
        ...

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """All-reduces `x` in place: the maximum or the sum over the ranks."""
        ...

    def gather_in(self, hidden: Tensor) -> Tensor:
        """The hidden states of all positions; `hidden` may be this rank's slice of them."""
        ...

    def reduce_out(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Starts to sum `gradient`, that of the result of `gather_in`, over the ranks. The function
        that is returned waits, and returns the sum or this rank's slice of it.
        """
        ...


class WholeVocab:
    """The VocabShards of a single rank: it holds all rows and all hidden states."""

    def __init__(self, vocab: int) -> None:
        self.first, self.vocab, self.keeps = 0, vocab, False

    def combine(self, x: Tensor, op: Literal["max", "sum"]) -> None:
        """Does nothing."""

    def gather_in(self, hidden: Tensor) -> Tensor:
        """Returns `hidden`."""
        return hidden

    def reduce_out(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns `gradient`."""
        return lambda: gradient


@dataclass(frozen=True)
class Terms:
    """The additions to plain cross-entropy: `smoothing` is ε, `z` is z of the formula above.

    tokens  what the caller will divide the loss by. The gradient of logits is divided by it before
            it is rounded; another divisor changes only the rounding
    own     a loss of the user's own, in place of all that
    """

    smoothing: float = 0.0
    z: float = 0.0
    tokens: float = 1.0
    own: OwnLoss | None = None


NONE = Terms()


def cross_entropy_sum(  # noqa: PLR0913
    hidden: Tensor,
    weight: Tensor | Matrix,
    labels: Tensor,
    *,
    bias: Tensor | Matrix | None = None,
    shards: VocabShards | None = None,
    terms: Terms = NONE,
    chunk: int = CHUNK,
    islands: Islands = PLAIN,
) -> Tensor:
    """The loss summed over all tokens, a scalar of at least float32.

    hidden  [..., s, h] hidden states; with `shards`, possibly a slice of the positions
    weight  [V, h] the head, or this rank's rows of it
    labels  [..., s] the token to predict, or MASKED
    bias    [V] of the logits, or this rank's rows of it
    shards  the ranks that hold the other rows of the head; None: this rank holds all rows
    terms   label smoothing and z-loss
    chunk   tokens whose logits are in memory at one time
    islands  the functions of a chunk
    """
    if shards is None:
        shards = WholeVocab(len(weight if isinstance(weight, Tensor) else weight.value()))
    wanted = torch.is_grad_enabled() and (hidden.requires_grad or not isinstance(weight, Tensor))
    how = _How(shards, terms, chunk, islands, wanted or _needs(weight))
    loss = _ChunkedCrossEntropy.apply(hidden, weight, labels, bias, how)
    assert isinstance(loss, Tensor)
    return loss


def chunks(tokens: int, chunk: int = CHUNK) -> list[slice]:
    """The slices of `chunk` tokens into which `tokens` tokens are cut."""
    return [slice(start, start + chunk) for start in range(0, tokens, chunk)]


def add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left [m, k] · right [k, n] to out [m, n], which may have a wider dtype."""
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    elif widens(left):
        torch.ops.aten.addmm.dtype_out(out, left, right, out.dtype, out=out)
    else:
        out.add_(left @ right)


def widens(x: Tensor) -> bool:
    """Whether the device of `x` multiplies tensors like it into float32: the accumulators as they
    are. Else a product is rounded to the dtype of `x` first.
    """
    return x.is_cuda and x.dtype.itemsize == 2 and hasattr(torch.ops.aten.addmm, "dtype_out")


@dataclass(frozen=True)
class _How:
    """The arguments of the operation that are not tensors.

    trains  whether a backward pass may follow
    """

    shards: VocabShards
    terms: Terms
    chunk: int
    islands: Islands
    trains: bool

    @property
    def smoothed(self) -> Smoothed:
        """The constants of the loss."""
        smoothing = self.terms.smoothing
        return Smoothed(smoothing, self.terms.z, smoothing / self.shards.vocab)

    def states(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The hidden states of all T tokens, [T, h], detached from autograd."""
        return self.shards.gather_in(hidden.detach()).reshape(-1, hidden.shape[-1])


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | Matrix,
        labels: Tensor,
        bias: Tensor | Matrix | None,
        how: _How,
    ) -> Tensor:
        states, flat = how.states(hidden, labels), labels.reshape(-1)
        rows, added = _value(weight), None if bias is None else _value(bias)
        wide = promoted(hidden.dtype)
        largest, total, label_term = states.new_empty(3, len(flat), dtype=wide).unbind()
        kept = last = None
        for last in chunks(len(flat), how.chunk):
            kept = None  # frees the previous chunk's memory before this chunk's logits are made
            if how.terms.own:
                kept = _logits(states[last], rows, added)
                largest[last] = own_losses(how.terms.own, kept, flat[last])
                continue
            place = _local_rows(flat[last], len(rows), how)
            largest[last], total[last], label_term[last], kept = how.islands.loss_terms(
                _logits(states[last], rows, added), *place, how.smoothed
            )
        if how.terms.own:
            losses = normalisers = largest
            if how.trains and isinstance(kept, Tensor) and last is not None:
                likely = _likely(normalisers, how)
                kept = own_gradient(how.terms.own, kept, flat[last], likely).to(hidden.dtype)
        else:
            normalisers = _combine(how.shards, largest, total, label_term)
            losses = normalisers - label_term
        if how.terms.z:
            losses += how.terms.z * normalisers.square()
        if how.trains and kept is not None and last is not None and not how.terms.own:
            scale = (largest[last] - normalisers[last]).exp_()
            place, likely = (flat[last], normalisers[last]), _likely(normalisers, how)
            kept = _logit_gradient((kept, scale), *place, (likely, how)).to(hidden.dtype)
        mine = weight if isinstance(weight, Tensor) else None
        kept_states = states if how.shards.keeps else hidden
        own_bias = bias if isinstance(bias, Tensor) else None
        ctx.save_for_backward(kept_states, mine, labels, normalisers, own_bias)
        ctx.matrix, ctx.how, ctx.kept = None if mine is not None else weight, how, kept
        ctx.bias = None if own_bias is not None else bias
        return torch.where(flat != MASKED, losses, 0).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, Tensor | None, None]:
        hidden, weight, labels, normalisers, own_bias = ctx.saved_tensors
        how, matrix, flat = ctx.how, ctx.matrix, labels.reshape(-1)
        rows = weight if matrix is None else matrix.value()
        added = own_bias if ctx.bias is None else ctx.bias.value()
        d_bias = None if own_bias is None else torch.zeros_like(added, dtype=promoted(added.dtype))
        states = hidden if how.shards.keeps else how.states(hidden, labels)
        d_states = torch.empty_like(states)
        d_weight = None
        if matrix is None and ctx.needs_input_grad[1]:  # else it is frozen
            d_weight = torch.zeros_like(rows, dtype=promoted(rows.dtype))
        d_logits, ctx.kept = ctx.kept, None
        likely = _likely(normalisers, how)
        ratio = grad / likely
        add: Add | None = None
        for part in reversed(chunks(len(flat), how.chunk)):
            _give(add, matrix, d_weight)
            add = None  # frees the gradient of these logits before the next logits are made
            if d_logits is None:
                logits = _logits(states[part], rows, added)
                if how.terms.own:
                    d_logits = own_gradient(how.terms.own, logits, flat[part], likely)
                else:
                    exponentials = logits.sub_(normalisers[part, None]).exp_()
                    place = flat[part], normalisers[part]
                    d_logits = _logit_gradient((exponentials, None), *place, (likely, how))
                    del exponentials
                d_logits = d_logits.to(hidden.dtype)
                del logits
            torch.mm(d_logits, rows, out=d_states[part])
            if added is not None:
                total = d_logits.sum(0, dtype=ratio.dtype) * ratio
                _give(partial(torch.Tensor.add_, other=total), ctx.bias, d_bias)
            add = partial(add_product, left=d_logits.T, right=_scaled(states[part], ratio))
            d_logits = None
        done = how.shards.reduce_out(_scaled(d_states, ratio).view(*labels.shape, -1))
        _give(add, matrix, d_weight)  # while the gradient of the hidden states is summed
        return done(), d_weight, None, d_bias, None


def _likely(like: Tensor, how: _How) -> Tensor:
    """The gradient of the loss that will come in if it is divided as `Terms.tokens` says."""
    return like.new_ones(()) / how.terms.tokens


def _scaled(x: Tensor, ratio: Tensor) -> Tensor:
    """x · ratio, rounded once: torch would round a scalar tensor to a narrower x first."""
    return (x.to(ratio.dtype) * ratio).to(x.dtype)


def _needs(weight: Tensor | Matrix) -> bool:
    return torch.is_grad_enabled() and isinstance(weight, Tensor) and weight.requires_grad


def _give(add: Add | None, matrix: Matrix | None, d_weight: Tensor | None) -> None:
    """Adds one chunk's term of the head's gradient to the matrix or to `d_weight`, if any."""
    if add and matrix:
        matrix.add(add, now=True)  # deferred, it would keep the logits of all chunks in memory
    elif add and d_weight is not None:
        add(d_weight)


def _value(weight: Tensor | Matrix) -> Tensor:
    return weight.detach() if isinstance(weight, Tensor) else weight.value()


def _logits(states: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
    if widens(states):
        made = torch.mm(states, rows.T, out_dtype=torch.float32)
    else:
        made = (states @ rows.T).to(promoted(states.dtype))
    return made if bias is None else made.add_(bias)


def _local_rows(labels: Tensor, rows: int, how: _How) -> tuple[Tensor, Tensor]:
    """(index of each label's row among this rank's rows [n], whether this rank has that row [n]).

    MASKED labels have no row.
    """
    local = labels - how.shards.first
    return local.clamp(0, rows - 1), (labels != MASKED) & (local >= 0) & (local < rows)


def _combine(shards: VocabShards, largest: Tensor, total: Tensor, label_term: Tensor) -> Tensor:
    """The log-sum-exp of each token over all ranks; sums `label_term` over the ranks in place.

    largest  the maximum of this rank's logits, for each token
    total    the sum of exp(logit - largest) on this rank, for each token; overwritten
    """
    most = largest.clone()
    shards.combine(most, "max")
    total.mul_((largest - most).exp_())
    shards.combine(total, "sum")
    shards.combine(label_term, "sum")
    return total.log().add_(most)


def _logit_gradient(
    kept: tuple[Tensor, Tensor | None], labels: Tensor, normalisers: Tensor, of: tuple[Tensor, _How]
) -> Tensor:
    """The gradient of the summed loss by the logits of a chunk, zero where the label is masked.

    kept         (exponentials, factor that makes them the softmax; None: 1). The exponentials are
                 overwritten.
    normalisers  log-sum-exp of each token
    of           (gradient of the loss, arguments of the operation)
    """
    exponentials, scale = kept
    likely, how = of
    wanted = likely * (labels != MASKED)
    factor = wanted if scale is None else wanted * scale
    if how.terms.z:
        factor = factor * (1 + 2 * how.terms.z * normalisers)
    place = _local_rows(labels, exponentials.shape[1], how)
    return how.islands.logit_gradient(exponentials, factor, wanted, place, how.smoothed)
