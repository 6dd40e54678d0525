"""The meeting of ranks that share a store.

every rank    says where it is and what it can      machine, process, engine or why not
every rank    waits for what the others say         a missing one is named
"""

import os
import platform
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Literal

from torch.distributed import Store

from howdah.base.errors import UserError
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.settings import read_settings

Kind = Literal["engine", "torch"]
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of a running machine


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself.

    machine  where processes can share memory; process  its number there
    wanted   the kind of transport it asks for, or empty
    why_not  why it cannot have the engine, or empty
    """

    machine: str
    process: int
    wanted: str = ""
    why_not: str = ""


def own_hello(wanted: Kind | None = None) -> Hello:
    """What this process says."""
    why_not = ""
    if wanted in (None, "engine"):
        try:
            engine_library(read_settings())
        except NoCompiler as error:
            why_not = " ".join(str(error).split())
    return Hello(this_machine(), os.getpid(), wanted or "", why_not)


def meet(store: Store, hello: Hello, *, rank: int, size: int, seconds: float) -> list[Hello]:
    """What all ranks say. Raises UserError naming those that do not come within `seconds`."""
    own = [hello.machine, str(hello.process), hello.wanted, hello.why_not]
    store.set(f"hello/{rank}", "\n".join(own))
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
    machine, process, wanted, why_not = said.split("\n")
    return Hello(machine, int(process), wanted, why_not)


def this_machine() -> str:
    """The same for processes that can share memory, where the system tells: they see each other's
    numbers, and the sockets over which memory is handed from one to another.
    """
    if not BOOT.exists():
        return platform.node()
    spaces = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return f"{BOOT.read_text().strip()} {spaces}"
