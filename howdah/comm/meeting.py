"""The meeting of ranks that share a store.

every rank    stores its machine, its process, and whether it can use the engine
every rank    reads these of all other ranks; an error names those that are missing
"""

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Literal

import torch
from torch.distributed import Store

from howdah.base.errors import UserError
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.cards import Card, card_of
from howdah.comm.settings import read_settings

Kind = Literal["engine", "torch", "nccl", "mpi"]
CPU = torch.device("cpu")
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of a running machine


@dataclass(frozen=True)
class Hello:
    """A rank's description of itself, which all ranks exchange.

    machine  equal for ranks that can share memory
    process  process number on that machine
    wanted   the kind of transport that the user asked for, or empty
    why_not  why this rank cannot use the engine, or empty
    card     the GPU that this rank computes on; None: the CPU
    """

    machine: str
    process: int
    wanted: str = ""
    why_not: str = ""
    card: Card | None = None


def own_hello(wanted: Kind | None = None, device: torch.device = CPU) -> Hello:
    """The Hello of this process, which computes on `device`."""
    why_not = ""
    if wanted in (None, "engine", "nccl"):
        try:
            engine_library(read_settings())
        except NoCompiler as error:
            why_not = " ".join(str(error).split())
    return Hello(this_machine(), os.getpid(), wanted or "", why_not, card_of(device))


def meet(store: Store, hello: Hello, *, rank: int, size: int, seconds: float) -> list[Hello]:
    """Exchanges the Hellos of all ranks; returns them in rank order.

    Raises UserError, which names the ranks that did not join within `seconds`.
    """
    store.set(f"hello/{rank}", json.dumps(asdict(hello)))
    until, keys = monotonic() + seconds, [f"hello/{peer}" for peer in range(size)]
    try:
        store.wait(keys, timedelta(seconds=max(until - monotonic(), 0.001)))
    except RuntimeError:
        missing = [str(peer) for peer, key in enumerate(keys) if not store.check([key])]
        who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(missing)}"
        raise UserError(
            f"{who} of {size} did not come within {seconds:g} s: start as many as the launcher "
            "was told, or see why they ended"
        ) from None
    return [_read(store.get(key).decode()) for key in keys]


def _read(said: str) -> Hello:
    hello = json.loads(said)
    return Hello(**{**hello, "card": Card(**hello["card"]) if hello["card"] else None})


def this_machine() -> str:
    """A text that is equal for processes that can share memory: on one running machine, and in the
    same namespaces of process numbers and of networks, which sending a descriptor needs. On systems
    other than Linux it is the host name.
    """
    if not BOOT.exists():
        return platform.node()
    spaces = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return f"{BOOT.read_text().strip()} {spaces}"
