"""A net trained by torch's DistributedDataParallel; nothing in it is howdah's but one word.

torchrun --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29510 \
    examples/plain_ddp.py howdah

With `gloo` in place of `howdah` it prints the same numbers.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import howdah.comm.backend  # noqa: F401  makes "howdah" known to torch

SAMPLES, STEPS = 32, 30


def train() -> list[float]:
    """The loss of each step: the mean over all ranks."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())  # each rank has samples of its own
    x = torch.randn(SAMPLES, 8)
    y = x.sin().sum(1, keepdim=True)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def main(backend: str) -> None:
    """Trains on the ranks that torchrun started; rank 0 prints."""
    dist.init_process_group(backend)
    losses = train()
    if dist.get_rank() == 0:
        told = f"loss {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}"
        print(f"{dist.get_backend()}, {dist.get_world_size()} ranks: {told}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
