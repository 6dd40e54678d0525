"""Who trains resnet18: howdah under every stage of ZeRO, DDP, FSDP2 and the bound.

    howdah   howdah.distribute(model, optimizer, "dp2 zeroN"), on its engine
    DDP      DistributedDataParallel, gradient_as_bucket_view, buffers of each process its own
    FSDP2    fully_shard on every block, on the head and on the root: ZeRO-3; with
             reshard_after_forward=False each weight is gathered once in a step: ZeRO-2
    bound    the step of each process by itself: nothing is exchanged

All have torchvision's model with the same start, rows, and SGD with momentum, in float32. Each
process normalises its own rows, and statistics stay its own; so losses have to be equal.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from vision import prepare

import howdah
from howdah.comm.transport import Transport

Rows = tuple[Tensor, Tensor]
Step = Callable[[Rows], float]  # of this process's rows
CLASSES = 10
LIBRARY = prepare()  # kept, or the definitions go


def model() -> nn.Module:
    """The same one on every process."""
    from torchvision.models import resnet18

    torch.manual_seed(0)
    net: nn.Module = resnet18(num_classes=CLASSES)
    return net


def sgd(net: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def ours(transport: Transport, layout: str) -> Step:
    """howdah on a layout."""
    net = model()
    rules = {"*": "local"}
    job = howdah.distribute(net, sgd(net), layout, buffers=rules, transport=transport)

    def step(rows: Rows) -> float:
        return job.step(lambda x, y: cross_entropy(net(x), y), rows, mine=True)

    return step


def plain(net: nn.Module, optimizer: torch.optim.Optimizer, *, ranks: int) -> Step:
    """The loop that pages of torch show; the loss is summed as howdah's is."""

    def step(rows: Rows) -> float:
        loss = cross_entropy(net(rows[0]), rows[1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told = loss.detach()
        if ranks > 1:
            dist.all_reduce(told)
        return told.item() / ranks

    return step


def ddp() -> Step:
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True, broadcast_buffers=False)
    return plain(net, sgd(net), ranks=dist.get_world_size())


def fsdp(*, again: bool) -> Step:
    """FSDP2, which gathers weights `again` in the backward pass."""
    net: Any = model()
    blocks = [b for layer in (net.layer1, net.layer2, net.layer3, net.layer4) for b in layer]
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*blocks, net.fc, net):
        fully_shard(module, mesh=mesh, reshard_after_forward=again)
    for module in net.modules():
        if isinstance(module, FSDPModule):  # gloo has no mean of shares
            module.set_force_sum_reduction_for_comms(True)
    return plain(net, sgd(net), ranks=dist.get_world_size())


def contestants(transport: Transport) -> dict[str, Step]:
    """By name, the step of each; on all processes in one order."""
    steps = {
        f"howdah {layout}".strip(): ours(transport, layout)
        for layout in ("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3")
    }
    alone = model()
    return steps | {
        "DDP": ddp(),
        "FSDP2, gathered once": fsdp(again=False),
        "FSDP2": fsdp(again=True),
        "bound": plain(alone, sgd(alone), ranks=1),
    }
