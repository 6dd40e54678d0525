"""Training steps of a model of any size on made-up tokens, without a run around them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
import torch

from howdah.comm.transport import Transport
from howdah.parallel.apply import apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Method
from howdah.plan.plan import for_gpus, make_plan
from howdah.shapes.shape import ModelShape
from howdah.text.batches import Micro
from howdah.train.feed import Counts, Fed, feeder_of
from howdah.train.step import StepContext, StepResult, train_step

SEED = 1


@dataclass
class Stepper:
    """A model on a layout, with one batch that every step trains on.

    untold  the last step, whose numbers nobody has read
    """

    context: StepContext
    batch: Fed
    done: int = 0
    untold: StepResult | None = None

    def __call__(self) -> None:
        """One step; on a GPU the host does not wait."""
        self.untold = train_step(self.context, self.batch, step=self.done, rate=1e-4)
        self.done += 1

    def signature(self) -> tuple[float, int]:
        """The last loss, and a checksum of all weights, masters and states."""
        placed, crc = self.context.placed, 0
        states = [x for state in placed.optimizer.state.values() for x in state.values()]
        flats = [x for unit in placed.units.values() for x in (unit.weights, unit.masters)]
        for tensor in (*flats, *states):
            crc = crc32(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), crc)
        return (self.untold.loss if self.untold else 0.0), crc


@contextmanager
def stepper(  # noqa: PLR0913 (what a training is, all by keyword)
    shape: ModelShape,
    words: str,
    transport: Transport,
    *,
    device: torch.device,
    method: Method,
    rows: int,
    length: int,
    documents: int = 1,
    compile_with: str = "",
) -> Iterator[Stepper]:
    """Trains `shape` on the layout `words`, with micro-batches of rows × length random tokens.

    compile_with  the backend of torch.compile; empty: not compiled
    """
    layout = resolve(parse_layout(words), None)
    plan = make_plan(shape, layout, Batch(micro_batch=rows), sequence=length, method=method)
    plan = plan if device.type == "cpu" else for_gpus(plan)
    with (
        connect_mesh(plan.layout, transport, device) as mesh,
        torch.autograd.set_multithreading_enabled(device.type == "cpu"),
    ):
        placed = apply(plan, mesh=mesh, fill=random_init(plan.weights, SEED))
        if compile_with:
            from howdah.parallel.compile import compile_model

            compile_model(placed.model, whole=placed.store is None, backend=compile_with)
        micros = [micro_of(shape.vocab, rows, length, documents)] * plan.micros
        counts = Counts(float(rows * length * plan.micros * layout.replicas), False)
        batch = replace(feeder_of(device)(micros), counts=counts)
        yield Stepper(StepContext(placed, mesh, method, SEED), batch)


def micro_of(vocab: int, rows: int, length: int, documents: int) -> Micro:
    """Random tokens, in documents of equal length; always the same."""
    tokens = np.random.default_rng(0).integers(0, vocab, (rows, length + 1))
    at = np.arange(length)
    number = np.tile(at * documents // length, (rows, 1)).astype(np.int32)
    positions = np.tile(at % -(-length // documents), (rows, 1))
    return Micro(tokens[:, :-1].copy(), tokens[:, 1:].copy(), positions, number, np.arange(rows))


def same(signatures: Sequence[Any]) -> bool:
    return len(set(signatures)) == 1
