"""Modules that are not howdah's, for tests of `howdah.distribute`, and a loop of plain torch."""

import torch
from torch import nn
from torch.nn import functional as F

import howdah


class Block(nn.Module):
    """Two inputs and two outputs, an attention whose parts torch uses without calling them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.unused = nn.Linear(width, 3)

    def forward(self, x, scale, *, shift=0.0):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        inner = F.gelu(self.up(x) * scale + shift)
        return x + self.down(inner), inner.mean()


class Reader(nn.Module):
    """An embedding that is also the head, blocks, an LSTM, a scalar and a frozen layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.fixed = nn.Linear(width, width).requires_grad_(False)

    def forward(self, tokens):
        x, scale = self.embedding(tokens), self.temperature
        total = 0.0
        for block in self.blocks:
            x, mean = block(x, scale, shift=0.1)
            total = total + mean
        x = self.fixed(self.lstm(x)[0]) + x
        return F.linear(x, self.embedding.weight), total


class Pictures(nn.Module):
    """Convolutions with batch norms, and a table that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4))
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 3)
        self.register_buffer("grid", torch.linspace(0, 1, 6))

    def forward(self, x):
        x = F.relu(self.first(x + self.grid))
        return self.head((x + self.second(x)).mean((2, 3)))


BUFFERS = {"*": "mean", "grid": "constant"}


def reader(dtype=torch.float64) -> Reader:
    """The same one at every call."""
    torch.manual_seed(3)
    return Reader().to(dtype)


def pictures() -> Pictures:
    """The same one at every call."""
    torch.manual_seed(4)
    return Pictures().double()


def texts(step: int, rows: int = 10):
    """The batch of a step: tokens [rows, 5] and the tokens that follow them."""
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 13, (rows, 6), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def drawn(step: int, rows: int = 8):
    """A batch of pictures [rows, 1, 6, 6] and labels."""
    made = torch.Generator().manual_seed(step)
    x = torch.randn(rows, 1, 6, 6, generator=made, dtype=torch.float64)
    return x, torch.randint(0, 3, (rows,), generator=made)


def reading_loss(model):
    """A function of tokens and labels: the mean loss over rows."""

    def loss_of(tokens, labels):
        logits, total = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0.1 * total

    return loss_of


def picture_loss(model):
    """A function of pictures and labels: the mean loss over rows."""
    return lambda x, labels: F.cross_entropy(model(x), labels)


MODELS = {"reader": (reader, reading_loss, texts), "pictures": (pictures, picture_loss, drawn)}


def optimizer_of(kind: str, model, **settings):
    """An optimizer of torch.optim; parameters of several dims in one group, the others in another
    with its own rate.
    """
    some = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in some if p.ndim > 1]},
        {"params": [p for p in some if p.ndim <= 1], "lr": 0.02, "weight_decay": 0.0},
    ]
    return getattr(torch.optim, kind)(groups, lr=0.03, **{"weight_decay": 0.1, **settings})


def plain(model: str, steps: int, *, kind="AdamW", clip=0.5, groups=1, **settings):
    """Losses and last weights of a loop of torch alone, on one process; rows in groups."""
    net = MODELS[model][0]()
    optimizer = optimizer_of(kind, net, **settings)
    losses = [
        plain_step(model, net, optimizer, step, clip=clip, groups=groups) for step in range(steps)
    ]
    return losses, net.state_dict()


def plain_step(model, net, optimizer, step, *, clip=0.5, groups=1):
    """The loss of one step of torch alone."""
    _, loss_of, batch_of = MODELS[model]
    batch, total = batch_of(step), 0.0
    for rows in zip(*(part.chunk(groups) for part in batch), strict=True):
        loss = loss_of(net)(*rows) * (len(rows[0]) / len(batch[0]))
        loss.backward()
        total += float(loss.detach())
    for parameter in net.parameters():
        if parameter.grad is None and parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)  # as distribute does
    nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return total


def job_of(transport, model: str, layout: str, *, kind="AdamW", clip=0.5, rank_noise=True, **more):
    """A job of a model, whose weights differ between processes before they become rank 0's; its
    loss function, and its batches.
    """
    make, loss_of, batch_of = MODELS[model]
    net = make()
    if rank_noise and transport is not None and transport.rank:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)
    units = more.pop("units", ["blocks.*", "lstm"] if model == "reader" else None)
    rules = BUFFERS if model == "pictures" else {}
    optimizer = optimizer_of(kind, net, **more)
    job = howdah.distribute(
        net, optimizer, layout, units=units, buffers=rules, clip=clip, transport=transport
    )
    return job, loss_of(net), batch_of
