"""Attention inside documents as one operator, which torch.compile leaves whole.

The operator takes the documents as a tensor (`Cuts`), so a compiled block does not depend on how
its rows are cut. What runs inside depends on the device:

    on a GPU, in bf16   FlashAttention over documents of any lengths, one call for all of them, with
                        fewer key-value heads than query heads where the model has fewer
    on a CPU            torch's flash kernel, one call for each document, as with Spans

A GPU's kernel takes q, k and v as [tokens, heads, d], which are views of what the linears make; no
number of the GPU is read. Operators of torch below `torch.nn.attention.varlen` are called, because
torch 2.11 lacks some of its arguments. Proved on a CPU alone: the GPU's branch has not run yet.
"""

from typing import Any

import torch
from torch import Tensor

from howdah.model.documents import Cuts, Spans, spans_of

WIDEST = 256  # features of a head, in FlashAttention
CAPABLE = (8, 0)  # the oldest GPU that it runs on

Heads = tuple[Tensor, Tensor, Tensor]


def flash_takes(q: Tensor) -> bool:
    """Whether FlashAttention computes on tensors like `q` [b, heads, s, d]."""
    narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= WIDEST
    narrow = narrow and q.shape[-1] % 8 == 0
    return q.is_cuda and narrow and torch.cuda.get_device_capability(q.device) >= CAPABLE


def varlen(q: Tensor, k: Tensor, v: Tensor, cuts: Cuts, *, causal: bool = True) -> Tensor:
    """Attention inside documents. q [b, a, s, d], k and v [b, k, s, d] → [b, a, s, d]."""
    by_token = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = torch.ops.howdah.varlen(*by_token, cuts.starts, cuts.length, causal)[0]
    return out.transpose(1, 2)


# -- the operator: tensors are [b, s, heads, d] ------------------------------------


@torch.library.custom_op("howdah::varlen", mutates_args=())
def _forward(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, length: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """The output, and for each query and head the log of the sum of its exponentials."""
    if q.is_cuda:
        one = (x.flatten(0, 1) for x in (q, k, v))
        found = torch.ops.aten._flash_attention_forward(
            *one, starts, starts, length, length, 0.0, causal, False
        )
        return found[0].view(q.shape), found[1]
    spans = spans_of(starts.tolist(), length)
    documents = [_cpu_kernel(*document, causal=causal) for document in _documents((q, k, v), spans)]
    outs, sums = zip(*documents, strict=True)
    return _joined(outs, spans), torch.cat([one.flatten() for one in sums])


@_forward.register_fake
def _(  # noqa: PLR0917
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, length: int, causal: bool
) -> tuple[Tensor, Tensor]:
    b, s, heads, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    sums = (heads, b * s) if q.is_cuda else (b * s * heads,)
    return q.new_empty(q.shape), q.new_empty(sums, dtype=wide)


@torch.library.custom_op("howdah::varlen_backward", mutates_args=())
def _backward(  # noqa: PLR0913, PLR0917 (torch's operators take no table)
    grad: Tensor,
    heads: list[Tensor],
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    length: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, which are `heads`."""
    if grad.is_cuda:
        one = [x.flatten(0, 1) for x in (grad, *heads, out)]
        state = torch.zeros(2, dtype=torch.uint64, device=grad.device)  # of dropout, which is 0
        found = torch.ops.aten._flash_attention_backward(
            *one, sums, starts, starts, length, length, 0.0, causal, state, grad.new_empty(0)
        )
        d_q, d_k, d_v = (d.view(x.shape) for d, x in zip(found, heads, strict=True))
        return d_q, d_k, d_v
    spans = spans_of(starts.tolist(), length)
    parts, at = [], 0
    for d_out, *document, made in _documents((grad, *heads, out), spans):
        size = made[..., 0].numel()
        log_sums = sums[at : at + size].view(made.shape[0], made.shape[2], made.shape[1])
        parts.append(_cpu_backward(d_out, document, (made, log_sums), causal))
        at += size
    d_q, d_k, d_v = (_joined(some, spans) for some in zip(*parts, strict=True))
    return d_q, d_k, d_v


@_backward.register_fake
def _(  # noqa: PLR0913, PLR0917
    grad: Tensor,
    heads: list[Tensor],
    out: Tensor,
    sums: Tensor,
    starts: Tensor,
    length: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = (x.new_empty(x.shape) for x in heads)
    return d_q, d_k, d_v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.length, ctx.causal = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, starts, out, sums = ctx.saved_tensors
    how = starts, ctx.length, ctx.causal
    found = torch.ops.howdah.varlen_backward(grad, [q, k, v], out, sums, *how)
    return *found, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


# -- on a CPU ----------------------------------------------------------------------


def _documents(tensors: tuple[Tensor, ...], spans: Spans) -> list[tuple[Tensor, ...]]:
    """The parts of tensors [b, s, ...] that belong to each document of each group of rows."""
    groups = zip(*(x.split(spans.rows) for x in tensors), strict=True)
    return [
        document
        for rows, lengths in zip(groups, spans.lengths, strict=True)
        for document in zip(*(x.split(lengths, 1) for x in rows), strict=True)
    ]


def _joined(documents: tuple[Tensor, ...], spans: Spans) -> Tensor:
    """The inverse of `_documents`, for one tensor."""
    left = iter(documents)
    return torch.cat([torch.cat([next(left) for _ in some], 1) for some in spans.lengths])


def _cpu_kernel(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, sums = kernel(*_repeated(q, k, v), 0.0, causal)
    return out.transpose(1, 2), sums.contiguous()


def _cpu_backward(
    grad: Tensor, heads: list[Tensor], of: tuple[Tensor, Tensor], causal: bool
) -> Heads:
    """`of` are the output, and its log-sum-exps."""
    (q, k, v), (out, sums) = heads, of
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    by_head = (x.transpose(1, 2) for x in (grad, out))
    d_out, made = by_head
    found = kernel(d_out, *_repeated(q, k, v), made, sums, 0.0, causal)
    d_q, d_k, d_v = (d.transpose(1, 2) for d in found)
    groups = q.shape[2] // k.shape[2]
    if groups > 1:  # summed in at least float32, and rounded once
        wide = torch.promote_types(q.dtype, torch.float32)
        d_k, d_v = (d.unflatten(2, (-1, groups)).sum(3, dtype=wide).to(q.dtype) for d in (d_k, d_v))
    return d_q, d_k, d_v


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> Heads:
    """The kernel's arguments [b, heads, s, d], with as many key-value heads as query heads."""
    groups = q.shape[2] // k.shape[2]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return q, k, v
