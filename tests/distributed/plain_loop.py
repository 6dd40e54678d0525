"""A plain loop over a model of transformers, and howdah on a layout: the same rows, three steps.

What is compared: losses and norms of the steps, and every weight after them.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch

from howdah.comm.transport import Transport
from howdah.model.hub import read_hub
from howdah.parallel.apply import apply
from howdah.parallel.full_tensors import full_parameter
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Optimizer
from howdah.plan.plan import Plan, make_plan
from howdah.shapes.weights import weights
from howdah.text.batches import Micro
from howdah.train.resume import read_folder
from howdah.train.step import StepContext, train_step

ROWS, LENGTH, STEPS, RATE, CLIP = 4, 12, 3, 1e-3, 0.7
PRECISIONS = {"float32": 1e-5, "float64": 1e-10}

Results = list[tuple[float, float]]  # of each step, loss and norm


def by_a_plain_loop(
    model: torch.nn.Module, loss_of: Callable[[int], torch.Tensor], undecayed: Iterable[str]
) -> Results:
    """Trains a model of others by torch's AdamW.

    loss_of    the loss of a step's rows
    undecayed  in names of weights that do not decay, beside vectors
    """
    decayed, others = [], []
    for name, weight in model.named_parameters():
        plain = weight.ndim == 1 or any(part in name for part in undecayed)
        (others if plain else decayed).append(weight)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(STEPS):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found


def by_howdah(
    transport: Transport,
    folder: Path,
    words: str,
    precision: str,
    micros: Callable[[int, Plan, int], list[Micro]],
) -> tuple[Results, float]:
    """The same on this rank of a layout; and how far its weights are from the folder `after`.

    micros  of a step and a replica
    """
    shape, _ = read_hub(folder / "before")
    method = Method(precision, Optimizer(weight_decay=0.1), grad_clip=CLIP)
    layout = parse_layout(words)
    batch = Batch(global_batch=ROWS, micro_batch=ROWS // (layout.readers * layout.micros))
    plan = make_plan(shape, layout, batch, sequence=LENGTH, method=method)
    with connect_mesh(plan.layout, transport, torch.device("cpu")) as mesh:
        placed = apply(plan, mesh=mesh, fill=read_folder(folder / "before", shape))
        context = StepContext(placed, mesh, method, 0)
        results = []
        for step in range(STEPS):
            given = micros(step, plan, mesh.index_of("dp"))
            results.append(train_step(context, given, step=step, rate=RATE))
        placed.sync_weights()
        _, tensor = read_hub(folder / "after")
        apart = 0.0
        for weight in weights(shape):
            mine, theirs = full_parameter(placed, weight.name), tensor(weight.name)
            apart = max(apart, float((mine - theirs).abs().max() / theirs.abs().max()))
        return [(result.loss, result.norm) for result in results], apart


def assert_the_same(workers, folder, layouts, precision, *, micros, expected):
    """The losses and norms of layouts, and their weights, are those of a plain loop."""
    bound = PRECISIONS[precision]
    steps = [
        (pytest.approx(loss, rel=bound), pytest.approx(norm, rel=bound)) for loss, norm in expected
    ]
    for words in layouts:
        ranks = parse_layout(words).world
        results = workers.run(by_howdah, folder, words, precision, micros, ranks=ranks)
        for found, apart in results:
            assert found == steps, words
            assert apart < 10 * bound, words
