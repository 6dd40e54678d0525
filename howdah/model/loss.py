"""The head and its cross-entropy as one operation, in chunks of tokens.

The logits of a long sequence are the largest tensor of a small model: s·V numbers, three times
over with their softmax and gradient. Here they exist for one chunk at a time:

    forward     chunk 0 | chunk 1 | ... | last chunk      only each token's log-sum-exp is kept,
                                          ^^^^^^^^^^      and the last chunk's exponentials
    backward    last chunk first, from what was kept; the others compute their logits again

So the memory is one chunk's, and a sequence that fits in one chunk computes nothing twice.
Softmax and gradient overwrite the logits: on a CPU a fresh tensor of that size costs as much
time as the exponentials themselves.

The loss is a *sum* over tokens (numerics: counted over the global batch and divided once):

    loss = Σ over tokens with a label of (log Σⱼ exp xⱼ - x_label)
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from howdah.model.norm import promoted
from howdah.plan.batch import MASKED

CHUNK = 2048  # tokens


def cross_entropy_sum(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk: int = CHUNK
) -> Tensor:
    """The summed loss of all tokens, a scalar of at least float32.

    hidden  [..., h] hidden states
    weight  [V, h] the head
    labels  [...] the token to predict, or MASKED
    chunk   tokens whose logits exist at one time
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss = _ChunkedCrossEntropy.apply(flat, weight, labels.reshape(-1), chunk)
    assert isinstance(loss, Tensor)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
        wide = promoted(hidden.dtype)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        normalisers = torch.empty(len(labels), dtype=wide, device=hidden.device)
        kept = None
        for start in range(0, len(labels), chunk):
            kept = None  # what the chunk before kept goes before this one's logits come
            part = slice(start, start + chunk)
            logits = _logits(hidden[part], weight)
            at_label = logits.gather(1, labels[part].clamp(min=0)[:, None])[:, 0]
            normalisers[part], kept = _exponentials(logits)
            valid = labels[part] != MASKED
            loss += torch.where(valid, normalisers[part] - at_label, 0).sum()
            del logits
        ctx.save_for_backward(hidden, weight, labels, normalisers)
        ctx.chunk, ctx.kept = chunk, kept
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden, weight, labels, normalisers = ctx.saved_tensors
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=promoted(weight.dtype))
        kept, ctx.kept = ctx.kept, None
        for start in reversed(range(0, len(labels), ctx.chunk)):
            part = slice(start, start + ctx.chunk)
            if kept is None:
                logits = _logits(hidden[part], weight)
                kept = logits.sub_(normalisers[part][:, None]).exp_(), None
                del logits
            d_logits = _logit_gradient(kept, labels[part], grad).to(hidden.dtype)
            kept = None
            torch.mm(d_logits, weight, out=d_hidden[part])
            _add_product(d_weight, d_logits.T, hidden[part])
            del d_logits
        return d_hidden, d_weight, None, None


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).to(promoted(hidden.dtype))


def _exponentials(logits: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Log-sum-exp of each row, and exp(x - max) with its sum; overwrites `logits`."""
    largest = logits.amax(-1)
    exponentials = logits.sub_(largest[:, None]).exp_()
    total = exponentials.sum(-1)
    return total.log() + largest, (exponentials, total)


def _logit_gradient(kept: tuple[Tensor, Tensor | None], labels: Tensor, grad: Tensor) -> Tensor:
    """The gradient grad · (softmax - one-hot), zero where the label is masked.

    kept  exponentials and their row sums, whose quotient is the softmax; a sum of None stands
          for 1. The exponentials are overwritten.
    """
    exponentials, total = kept
    factor = grad * (labels != MASKED)
    d_logits = exponentials.mul_((factor if total is None else factor / total)[:, None])
    rows = torch.arange(len(labels), device=labels.device)
    d_logits[rows, labels.clamp(min=0)] -= factor
    return d_logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`. Chunks are summed in at least float32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)
