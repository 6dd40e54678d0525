"""The evidence of one run of a case, to be compared with that of another run.

Gradients are taken before clipping, because clipping would hide a factor that is wrong in all of
them. Every rank returns checksums of its weights: ranks that hold the same box of a weight must
hold equal bits.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import cast
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch

from howdah.comm.transport import Transport
from howdah.host.devices import own_device
from howdah.model.block import Block
from howdah.optim.learning_rate import learning_rate
from howdah.parallel.apply import ParallelModel, apply
from howdah.parallel.expert import ExpertExchange
from howdah.parallel.flat_params import random_init
from howdah.parallel.full_tensors import full_gradient, full_parameter, parameter_names
from howdah.parallel.mesh import Mesh, connect_mesh
from howdah.plan.recording import TCP, Traffic, Wires
from howdah.text.batches import Micro, Rows, micros, order_of, rows_of
from howdah.text.masking import Task, task_of
from howdah.text.tokens import Corpus
from howdah.train.report import Bytes, measured_memory
from howdah.train.step import StepContext, accumulate, counted, has_packed_rows, train_step
from howdah.verify.case import Case, corpus_of

Arrays = dict[str, npt.NDArray[np.float64]]
Mutate = Callable[[StepContext], StepContext]
Shift = Callable[[list[Micro], int], list[Micro]]


@dataclass(frozen=True)
class Evidence:
    """The results of one rank, or of the one device.

    losses, norms  of each step; norms before clipping
    gradients      of the first step, before clipping
    parameters     after the last step
    sent           bytes that this rank sent in the steps, by axis, operation and link
    held           bytes that this rank held, by component; activations are those of the first pass
    packed         whether some row of that pass had several documents
    documents      how many micro-batches of the steps had such rows, and how many had not
    checksums      of the boxes of weights after the last step, by name
    wires          the classes of link between the ranks
    rows           rows of an embedding that this rank sent in the steps, and dense sums of it
    routed         with ep: by name of a block, the rows that this rank gave to each expert
    """

    losses: list[float]
    norms: list[float]
    gradients: Arrays
    parameters: Arrays
    sent: dict[Traffic, int] = field(default_factory=dict)
    held: Bytes = field(default_factory=dict)
    packed: bool = True
    documents: dict[bool, int] = field(default_factory=dict)
    checksums: dict[str, int] = field(default_factory=dict)
    wires: Wires = TCP
    rows: tuple[int, int] = (0, 0)
    routed: dict[str, list[int]] = field(default_factory=dict)


def spelled(evidence: Evidence) -> bytes:
    """What rank 0 is told of another rank's evidence: not the arrays, which are on rank 0 alone."""
    return json.dumps(
        {
            "sent": [[*row, count] for row, count in evidence.sent.items()],
            "held": dict(evidence.held),
            "packed": evidence.packed,
            "documents": [[several, count] for several, count in evidence.documents.items()],
            "checksums": evidence.checksums,
            "rows": evidence.rows,
            "routed": evidence.routed,
        }
    ).encode()


def read(told: bytes, mine: Evidence) -> Evidence:
    """The evidence of a rank that has told it; what all ranks have alike is that of `mine`."""
    said = json.loads(told)
    return replace(
        mine,
        gradients={},
        parameters={},
        sent={Traffic(*row): count for *row, count in said["sent"]},
        held=said["held"],
        packed=said["packed"],
        documents=dict(said["documents"]),
        checksums=said["checksums"],
        rows=(said["rows"][0], said["rows"][1]),
        routed=said["routed"],
    )


def gather(
    transport: Transport, case: Case, mutate: Mutate | None = None, shift: Shift | None = None
) -> Evidence:
    """Runs the case on this rank of its layout, as training would. Returns the evidence, which is
    on the host whatever the device.

    mutate  breaks the step context on purpose
    shift   breaks the batches on purpose; it takes the batch and the replica
    """
    device = own_device(case.device, transport.rank)
    with connect_mesh(case.layout, transport, device, case.comm.algorithm) as mesh:
        return _gather(mesh, case, mutate, shift)


def _gather(mesh: Mesh, case: Case, mutate: Mutate | None, shift: Shift | None) -> Evidence:
    fill = random_init(case.plan.weights, case.seed)
    placed = apply(case.plan, mesh=mesh, fill=fill, orders=case.orders)
    context = StepContext(placed, mesh, case.method, case.seed)
    context = mutate(context) if mutate else context
    replica = mesh.index_of("dp")
    batches = [_batch(case, step, rank=mesh.rank) for step in range(case.steps)]
    batches = [shift(batch, replica) if shift else batch for batch in batches]

    first = batches[0][0]
    held = {} if mutate else measured_memory(context, first)
    (tokens,) = mesh.world.sum_scalars([counted(context, batches[0])])
    accumulate(context, batches[0], step=0, tokens=tokens)
    trained = [name for name in parameter_names(placed) if placed.plan.weight(name).rate]
    gradients = {name: _array(full_gradient(placed, name)) for name in trained}

    before, rows = mesh.counters.sent(), (mesh.counters.rows_sent, mesh.counters.dense_sums)
    placed.executor.packed.clear()
    routed = _routed(placed)
    results = [
        train_step(context, batch, step=step, rate=rate_of(case, step))
        for step, batch in enumerate(batches)
    ]
    placed.sync_weights()
    after = mesh.counters.sent()
    rows = mesh.counters.rows_sent - rows[0], mesh.counters.dense_sums - rows[1]
    parameters = {name: _array(full_parameter(placed, name)) for name in parameter_names(placed)}
    checksums = {
        name: crc32(weight.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        for unit in placed.units.values()
        for name, weight in unit.views(placed.gathered(unit)).items()
    }
    keep = mesh.rank == 0
    return Evidence(
        losses=[result.loss for result in results],
        norms=[result.norm for result in results],
        gradients=gradients if keep else {},
        parameters=parameters if keep else {},
        sent={traffic: count - before.get(traffic, 0) for traffic, count in after.items()},
        held=held,
        packed=has_packed_rows(first),
        documents=dict(placed.executor.packed),
        checksums=checksums,
        wires=mesh.wires,
        rows=rows,
        routed={
            name: [now - then for now, then in zip(given, routed[name], strict=True)]
            for name, given in _routed(placed).items()
        },
    )


def _routed(placed: ParallelModel) -> dict[str, list[int]]:
    """By name of a block, the rows that this rank gave to each expert so far."""
    blocks = cast(Iterable[Block], placed.model.layers.values())
    exchanges = {block.name: block.exchange for block in blocks if block.sparse}
    return {n: list(x.sent) for n, x in exchanges.items() if isinstance(x, ExpertExchange)}


def rate_of(case: Case, step: int) -> float:
    """The run's learning rate, `step` steps after its warm-up, where updates are largest."""
    rate = case.method.lr
    return learning_rate(rate, step=rate.warmup_steps + step, steps=rate.warmup_steps + 1000)


def global_batch(case: Case, step: int) -> Micro:
    """The whole global batch of a step as one micro-batch, without padding."""
    corpus = corpus_of(case)
    order = order_of(corpus, sequence=case.sequence, seed=case.seed)
    (whole,) = micros(
        corpus, order, Rows(case.samples), first=step * case.samples, size=case.samples
    )
    return _task(case, corpus)(whole)


def _batch(case: Case, step: int, *, rank: int) -> list[Micro]:
    corpus = corpus_of(case)
    order = order_of(corpus, sequence=case.sequence, seed=case.seed)
    rows = rows_of(case.layout, rank, micro=case.plan.micro_batch)
    found = micros(corpus, order, rows, first=step * case.samples, size=case.samples)
    return [_task(case, corpus)(micro) for micro in found]


def _task(case: Case, corpus: Corpus) -> Task:
    return task_of(case.shape, case.method, corpus, seed=case.seed)


def _array(tensor: torch.Tensor) -> npt.NDArray[np.float64]:
    return tensor.cpu().to(torch.float64).numpy()
