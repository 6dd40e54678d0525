"""Attention to some of the keys, and what adds up to attention to all of them.

Of keys that are cut into blocks, each block gives for a query an output and the log of the sum of
its exponentials, L. Two blocks are merged exactly (Milakov and Gimelshein 2018,
https://arxiv.org/abs/1805.02867):

    L = log(exp L₁ + exp L₂)        out = out₁ + (out₂ - out₁) · sigmoid(L₂ - L₁)

The probabilities of a block under all keys are exp(q·k - L). So with the L and the output of all
keys, the gradients of each block are computed by itself, and added up.

    on a CPU            torch's flash kernel, in any format
    on a GPU, 16 bits   FlashAttention; proved on a CPU alone, the GPU's branch has not run yet
    elsewhere           matrix products: where values are wider than keys, and as a reference

The kernels take heads of one size; where values are narrower than keys, zeros are put behind them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.model.islands import promoted
from howdah.model.varlen import flash_takes

Three = tuple[Tensor, Tensor, Tensor]


def attend_part(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """The output [b, a, s, e] of queries [b, a, s, d] that attend to all of some keys [b, k, t, d]
    and values [b, k, t, e], and the log-sum-exps [b, a, s] in at least float32.

    causal  query i attends to the keys up to i; s is t
    """
    narrow = v.shape[-1]
    if narrow < q.shape[-1] and (q.is_cpu or flash_takes(q)):
        out, sums = attend_part(q, k, padded(v, q.shape[-1]), causal=causal)
        return out[..., :narrow], sums
    if _on_cpu(q, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, sums = kernel(*_grouped(q, k, v), 0.0, causal)
        return out, sums
    if flash_takes(q) and q.shape[-1] == v.shape[-1]:
        lengths = q.shape[2], k.shape[2]
        by_token = (x.transpose(1, 2) for x in (q, k, v))
        found = torch.ops.aten._flash_attention_forward(
            *by_token, None, None, *lengths, 0.0, causal, False
        )
        return found[0].transpose(1, 2), found[1]
    scores = _scores(q, k, causal=causal)
    sums = scores.logsumexp(-1)
    values = v.to(scores.dtype)[:, :, None]
    out = (scores - sums[..., None]).exp() @ values
    return out.flatten(1, 2).to(q.dtype), sums.flatten(1, 2)


def part_gradients(
    grad: Tensor, heads: Three, made: tuple[Tensor, Tensor], *, causal: bool
) -> Three:
    """The terms of the gradients of `heads` (q, k, v as for `attend_part`) that come through these
    keys; those of k and v are summed over the queries' heads in at least float32.

    grad  gradient of the output
    made  the output, and log-sum-exps [b, a, s]: of all keys that the queries attend to
    """
    q, k, v = heads
    out, sums = made
    narrow = v.shape[-1]
    if narrow < q.shape[-1] and (q.is_cpu or flash_takes(q)):
        grad, wider, out = (padded(x, q.shape[-1]) for x in (grad, v, out))
        found = part_gradients(grad, (q, k, wider), (out, sums), causal=causal)
        return found[0], found[1], found[2][..., :narrow]
    if _on_cpu(q, v):
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(grad, *_grouped(q, k, v), out, sums, 0.0, causal)
        return _summed(found, q, k)
    if flash_takes(q) and q.shape[-1] == v.shape[-1]:
        lengths = q.shape[2], k.shape[2]
        by_token = (x.transpose(1, 2) for x in (grad, q, k, v, out))
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which is 0
        found = torch.ops.aten._flash_attention_backward(
            *by_token, sums, None, None, *lengths, 0.0, causal, state, grad.new_empty(0)
        )
        return _summed(tuple(x.transpose(1, 2) for x in found), q, k)
    return _plain_gradients(grad, heads, made, causal=causal)


def merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Adds a block to the blocks so far: `out` [b, a, s, e] and `sums` [b, a, s] in place."""
    share = torch.sigmoid(part_sums - sums)
    out.lerp_(part.to(out.dtype), share[..., None])
    sums.copy_(torch.logaddexp(sums, part_sums))


def padded(x: Tensor, wide: int) -> Tensor:
    """A copy of x [..., e] with zeros behind its numbers, up to `wide`."""
    return F.pad(x, (0, max(wide - x.shape[-1], 0)))


def _on_cpu(q: Tensor, v: Tensor) -> bool:
    return q.is_cpu and q.shape[-1] == v.shape[-1]


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> Three:
    """The heads as the CPU's kernel takes them. It shares key-value heads, but sums the gradients
    of a group in the format of its inputs: in 16 bits the heads are repeated.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and q.dtype.itemsize < 4:
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return q, k, v


def _summed(found: tuple[Tensor, ...], q: Tensor, k: Tensor) -> Three:
    """Gradients whose repeated heads are summed."""
    d_q, d_k, d_v = found
    if d_k.shape[1] != k.shape[1]:
        wide = promoted(q.dtype)
        d_k, d_v = (x.unflatten(1, (k.shape[1], -1)).sum(2, dtype=wide) for x in (d_k, d_v))
    return d_q, d_k, d_v


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    """Scaled products [b, k, groups, s, t] in at least float32."""
    wide = promoted(q.dtype)
    queries = q.to(wide).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5
    scores = queries @ k.to(wide)[:, :, None].mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores


def _plain_gradients(
    grad: Tensor, heads: Three, made: tuple[Tensor, Tensor], *, causal: bool
) -> Three:
    q, k, v = heads
    by_group = (k.shape[1], -1)
    out, sums = (x.unflatten(1, by_group) for x in made)
    scores = _scores(q, k, causal=causal)
    likely = (scores - sums[..., None]).exp()
    wide = likely.dtype
    given = grad.to(wide).unflatten(1, by_group)
    d_v = (likely.mT @ given).sum(2)
    inside = (given * out.to(wide)).sum(-1, keepdim=True)
    d_scores = likely * (given @ v.to(wide)[:, :, None].mT - inside) * q.shape[-1] ** -0.5
    d_q = (d_scores @ k.to(wide)[:, :, None]).flatten(1, 2)
    d_k = (d_scores.mT @ q.to(wide).unflatten(1, by_group)).sum(2)
    return d_q, d_k, d_v
