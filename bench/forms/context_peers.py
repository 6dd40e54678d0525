"""Sequences shared by two ranks, as plain torch and as DeepSpeed does it.

    all-gather            each rank has an early and a late chunk, gathers the keys and values of
                          all tokens in each block, and sums up their gradients again
    DeepSpeed Ulysses     `deepspeed.sequence.layer.DistributedAttention` around torch's attention;
                          each rank has one run of neighbouring tokens
    ring-attention-pytorch  its `ring_flash_attn`, the function for CPUs; runs of neighbours too

All are howdah's Transformer with another attention core, and one all-reduce of all gradients.

The backward pass of ring-attention-pytorch 0.5.20 has wrong gradients of keys and values: its
`ring_pass` returns what came and what was sent, and `RingFlashAttentionFunction.backward` takes the
pair for the gradients of keys and of values. They are off by as much as they are large, so nothing
that it trains equals one device. Here it gets a `ring_pass` that returns what came; with it the
gradients are right to 3e-7, and its time is the same.
"""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import method
from deepspeed_peer import begun
from howdahs import Place
from layouts import Form
from peers import MeanLoss, Step, adamw, filled
from torch import Tensor, nn

from howdah.optim.clip import EPSILON, squared_norm
from howdah.plan.flat_buffers import share
from howdah.plan.sharding import chunks
from howdah.text.batches import Micro

Runs = list[tuple[int, int]]  # the positions of a rank
RING = importlib.util.find_spec("ring_attention_pytorch") is not None


class _Gathered(torch.autograd.Function):
    """Keys or values of all ranks, side by side along the tokens; equally many on each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x.contiguous())
        return torch.cat(every, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def gathering(runs: list[Runs]) -> Any:
    """An attention core; `runs` are the positions of each rank."""
    mine = runs[dist.get_rank()]
    at = torch.tensor([p for some in runs for start, stop in some for p in range(start, stop)])
    order = at.argsort()

    def core(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        keys, values = (_Gathered.apply(x).index_select(2, order) for x in (k, v))
        outs, place = [], 0
        for start, stop in mine:
            queries = q[:, :, place : place + stop - start]
            place += stop - start
            seen = torch.ones(stop - start, stop, dtype=torch.bool).tril(start)
            outs.append(
                F.scaled_dot_product_attention(
                    queries, keys[:, :, :stop], values[:, :, :stop], seen, enable_gqa=True
                )
            )
        return torch.cat(outs, 2)

    return core


def all_gather(case: Form, place: Place) -> Step:
    runs = [[*chunks(case.parsed, case.sequence, rank)] for rank in range(place.size)]
    module = filled(case)
    for block in module.model.layers.values():
        block.attention.core = gathering(runs)
    return _step(case, module, runs[place.rank])


def ulysses(case: Form, place: Place) -> Step:
    begun(place)
    from deepspeed.sequence.layer import DistributedAttention

    class Local(nn.Module):
        """Attention of a rank's heads, [b, s, heads, d]."""

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Tensor:
            by_head = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*by_head, is_causal=True, enable_gqa=True)
            return out.transpose(1, 2)

    attention = DistributedAttention(Local(), dist.group.WORLD, scatter_idx=2, gather_idx=1)

    def core(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        by_token = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        return attention(*by_token, 0).transpose(1, 2)

    module = filled(case)
    for block in module.model.layers.values():
        block.attention.core = core
    return _step(case, module, [share(case.sequence, place.size, place.rank)])


def ring(case: Form, place: Place) -> Step:
    """All of a rank's tokens are one bucket: on a CPU smaller ones compute as much, in more calls.
    Query heads are in another order there: neighbours have different key-value heads.
    """
    from ring_attention_pytorch import ring_flash_attention as package

    passed = package.ring_pass
    package.ring_pass = lambda times, x: passed(times, x)[0]

    def core(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
        groups = k.shape[1]
        theirs = q.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
        out = package.ring_flash_attn(
            *(x.transpose(1, 2) for x in (theirs, k, v)),
            causal=True,
            bucket_size=q.shape[2],
            ring_reduce_col=True,
        )
        return out.transpose(1, 2).unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)

    module = filled(case)
    for block in module.model.layers.values():
        block.attention.core = core
    return _step(case, module, [share(case.sequence, place.size, place.rank)])


def _step(case: Form, module: MeanLoss, runs: Runs) -> Step:
    """The step of a rank that has these positions of every row."""
    optimizer, limit = adamw(case, module.model), method(case).grad_clip
    parameters = [*module.parameters()]

    def mine(array: Any) -> Tensor:
        x = torch.from_numpy(array)
        return torch.cat([x[:, start:stop] for start, stop in runs], 1)

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for micro in micros:
            arrays = micro.tokens, micro.positions, micro.documents, micro.labels
            share_of = sum(stop - start for start, stop in runs) / case.sequence
            loss = module(*map(mine, arrays)) * share_of / len(micros)
            loss.backward()
            total += loss.item()
        flat = torch.cat([p.grad.view(-1) for p in parameters if p.grad is not None])
        dist.all_reduce(flat)
        # Not torch's norm, which is off on CPUs for millions of numbers (howdah/optim/clip.py).
        norm = float(squared_norm([flat])) ** 0.5
        flat.mul_(min(limit / (norm + EPSILON), 1.0))
        parts = flat.split([p.numel() for p in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
        optimizer.zero_grad()
        told = torch.tensor(total)
        dist.all_reduce(told)
        return float(told)

    return step
