"""A small U-Net of one's own that finds discs in noise, on one process or on several.

python examples/unet.py single
torchrun --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 \
    examples/unet.py dp2 zero3 recompute=full
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import howdah
from howdah.comm.transport import Transport


def conv(inside: int, out: int) -> nn.Sequential:
    """A convolution with a norm of groups of channels."""
    return nn.Sequential(nn.Conv2d(inside, out, 3, padding=1), nn.GroupNorm(4, out), nn.ReLU())


class UNet(nn.Module):
    """Three sizes of pictures down and up again, with a way across at each."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(1, 8), conv(8, 16), conv(16, 32)])
        self.up = nn.ModuleList([conv(32 + 16, 16), conv(16 + 8, 8)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Pictures [rows, 1, size, size] to logits of the same shape."""
        large = self.down[0](x)
        middle = self.down[1](F.max_pool2d(large, 2))
        x = F.interpolate(self.down[2](F.max_pool2d(middle, 2)), scale_factor=2)
        x = F.interpolate(self.up[0](torch.cat([x, middle], 1)), scale_factor=2)
        return self.head(self.up[1](torch.cat([x, large], 1)))


def main(*words: str, transport: Transport | None = None) -> list[float]:
    """Trains on a layout, on the processes that torchrun started; returns the loss of each step."""
    torch.manual_seed(0)
    net, place, losses = UNet(), torch.arange(16.0), []
    adamw = torch.optim.AdamW(net.parameters(), lr=0.01)
    job = howdah.distribute(net, adamw, " ".join(words), transport=transport)
    for _ in range(8):
        x, y = torch.randint(4, 12, (2, 8, 1, 1, 1))  # the same on every process, by the seed
        disc = ((place - x) ** 2 + (place[:, None] - y) ** 2 < 12).float()  # [8, 1, 16, 16]
        rows = disc + 0.5 * torch.randn(disc.shape), disc
        losses.append(job.step(lambda a, b: F.binary_cross_entropy_with_logits(net(a), b), rows))
    if job.rank == 0:
        print(f"{job.layout}: {losses[0]:.4f} to {losses[-1]:.4f}")
    job.close()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
