"""A net of your own, trained data-parallel with nothing of howdah but its collectives.

torchrun --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 \
    examples/own_net.py
"""

import torch
from torch import nn

from howdah.comm import connect
from howdah.comm.group import Group

SAMPLES, STEPS = 64, 20


def train(group: Group) -> list[float]:
    """The mean loss of each step; equal on all ranks."""
    torch.manual_seed(0)  # the same initial weights and data on every rank
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(SAMPLES, 8)
    y = x.sin().sum(1, keepdim=True)
    own_x, own_y = group.own_shard(x), group.own_shard(y)  # rows of this rank
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (net(own_x) - own_y).square().sum() / SAMPLES  # a share of the mean
        loss.backward()
        group.all_reduce([weight.grad for weight in net.parameters()])  # in place
        optimizer.step()
        losses += group.sum_scalars([loss.item()])
    return losses


def main() -> None:
    """Trains on the ranks that torchrun started; rank 0 prints."""
    group = connect()
    losses = train(group)
    if group.rank == 0:
        print(f"{group.size} ranks: loss {losses[0]:.4f}, after {STEPS} steps {losses[-1]:.4f}")
    group.close()


if __name__ == "__main__":
    main()
