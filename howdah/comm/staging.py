"""Staging: converts any tensor to the form that transports need: flat, contiguous, on the CPU.

A tensor that already has this form is passed without a copy. Any other tensor is copied, and copied
back if the operation wrote to it. Some backends read a strided tensor as if it were contiguous,
which sends the elements next to it in memory.

Tensors of dtypes that cannot be reduced can still be moved: they are passed as bytes.
"""

import torch
from torch import Tensor

from howdah.base.errors import UserError
from howdah.comm.checks import is_let_go
from howdah.comm.reduction import REDUCIBLE


def check_tensor(operation: str, x: Tensor, *, written: bool) -> None:
    """Raises UserError, which names `operation`, if `x` cannot be passed to a transport.

    written  the operation writes to `x`
    """
    if not isinstance(x, Tensor):
        raise UserError(f"{operation}: takes tensors, not {type(x).__name__}")
    if x.layout is not torch.strided or x.is_quantized or x.is_meta:
        kind = "meta" if x.is_meta else "quantized" if x.is_quantized else str(x.layout)
        raise UserError(f"{operation}: a {kind} tensor has no elements to send: make it dense")
    if is_let_go(x):
        raise UserError(f"{operation}: the memory of a tensor was let go: there is nothing to send")
    if (
        written
        and not x.is_contiguous()
        and any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape, strict=True))
    ):
        raise UserError(f"{operation}: an expanded tensor cannot be written to: clone it first")


def to_host(x: Tensor) -> Tensor:
    """The elements of `x` as a flat CPU tensor in row-major order; copies only where necessary."""
    if x.requires_grad:
        x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    if not x.is_cpu or not x.is_contiguous():
        x = x.cpu().contiguous()
    flat = x if x.ndim == 1 else x.view(-1)
    return flat if flat.dtype in REDUCIBLE else flat.view(torch.uint8)


def from_host(x: Tensor, lent: Tensor) -> None:
    """Writes `lent`, the result of `to_host(x)`, back to `x` if it was a copy.

    In either case autograd registers the change of `x`: a backward pass that had saved the old
    values raises an error instead of using the new ones.
    """
    if x is not lent and (not x.is_cpu or x.data_ptr() != lent.data_ptr()):
        x.detach().copy_(lent.view(x.dtype).view(x.shape))
    else:
        torch.autograd.graph.increment_version(x)
