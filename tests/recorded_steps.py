"""Whole layouts on the wire that only records (`recorded_wire.py`).

    ranks = record(plan)         one Recorded for each rank, made one after another
    ranks[3].entries             what the host of rank 3 did, in the order of its program

The real code runs: `apply`, training steps, an evaluation. Tensors have no data, so a rank of a
large model costs what its Python code costs. What says nothing to other ranks is left out: filling
weights, and the update.
"""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from quick_shapes import QuickShapes
from recorded_wire import META, Backend, Event, HostWire, Joining, Recorded, Streams

from howdah.comm import group, messages
from howdah.comm.lane import CudaStreams
from howdah.comm.transport import SingleRank
from howdah.parallel.apply import apply
from howdah.parallel.mesh import connect_mesh
from howdah.parallel.zero3 import ShardedWeights
from howdah.plan.method import Optimizer
from howdah.plan.plan import Plan
from howdah.text.batches import Micro
from howdah.train import feed, step, tell
from howdah.train.feed import arrays_of, columns_of
from howdah.train.step import StepContext, train_step

PASSES = ("step", "step", "evaluation", "step")  # a second step gathers otherwise than the first
NOT_FUSED = Optimizer("rmsprop")  # torch has no fused ones for tensors without data


def _without_data(_x: torch.Tensor) -> torch.Tensor:
    return torch.empty(_x.shape, dtype=_x.dtype, device=META)


@contextmanager
def played(streams: Streams):
    """Streams that record in place of those of CUDA; nothing has data."""
    replaced = [
        (CudaStreams, "current", lambda self: streams.current()),
        (CudaStreams, "new", lambda self: streams.new()),
        (CudaStreams, "inside", lambda self, stream: streams.inside(stream)),
        (CudaStreams, "event", lambda self: streams.event()),
        (group, "check_tensor", lambda *_, **__: None),  # refuses what has no data
        (messages, "check_tensor", lambda *_, **__: None),
        (feed, "pinned", lambda x: x),
        (tell, "pinned_like", _without_data),
        (step, "clipped_update", lambda *_, **__: None),  # says nothing on any wire
        (ShardedWeights, "_ask_others", lambda self, unit: _host(self).meet(f"wants {unit}")),
    ]
    with ExitStack() as stack:
        for where, name, new in replaced:
            stack.enter_context(patch.object(where, name, new))
        yield


def _host(weights: ShardedWeights) -> HostWire:
    return weights._group._transport.host  # type: ignore[attr-defined]


def micro_of(plan: Plan) -> Micro:
    """A micro-batch whose rows are one document each."""
    rows, length = plan.micro_batch, plan.sequence
    at = np.tile(np.arange(length), (rows, 1))
    tokens = at % plan.shape.vocab
    documents = np.zeros((rows, length), np.int32)
    return Micro(tokens, tokens.copy(), at, documents, np.arange(rows))


def record_rank(
    plan: Plan, rank: int, passes: Any = PASSES, backend: type[Backend] = Backend
) -> Recorded:
    """What one rank of a plan does in `passes`."""
    plan = replace(plan, method=replace(plan.method, optimizer=NOT_FUSED))
    streams = Streams()
    joining = Joining(streams, rank, backend)
    with played(streams), QuickShapes():
        mesh = connect_mesh(plan.layout, _world(joining, plan.layout.world), META)
        placed = apply(plan, mesh=mesh, fill=lambda piece, out: None)
        context = StepContext(placed, mesh, plan.method, seed=1)
        micros, untold = [micro_of(plan)] * plan.micros, []
        for number, kind in enumerate(passes):
            if kind == "evaluation":
                _evaluate(context, micros)
                continue
            result = train_step(context, micros, step=number, rate=1e-3)
            untold.append(result.told)
            for told in untold[:-1]:  # one step late (`tell.py`)
                told._ready.synchronize()
            untold = untold[-1:]
        mesh.close()
    ledgers = {wire: native.ledger.entry[:2] for wire, native in joining.made.items()}
    return Recorded(streams.entries, streams.count, ledgers)


def _world(joining: Joining, size: int) -> Any:
    if size > 1:
        return joining(range(size))
    return SingleRank()


@torch.no_grad()
def _evaluate(context: StepContext, micros: Any) -> None:
    """As `held_out_loss`, without its number."""
    placed, world = context.placed, context.mesh.world
    placed.sync_weights()
    with placed.in_pass(f"a held-out loss of {len(micros)} micro-batches"):
        given = [arrays_of(one, META, columns_of(context.mesh)) for one in micros]
        placed.executor.evaluate(given, placed.plain_loss)
    event = Event()
    event.record(CudaStreams(META).current())
    event.synchronize()
    world.sum_scalars([0.0, 0.0])


def record(plan: Plan, passes: Any = PASSES, backends: Any = None) -> list[Recorded]:
    """What every rank of a plan does in `passes`.

    backends  by rank, another kind of Backend
    """
    others = backends or {}
    return [
        record_rank(plan, rank, passes, others.get(rank, Backend))
        for rank in range(plan.layout.world)
    ]
