"""A small model laid out on any number of ranks, and batches for it."""

import numpy as np
import torch

from howdah.model.loss import cross_entropy_sum
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import Layout, parse_layout, resolve
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import make_plan
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights
from howdah.text.batches import Micro

SHAPE = ModelShape(layers=2, width=16, heads=2, kv_heads=1, ffn_size=24, vocab=37, context=16)
TIED = ModelShape(
    layers=1,
    width=8,
    heads=2,
    ffn_size=16,
    vocab=19,
    context=16,
    feedforward="gelu",
    norm="layernorm",
    positions="learned",
    bias=True,
    tie_embeddings=True,
)


def place(transport, *, shape=SHAPE, precision="float64", seed=5, optimizer="adamw"):
    """The mesh and the placed model, with fresh weights, on the transport's ranks."""
    method = Method(precision, Optimizer(optimizer))
    plan = plan_of(shape, Layout(dp=transport.size), method)
    mesh = connect_mesh(plan.layout, transport, torch.device("cpu"))
    return mesh, apply(plan, mesh=mesh, fill=random_init(weights(shape), seed))


def plan_of(shape, layout, method):
    """A plan for micro-batches of two rows of nine tokens."""
    if isinstance(layout, str):
        layout = resolve(parse_layout(layout), None)
    return make_plan(shape, layout, Batch(micro_batch=2), sequence=9, method=method)


def loss_of(model, given):
    """The summed loss of a micro-batch."""
    arrays = given.tokens, given.positions, given.documents, given.labels
    tokens, positions, documents, labels = map(torch.from_numpy, arrays)
    return cross_entropy_sum(model(tokens, positions, documents), model.head_weight, labels)


def summed_loss(placed, given):
    """The summed loss of a micro-batch on a rank that has the whole model."""
    arrays = given.tokens, given.positions, given.documents, given.labels
    tokens, positions, documents, labels = map(torch.from_numpy, arrays)
    return placed.loss(placed.model(tokens, positions, documents), labels)


def micro(number, *, shape=SHAPE, rows=2, length=9):
    """Micro-batch `number`: the same for every layout."""
    draw = np.random.default_rng(number)
    tokens = draw.integers(0, shape.vocab, (rows, length + 1))
    return Micro(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=np.tile(np.arange(length), (rows, 1)),
        documents=np.zeros((rows, length), dtype=np.int32),
        samples=np.arange(rows) + rows * number,
    )
