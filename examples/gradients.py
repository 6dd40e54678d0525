"""The gradients of one batch in four layouts, compared with those of one process.

python examples/gradients.py
"""

import numpy as np
import torch

from howdah import Method, ModelShape, Workers, apply, full_gradient, parse_layout
from howdah.comm.transport import Transport
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.plan import make_plan
from howdah.text.batches import Micro
from howdah.train.step import StepContext, accumulate

SHAPE = ModelShape(layers=2, width=16, heads=2, ffn_size=32, vocab=50, context=8)
SAMPLES, SEQUENCE = 4, 8


def sample(number: int) -> Micro:
    """A micro-batch of one sample of random tokens, the same for every layout."""
    tokens = np.random.default_rng(number).integers(0, SHAPE.vocab, (1, SEQUENCE + 1))
    positions, documents = np.arange(SEQUENCE)[None], np.zeros((1, SEQUENCE), dtype=np.int32)
    return Micro(tokens[:, :-1], tokens[:, 1:], positions, documents, np.array([number]))


def gradients(transport: Transport, words: str) -> dict[str, torch.Tensor]:
    """All gradients by name, on this rank of a layout. All ranks call together."""
    layout, batch = parse_layout(words), Batch(global_batch=SAMPLES, micro_batch=1)
    plan = make_plan(SHAPE, layout, batch, sequence=SEQUENCE, method=Method("float64"))
    with connect_mesh(plan.layout, transport, torch.device("cpu")) as mesh:
        placed = apply(plan, mesh=mesh, fill=random_init(plan.weights, seed=1))
        mine = range(mesh.index_of("dp"), SAMPLES, plan.layout.replicas)
        context = StepContext(placed, mesh, plan.method, seed=1)
        accumulate(context, [sample(n) for n in mine], step=0, tokens=SAMPLES * SEQUENCE)
        return {weight.name: full_gradient(placed, weight.name) for weight in plan.weights}


def main() -> None:
    """Prints the largest relative difference of any gradient, for each layout."""
    with Workers(4) as workers:
        (alone,) = workers.run(gradients, "single", ranks=1)
        for words in ("dp2", "dp2 zero3", "tp2 sp", "pp2 dp2 zero1"):
            own, *_ = workers.run(gradients, words, ranks=parse_layout(words).world)
            worst = max((own[n] - alone[n]).norm() / alone[n].norm() for n in alone)
            print(f"{words:13}  {len(alone)} gradients, at most {worst:.0e} apart")


if __name__ == "__main__":
    main()
