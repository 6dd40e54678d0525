"""A loss of the user's own in the place of cross-entropy: a function of logits and labels.

    def loss(logits, labels):        [n, V] of at least float32, [n]  →  n losses, one a token
        return F.cross_entropy(logits, labels, reduction="none")

It sees the tokens with a label, a chunk at a time (`model/loss.py`), and a token's loss may depend
on its own logits alone: which tokens are seen together depends on the layout and the chunk. The
losses are summed, and divided by the tokens of the global batch. Its gradient is autograd's.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from howdah.base.errors import UserError
from howdah.base.named_code import failed
from howdah.plan.batch import MASKED

OwnLoss = Callable[[Tensor, Tensor], Tensor]


def own_losses(own: OwnLoss, logits: Tensor, labels: Tensor) -> Tensor:
    """The losses [n] of a chunk of tokens, zero where the label is masked.

    logits  [n, V]
    labels  [n], or MASKED

    Raises UserError if `own` fails, or gives anything else than a number for each token.
    """
    with torch.no_grad():
        return _losses(own, logits, labels)


def own_gradient(own: OwnLoss, logits: Tensor, labels: Tensor, likely: Tensor) -> Tensor:
    """The gradient of `likely` times the summed loss of a chunk, by its logits [n, V]. What
    autograd keeps for it is gone when it is computed: no hook of the activations sees it.
    """
    with torch.enable_grad(), saved_tensors_hooks(lambda x: x, lambda x: x):
        leaf = logits.detach().requires_grad_()
        total = _losses(own, leaf, labels).sum() * likely
    if not total.requires_grad:
        raise UserError(
            "method.loss gave losses that autograd cannot trace back to the logits; compute them "
            "with torch's functions, without detach, numbers or argmax"
        )
    try:
        (gradient,) = torch.autograd.grad(total, leaf)
    except RuntimeError as error:
        raise failed("the gradient of method.loss", error) from error
    return gradient


def _losses(own: OwnLoss, logits: Tensor, labels: Tensor) -> Tensor:
    there = labels != MASKED
    wanted = labels[there]
    try:
        found = own(logits[there], wanted)
    except Exception as error:
        raise failed("method.loss", error) from error
    if not isinstance(found, Tensor) or found.shape != wanted.shape:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UserError(
            f"method.loss gave {what} for {len(wanted)} tokens; it must return a loss for each, a "
            f"tensor of shape ({len(wanted)},)"
        )
    return torch.zeros_like(logits[:, 0]).masked_scatter(there, found.to(logits.dtype))
