"""Moves experts to other ranks of ep while a run goes on: their weights, and the states that the
optimizer keeps of them.

    rank 0    0 1 2   ─┐   pieces by number, as of a checkpoint   ┌─   3 0 4
    rank 1    3 4     ─┘   (`plan/boxes.py`, reads)               └─   1 2

Every rank knows what each wants and has, so nothing is asked for. What ZeRO has shared out comes
from the ranks that have shares of it; the others have a copy of their own.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from howdah.model.islands import promoted
from howdah.parallel.apply import ParallelModel
from howdah.parallel.expert import number_experts
from howdah.parallel.flat_params import DTYPES, FlatUnit, copied
from howdah.plan.boxes import Piece, reads
from howdah.plan.flat_buffers import Buffer, Orders, pieces
from howdah.plan.mesh_axes import axis
from howdah.plan.sharding import local_buffers, own_range
from howdah.shapes.weights import FROZEN

Tables = Mapping[int, Mapping[str, Buffer]]  # of ranks, by unit


@dataclass(frozen=True)
class Move:
    """What this rank gives to each rank, and takes from it: ranges of elements of its own range."""

    given: Mapping[int, list[tuple[int, int]]]
    taken: Mapping[int, list[tuple[int, int]]]


def move_experts(placed: ParallelModel, orders: Orders) -> int:
    """Brings experts to the places of `orders`. All ranks call together, between steps. Returns the
    bytes that this rank sends.
    """
    placed.sync_weights()
    before, after = _tables(placed, placed.orders), _tables(placed, orders)
    sent = 0
    with placed.mesh.counters.aside(), torch.no_grad():
        names = (f"{frozen}{block}.experts" for block in orders for frozen in ("", FROZEN))
        for name in filter(placed.plan.ranks_of_unit.__contains__, names):
            unit = placed.units.get(name)
            move = _move(placed, before, after, unit) if unit else Move({}, {})
            for kind in _kinds(placed, name):
                sent += _moved(placed, unit, kind, move)
            if unit:
                placed.units[name] = replace(unit, buffer=after[placed.mesh.rank][name])
        placed.orders.update(orders)
        number_experts(placed.model, orders, placed.mesh.device)
        if placed.gatherer:
            placed.gatherer.updated()
        placed.sync_weights()
    return sent


def _tables(placed: ParallelModel, orders: Orders) -> Tables:
    """The buffers of the ranks among which this rank's experts are: of a group of ep, and of those
    that have shares of theirs.
    """
    plan, rank = placed.plan, placed.mesh.rank
    found: dict[int, Mapping[str, Buffer]] = {}
    for other in axis(plan.layout, "ep").group(rank):
        table = {buffer.unit: buffer for buffer in local_buffers(plan, other, orders)}
        shared = axis(plan.layout, "expert_shard").group(other) if plan.layout.zero else [other]
        found.update(dict.fromkeys(shared, table))
    return dict(sorted(found.items()))


def _kinds(placed: ParallelModel, unit: str) -> tuple[str, ...]:
    if unit.startswith(FROZEN):
        return ("weights",)
    return ("masters", *placed.plan.method.optimizer.states)


def _move(placed: ParallelModel, before: Tables, after: Tables, unit: FlatUnit) -> Move:
    """Who gives what of a unit to whom."""
    rank, name = placed.mesh.rank, unit.buffer.unit
    held = {one: [*_own(placed, before, one, name)] for one in before}
    wanted = {one: [*_own(placed, after, one, name)] for one in after}
    given: dict[int, list[tuple[int, int]]] = {}
    taken: dict[int, list[tuple[int, int]]] = {}
    there = {one: [piece for piece, _ in theirs] for one, theirs in held.items()}
    for one, pairs in wanted.items():
        for read in reads([piece for piece, _ in pairs], there, local=one):
            if read.holder == rank:
                start = held[rank][read.source][1] + read.run.there
                given.setdefault(one, []).append((start, start + read.run.length))
            if one == rank:
                start = wanted[rank][read.piece][1] + read.run.here
                taken.setdefault(read.holder, []).append((start, start + read.run.length))
    return Move(given, taken)


def _own(
    placed: ParallelModel, tables: Tables, rank: int, unit: str
) -> Iterator[tuple[Piece, int]]:
    """The pieces of a rank's own range, each with where it begins there."""
    buffer = tables[rank][unit]
    first, last = own_range(buffer, placed.plan.layout, rank)
    return ((piece, start - first) for piece, start, _ in pieces(buffer, first, last))


def _moved(placed: ParallelModel, unit: FlatUnit | None, kind: str, move: Move) -> int:
    """Moves one kind of tensor of a unit; the bytes that this rank sends. Ranks of other stages
    have nothing to send, and call along.
    """
    mesh, dtype = placed.mesh, DTYPES[placed.plan.method.precision]
    dtype = dtype if kind == "weights" else promoted(dtype)
    mine = placed.own(unit, kind) if unit else torch.empty(0, dtype=dtype)
    everyone = range(mesh.world.size)
    sent = [sum(b - a for a, b in move.given.get(rank, ())) for rank in everyone]
    received = [sum(b - a for a, b in move.taken.get(rank, ())) for rank in everyone]
    x = torch.cat([mine[:0], *(mine[a:b] for one in everyone for a, b in move.given.get(one, ()))])
    out = x.new_empty(sum(received), device=mesh.device)
    mesh.world.all_to_all(out, x.to(mesh.device), sent=sent, received=received)
    if unit:
        values, at = torch.zeros_like(mine, device=mesh.device), 0
        for start, stop in (span for one in everyone for span in move.taken.get(one, ())):
            values[start:stop] = out[at : at + stop - start]
            at += stop - start
        _put(placed, unit, kind, values)
    return (sum(sent) - sent[mesh.rank]) * x.element_size()


def _put(placed: ParallelModel, unit: FlatUnit, kind: str, values: Tensor) -> None:
    """Gives a unit the values of its own range; weights follow their masters."""
    put = placed.homes.put if placed.homes else copied
    if kind in ("masters", "weights"):
        put(unit, "weights", values.to(unit.weights.dtype))
        if unit.apart:
            put(unit, "masters", values)
    elif placed.update:
        put(unit, kind, values)
    else:
        for part in (one for one in placed.ranges if one.unit == unit.buffer.unit):
            if part.master.numel():
                mine = values[part.start - unit.start : part.stop - unit.start]
                placed.optimizer.state[part.master][kind].copy_(mine)
