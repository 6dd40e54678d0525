"""Trains a case under the flight checker, and again under the late double.

    early   as it is, and every operator is checked
    late    what operations write is NaN until somebody waits for it; equal bits

Each is two steps and a held-out loss. Where these end nothing may be in flight: weights are
gathered when the next forward begins (`howdah/parallel/zero.py`), not before.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest.mock import patch
from zlib import crc32

import torch
from flight import FlightChecker
from late import LateDouble, bits

from howdah.comm.transport import Transport
from howdah.parallel.apply import ParallelModel, apply
from howdah.parallel.flat_params import random_init
from howdah.parallel.mesh import connect_mesh
from howdah.plan import sums
from howdah.shapes.weights import weights
from howdah.train.step import StepContext, held_out_loss, train_step
from howdah.verify.case import Case
from howdah.verify.evidence import _batch, rate_of

Double = FlightChecker | LateDouble


class Found(NamedTuple):
    """The results of one rank.

    numbers  by name: losses and norms; checksums of gradients, masters and weights
    started  operations that were in flight
    """

    numbers: dict[str, float]
    started: int


class Seen(NamedTuple):
    """What a rank saw of both runs.

    started   operations that were in flight in each
    poisoned  bytes of their targets in the late one
    differ    numbers that are others in the late one
    """

    started: int
    poisoned: int
    differ: list[str]


def both(transport: Transport, case: Case, apart: bool = True) -> Seen:
    """Runs the case under one double and then under the other. Raises Race or Spoiled.

    apart  whether every unit is a message of its own, as where units are large
    """
    late = LateDouble()
    with message_for_each_unit(apart):
        early, again = (
            train_under(FlightChecker(), transport, case),
            train_under(late, transport, case),
        )
    assert early.started == again.started
    return Seen(early.started, late.poisoned, list(differences(early.numbers, again.numbers)))


def train_under(double: Double, transport: Transport, case: Case, *, ends: bool = True) -> Found:
    """Trains on this rank of the case's layout.

    ends  whether something in flight at the end of a step is refused
    """
    numbers: dict[str, float] = {}
    with double, connect_mesh(case.layout, transport, torch.device("cpu")) as mesh:
        placed = apply(case.plan, mesh=mesh, fill=random_init(weights(case.shape), case.seed))
        context = StepContext(placed, mesh, case.method, case.seed)
        for step in range(case.steps):
            batch = _batch(case, step, rank=mesh.rank)
            result = train_step(context, batch, step=step, rate=rate_of(case, step))
            numbers |= {f"loss {step}": result.loss, f"norm {step}": result.norm}
            if ends:
                double.check_landed()
        numbers["held-out loss"], _ = held_out_loss(context, batch)
        if ends:
            double.check_landed()
        numbers |= checksums(placed)
    return Found(numbers, len(double.started))


def checksums(placed: ParallelModel) -> Iterator[tuple[str, int]]:
    """Yields names of tensors with the checksums of their bits."""
    for name, unit in placed.units.items():
        for kind, x in (
            ("gradient", unit.summed),
            ("master", unit.masters),
            ("weight", unit.weights),
        ):
            if x.device.type != "meta":  # the servers', or at another home
                yield f"{kind} of {name}", crc32(bits(x).numpy().tobytes())


def differences(one: dict[str, float], other: dict[str, float]) -> Iterator[str]:
    """Yields what differs between two runs, NaN included."""
    for name in sorted({*one, *other}):
        if one.get(name) != other.get(name) or one[name] != one[name]:
            yield f"{name}: {one.get(name)} and {other.get(name)}"


def message_for_each_unit(yes: bool = True) -> AbstractContextManager[Any]:
    """Inside, every unit is a message of its own. A miniature would need one for all of them."""
    return patch.object(sums, "BUCKET_BYTES", 1 if yes else sums.BUCKET_BYTES)
