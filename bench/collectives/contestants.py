"""The contestants behind one small interface: five operations on flat tensors, in float32 or bf16.

    group    howdah's Group on the engine, as `connect()` returns it: what a program calls
    engine   howdah's transport below it, called directly
    gloo     torch.distributed on its gloo backend: what a program calls
    messages howdah's Group on messages of gloo, as between machines
    chosen   either Group with a chosen algorithm, in place of direct exchanges

All of them live in the same processes and take the same tensors.
"""

from collections.abc import Sequence
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from howdah.comm.chosen import algorithms_of, choosing
from howdah.comm.counters import Counters
from howdah.comm.group import Group
from howdah.comm.rendezvous import choose
from howdah.comm.transport import Transport

Counts = Sequence[int]


class Carrier(Protocol):
    """What `make_trial` asks of a transport for the operations that are compared."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> object: ...
    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts) -> object: ...
    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> object: ...
    def broadcast(self, x: Tensor, root: int) -> object: ...
    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> object: ...


class OverGroup:
    """howdah's Group, made as `howdah.comm.connect` makes it. Shares are its own."""

    def __init__(self, transport: Transport, *, owns: bool = False) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.group = Group(transport, axis="world", counters=Counters(), owns=owns)

    def all_reduce(self, x: Tensor) -> object:
        return self.group.all_reduce(x)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts) -> object:
        return self.group.reduce_scatter(out, x)

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> object:
        return self.group.all_gather(out, x)

    def broadcast(self, x: Tensor, root: int) -> object:
        return self.group.broadcast(x, root)

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> object:
        return self.group.all_to_all(out, x)


class OverGloo:
    """torch.distributed's default group. All shares are equal here, as its calls want them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        # torch 2.13 has new names, and warns of the old ones
        self._scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        self._gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def all_reduce(self, x: Tensor) -> object:
        return dist.all_reduce(x)

    def reduce_scatter(self, out: Tensor, x: Tensor, counts: Counts) -> object:
        return self._scatter(out, x)

    def all_gather(self, out: Tensor, x: Tensor, counts: Counts) -> object:
        return self._gather(out, x)

    def broadcast(self, x: Tensor, root: int) -> object:
        return dist.broadcast(x, root)

    def all_to_all(self, out: Tensor, x: Tensor, sent: Counts, received: Counts) -> object:
        return dist.all_to_all_single(out, x)


def connect(engine: Transport, store: dist.Store, algorithm: str) -> dict[str, Carrier]:
    """All carriers between the ranks of `engine`, by name; those of a chosen algorithm if any."""
    rank, size, more = engine.rank, engine.size, {}
    if algorithm:
        own = dist.PrefixStore("messages", store)
        messages = choose(own, rank=rank, size=size, transport="torch")
        for name, wire in (("group", engine), ("messages", messages)):
            more[name] = OverGroup(wire)
            chosen = choosing(wire, algorithms_of(algorithm))
            more[f"{name} chosen"] = OverGroup(chosen, owns=wire is messages)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return {
        "group": OverGroup(engine),
        "engine": engine,
        "gloo": OverGloo(rank, size),
        **more,
    }


def disconnect(carriers: dict[str, Carrier]) -> None:
    """The engine is closed by who made it."""
    for carrier in carriers.values():
        if isinstance(carrier, OverGroup):
            carrier.group.close()
    dist.destroy_process_group()
