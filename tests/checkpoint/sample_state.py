"""States to save, ways to cut them, and a save by all ranks of a made-up world."""

from math import prod

import torch

from howdah.checkpoint.index import About
from howdah.checkpoint.save import Saver
from howdah.plan.boxes import Box, Piece, whole
from howdah.plan.flat_buffers import share

KINDS = ("weight", "exp_avg")
SHAPES = {"layers.0.q.weight": (5, 7), "norm.weight": (6,), "temperature": ()}


def state(shapes=SHAPES, *, seed=0, dtype=torch.float32):
    """(kind, name) → a random tensor."""
    draw = torch.Generator().manual_seed(seed)
    return {
        (kind, name): torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)
        for kind in KINDS
        for name, shape in shapes.items()
    }


def about(**changes):
    return About(
        **({"run": "r1", "layout": "dp2 x4", "samples": 64, "meta": {"loss": 2.5}} | changes)
    )


def boxes(shape, dim, parts):
    """The tensor in `parts` slices of one dim; whole when it has no such dim."""
    if dim >= len(shape):
        return [whole(shape)]
    cuts = [share(shape[dim], parts, index) for index in range(parts)]
    return [
        Box(
            tuple(start if d == dim else 0 for d in range(len(shape))),
            tuple(stop - start if d == dim else n for d, n in enumerate(shape)),
        )
        for start, stop in cuts
        if stop > start
    ]


def pieces(name, shape, *, dim=0, slices=1, shares=1):
    """The tensor's pieces, each with the part it is of `shares`: slices of `dim`, then ranges."""
    for box in boxes(shape, dim, slices):
        for index in range(shares):
            start, stop = share(prod(box.size), shares, index)
            if start < stop:
                yield index, Piece(name, shape, box, start, stop)


def elements(tensor, piece):
    """The elements of a piece, found the slow way."""
    corner, size = piece.box.corner, piece.box.size
    part = tensor[tuple(slice(c, c + n) for c, n in zip(corner, size, strict=True))]
    return part.reshape(-1)[piece.start : piece.stop]


def parts(tensors, world, *, dim=0, slices=1):
    """What each rank of the world saves: its share of every slice of every tensor."""
    entries = [[] for _ in range(world)]
    for (kind, name), tensor in tensors.items():
        cut = pieces(name, tuple(tensor.shape), dim=dim, slices=slices, shares=world)
        for rank, piece in cut:
            entries[rank].append((kind, piece, elements(tensor, piece)))
    return entries


def silent(sentence):
    raise AssertionError(f"nothing was to be said: {sentence}")


def savers(folder, world, *, keep=9, say=silent, deadline=600.0, **how):
    """One for each rank. A rank may be a process that is still starting: the deadline is long."""
    return [
        Saver(folder, rank=rank, world=world, keep=keep, say=say, deadline=deadline, **how)
        for rank in range(world)
    ]


def save(folder, step, tensors, *, world=1, keep=9, best=False, say=silent, **cut):
    """Every rank of a world saves its part; returns when the checkpoint stands."""
    team = savers(folder, world, keep=keep, say=say)
    entries = parts(tensors, world, **cut)
    for saver, mine in zip(team, entries, strict=True):
        saver.save(step=step, entries=mine, about=about(), best=best)
    for saver in team:
        saver.wait()


def assert_holds(checkpoint, tensors):
    """Every tensor of the checkpoint, bit for bit."""
    assert checkpoint.kinds == tuple(dict.fromkeys(kind for kind, _ in tensors))
    for (kind, name), tensor in tensors.items():
        found = checkpoint.tensor(kind, name)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found, tensor), (kind, name)


def only(folder):
    """The names in the folder."""
    return sorted(path.name for path in folder.iterdir())
