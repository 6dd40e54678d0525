"""Connects ranks that share a store by gloo; all links are opened, and watched, from the start."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from howdah.comm.checks import Checks, duration
from howdah.comm.heartbeat import open_sockets
from howdah.comm.torch_transport import TorchTransport
from howdah.comm.transport import PeerLost

HOST = "127.0.0.1"


def torch_transport(
    store: dist.Store, *, rank: int, size: int, seconds: float = 600, loopback: bool = False
) -> TorchTransport:
    """Connects `size` ranks that share a store. Raises PeerLost if not all ranks join.

    seconds   after which a peer counts as lost that does not join, or sends nothing
    loopback  all ranks are on this machine: use only its loopback, which no other machine reaches
    """
    seconds, rank = duration("seconds", seconds), Checks(0, size).peer(rank)
    known = open_sockets()
    try:
        store.set(f"here/{rank}", "")
        wire = _connect(store, rank, size, timedelta(seconds=seconds), loopback)
    except RuntimeError as error:
        raise _not_met(store, rank, size, error) from None
    transport = TorchTransport(wire, seconds=seconds)
    transport.greet(known, heartbeats=not loopback)  # loopback is never down
    return transport


def _connect(store: dist.Store, rank: int, size: int, patience: timedelta, loopback: bool) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    if not loopback:
        return gloo(store, rank, size, patience)
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname=HOST)], patience
    return gloo(store, rank, size, options)


def _not_met(store: dist.Store, rank: int, size: int, error: RuntimeError) -> PeerLost:
    """The error that names the ranks that did not join, or has gloo's message if all ranks did."""
    missing: list[str] = []
    with suppress(RuntimeError):  # the store may be what failed
        missing = [str(peer) for peer in range(size) if not store.check([f"here/{peer}"])]
    if missing:
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
        return PeerLost(f"{who} of {size} did not come to be connected, as rank {rank} saw")
    said = str(error).splitlines()[0]
    return PeerLost(f"rank {rank} cannot be connected with all of {size} ranks: {said}")
