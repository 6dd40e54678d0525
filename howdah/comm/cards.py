"""The GPUs of ranks: how ranks agree on the wire between them, and its connection by NCCL.

each rank has a GPU of its own       NCCL
two ranks share a GPU                through the host's memory, with a warning: NCCL refuses it
torch without NCCL on a machine      through the host's memory, with a warning
GPUs and CPUs, two NCCL versions     refused
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.comm.lane import CudaStreams, Lane
from howdah.comm.native import Native

LINK = "nccl"
THROUGH_HOST = "what the GPUs exchange goes through the memory of the host, which is slower"


@dataclass(frozen=True)
class Card:
    """The GPU of a rank, as the other ranks have to know it.

    uuid  names the GPU, on all machines; equal for ranks that share it
    name  for people
    nccl  the version that this rank's torch uses; empty: it has none
    """

    uuid: str
    name: str
    nccl: str


def card_of(device: torch.device) -> Card | None:
    """The GPU `device`; None for the CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    version = ""
    with suppress(AttributeError, RuntimeError):
        numbers: tuple[int, ...] = torch.cuda.nccl.version()
        version = ".".join(map(str, numbers))
    # A name for the same GPU on one machine alone would not do: uuid is there since torch 2.4.
    return Card(str(found.uuid), found.name, version if dist.is_nccl_available() else "")


def agree_on_cards(cards: Sequence[Card | None]) -> tuple[bool, str]:
    """Whether NCCL connects the GPUs of these ranks, and a warning if it does not (otherwise
    empty). Raises UserError if the ranks do not fit together.
    """
    if not any(cards):
        return False, ""
    known = [card for card in cards if card]
    if len(known) < len(cards):
        one, other = next(i for i, c in enumerate(cards) if c), cards.index(None)
        raise UserError(
            f"rank {one} computes on a GPU and rank {other} on a CPU: give all machines "
            "device=cuda, or all device=cpu"
        )
    for rank, card in enumerate(known):
        if card.nccl and known[0].nccl and card.nccl != known[0].nccl:
            raise UserError(
                f"rank 0 has NCCL {known[0].nccl} and rank {rank} NCCL {card.nccl}: install the "
                "same version of torch on all machines"
            )
    for rank, card in enumerate(known):
        first = next(r for r, other in enumerate(known) if other.uuid == card.uuid)
        if first != rank:
            return False, (
                f"ranks {first} and {rank} share one GPU ({card.name}): {THROUGH_HOST}; start one "
                "rank for each GPU"
            )
        if not card.nccl:
            return False, f"torch has no NCCL on the machine of rank {rank}: {THROUGH_HOST}"
    return True, ""


def connect_nccl(
    store: dist.Store, *, rank: int, size: int, device: torch.device, seconds: float
) -> Native:
    """Connects the GPUs of `size` ranks that share a store.

    seconds  after which `watcher.py` says who is missing; NCCL itself waits twice as long
    """
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options(is_high_priority_stream=True)
    options._timeout = timedelta(seconds=2 * seconds)  # the watcher knows more, and is first
    backend = nccl(store, rank, size, options)
    backend.eager_connect_single_device(device)
    wire = Native(backend, link=LINK, device=device)
    wire.lane = Lane(CudaStreams(device), check=wire.check)
    return wire


def connect_mpi(*, rank: int, size: int) -> Native:
    """The collectives of MPI for tensors of the CPU, between all ranks that mpirun started.

    Raises UserError where torch was built without MPI.
    """
    if not dist.is_mpi_available():
        raise UserError(
            "transport=mpi needs a torch that was built with MPI, and this one was not: take "
            "transport=torch, or build torch from source on a machine with MPI"
        )
    backend = dist.ProcessGroupMPI.create(list(range(size)))
    if backend.rank() != rank:
        raise UserError(f"MPI calls this rank {backend.rank()}, and the launcher {rank}")
    return Native(backend, link="mpi")
