"""torchvision's resnet18 with SGD on made-up pictures, laid out over processes.

python examples/resnet18.py single x2
torchrun --nproc-per-node 2 --node-rank 0 --master-addr 127.0.0.1 --master-port 29500 \
    examples/resnet18.py dp2 zero2
"""

import sys

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

import howdah
from howdah.comm.transport import Transport

STEPS, ROWS, CLASSES = 4, 16, 10
BUFFERS = {"*running_*": "mean", "*num_batches_tracked": "rank 0"}


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures [rows, 3, 32, 32] whose brightness tells their class; the same on every process."""
    drawn = torch.Generator().manual_seed(step)
    labels = torch.randint(0, CLASSES, (ROWS,), generator=drawn)
    noise = torch.randn(ROWS, 3, 32, 32, generator=drawn)
    return noise + labels[:, None, None, None] / CLASSES, labels


def main(*words: str, transport: Transport | None = None) -> list[float]:
    """Trains on a layout, on the processes that torchrun started; returns the loss of each step."""
    torch.manual_seed(0)
    model = resnet18(num_classes=CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    layout = " ".join(words)
    job = howdah.distribute(model, optimizer, layout, buffers=BUFFERS, transport=transport)
    losses = []
    for step in range(STEPS):
        losses.append(job.step(lambda x, y: cross_entropy(model(x), y), batch(step)))
    if job.rank == 0:
        print(f"{job.layout}: " + " ".join(f"{loss:.4f}" for loss in losses))
    job.close()
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:])
