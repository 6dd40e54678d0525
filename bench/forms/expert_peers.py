"""Experts on two ranks as plain torch does it: `all_to_all_single` there and back, dropless.

The model is howdah's Transformer, whose blocks send rows to their experts in another way: each rank
tells the others its numbers of rows, sends them, and computes expert after expert. Dense gradients
are summed by one all-reduce, those of experts come by their rows. What a rank holds of the experts
are slices of the stacked matrices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from cases import method
from howdahs import Place
from layouts import Form
from peers import Step, adamw, filled, tensors
from torch import Tensor, nn

from howdah.model.places import Places
from howdah.plan.flat_buffers import share
from howdah.text.batches import Micro


class _Sent(torch.autograd.Function):
    """Rows that each rank sends to each other one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.sent, ctx.received = sent, received
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        out = grad.new_empty(sum(ctx.sent), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), ctx.sent, ctx.received)
        return out, None, None


def exchange(
    experts: Callable[[Tensor, tuple[int, ...]], Tensor],
    x: Tensor,
    at: Places,
    beside: Callable[[], Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """Runs the experts of all ranks on rows that are sorted by expert."""
    size = dist.get_world_size()
    counts = torch.tensor(at.sizes)
    told = torch.empty_like(counts)
    dist.all_to_all_single(told, counts)
    come = told.view(size, -1)
    sent, received = counts.view(size, -1).sum(1).tolist(), come.sum(1).tolist()
    taken = _Sent.apply(x, sent, received)
    # rank after rank, and in each expert after expert: expert after expert
    owner = torch.arange(come.shape[1]).repeat(size).repeat_interleave(come.flatten())
    order = owner.argsort(stable=True)
    made = experts(taken.index_select(0, order), tuple(come.sum(0).tolist()))
    back = made.index_select(0, order.argsort())
    return _Sent.apply(back, received, sent), beside()


def all_to_all(case: Form, place: Place) -> Step:
    module = filled(case)
    for block in module.model.layers.values():
        block.exchange = exchange
        for matrix in (block.experts.gate, block.experts.up, block.experts.down):
            start, stop = share(len(matrix.weight), place.size, place.rank)
            matrix.weight = nn.Parameter(matrix.weight.detach()[start:stop].clone())
    optimizer, limit = adamw(case, module.model), method(case).grad_clip
    named = dict(module.named_parameters())
    own = [p for name, p in named.items() if ".experts." in name]
    dense = [p for name, p in named.items() if ".experts." not in name]

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for micro in micros:
            loss = module(*tensors(micro)) / len(micros) / place.size
            loss.backward()
            total += loss.item()
        flat = torch.cat([_gradient(p).view(-1) for p in dense])
        dist.all_reduce(flat)
        for parameter, part in zip(dense, flat.split([p.numel() for p in dense]), strict=True):
            parameter.grad = part.view_as(parameter)
        told = torch.stack([torch.tensor(total), sum(_gradient(p).square().sum() for p in own)])
        dist.all_reduce(told)
        norm = (told[1] + flat.square().sum()).sqrt()
        scale = (limit / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_([_gradient(p) for p in named.values()], scale)
        optimizer.step()
        optimizer.zero_grad()
        return float(told[0])

    return step


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
