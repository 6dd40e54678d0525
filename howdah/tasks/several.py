"""A task on several processes of this machine, for models that one device does not hold.

    caller    texts, settings ──┬──→ rank 0   its part of the model, read once  ──→ results
                                └──→ rank 1   its part                              the same

Every rank reads its part of the weights when it starts, and keeps it. All do each call together
(`generate/placed.py`) and find the same; rank 0 tells it. A mistake in a call is told by all of
them before any computes, so they stay ready for the next one.
"""

import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from howdah.base.errors import UserError
from howdah.comm.spawn import WorkerError, Workers
from howdah.comm.transport import Transport
from howdah.generate.placed import decoding_plan, place
from howdah.host.devices import own_device
from howdah.host.facts import usable_cores
from howdah.parallel.mesh import connect_mesh
from howdah.plan.layout import Layout
from howdah.tasks.doing import Using
from howdah.tasks.opened import open_model

Call = tuple[Sequence[Any], Mapping[str, Any]]  # texts and settings
Told = tuple[list[Any], str]  # results, or why there are none


@dataclass(frozen=True)
class Placing:
    """A model that is used for a task, and where its parts are; `device` is cpu or cuda."""

    task: str
    folder: Path
    layout: Layout
    dtype: torch.dtype
    device: str


class Ranks:
    """The processes of a layout, with a model for a task. Raises UserError."""

    def __init__(self, placing: Placing) -> None:
        ranks = placing.layout.world
        threads = max(usable_cores() // ranks, 1)
        try:
            self._workers = Workers(ranks, threads=threads, device=placing.device, main=False)
            self.close = weakref.finalize(self, self._workers.close, kill=True)
            self._workers.run(answers, placing)
        except WorkerError as error:
            raise _said(error) from None

    def __call__(self, texts: Sequence[Any], settings: Mapping[str, Any]) -> list[Any]:
        """The result of each text. Raises UserError."""
        if not self.close.alive:
            raise UserError("the processes of this pipeline have ended; make another one")
        try:
            found, why = self._workers.ask(texts, settings)[0]
        except WorkerError as error:
            raise _said(error) from None
        if why:
            raise UserError(why)
        return list(found)


def answers(transport: Transport, of: Placing) -> Generator[Told | None, Call, None]:
    """A rank: takes texts and settings, and yields their results, of rank 0 alone."""
    opened = open_model(of.folder, say=lambda line: None)
    plan, device = decoding_plan(opened.shape, of.layout), own_device(of.device, transport.rank)
    with connect_mesh(plan.layout, transport, device) as mesh:
        using = Using(of.task, opened, place(plan, mesh, opened.fill, dtype=of.dtype))
        told: Told = [], ""
        while True:
            texts, settings = yield told if transport.rank == 0 else None
            try:
                told = using.results(texts, settings), ""
            except UserError as mistake:
                told = [], str(mistake)


def _said(error: WorkerError) -> Exception:
    return UserError(str(error)) if error.kind in ("mistake", "limit") else error
