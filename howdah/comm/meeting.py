"""The meeting of ranks that share a store.

every rank    stores its machine, its process, and whether it can use the engine
every rank    reads these of all other ranks; an error names those that are missing
"""

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal
from zlib import crc32

import torch
from torch.distributed import Store

from howdah import __version__
from howdah.base.errors import UserError
from howdah.comm.build import NoCompiler, engine_library
from howdah.comm.cards import Card, card_of
from howdah.comm.settings import read_settings

Kind = Literal["engine", "tcp", "torch", "nccl", "mpi"]
CPU = torch.device("cpu")
SHORTEST, LONGEST = 0.0005, 0.05  # seconds between looks for the other ranks
LAST = 5.0  # seconds that rank 0 waits for those that have not read yet why a meeting failed
BOOT = Path("/proc/sys/kernel/random/boot_id")  # the same for all processes of a running machine


class Missing(UserError):
    """Ranks did not come to a meeting.

    ranks    their numbers among those that meet
    seconds  in which they did not come
    """

    def __init__(self, ranks: Sequence[int], size: int, seconds: float) -> None:
        self.ranks, self.seconds = ranks, seconds
        super().__init__(
            f"{spelled(ranks)} of {size} did not come within {seconds:g} s: start as many as the "
            "launcher was told, or see why they ended"
        )


@dataclass(frozen=True)
class Hello:
    """A rank's description of itself, which all ranks exchange.

    machine  equal for ranks that can share memory
    process  process number on that machine
    wanted   the kind of transport that the user asked for, or empty
    why_not  why this rank cannot use the engine, or empty
    card     the GPU that this rank computes on; None: the CPU
    algorithms  those that the user chose for collectives, or empty
    host     the machine's name, for messages
    version  of howdah, and a checksum of its source
    wire     that is to join machines: tcp or gloo
    trust    whether ranks need a secret: secret or network
    secret   whether this rank has one
    problem  why this rank cannot join others, or empty
    """

    machine: str
    process: int
    wanted: str = ""
    why_not: str = ""
    card: Card | None = None
    algorithms: str = ""
    host: str = ""
    version: str = ""
    wire: str = "tcp"
    trust: str = "secret"
    secret: bool = False
    problem: str = ""


def own_hello(
    wanted: Kind | None = None, device: torch.device = CPU, algorithms: str = ""
) -> Hello:
    """The Hello of this process, which computes on `device`."""
    why_not = ""
    if wanted in (None, "engine", "nccl"):
        try:
            engine_library(read_settings())
        except NoCompiler as error:
            why_not = " ".join(str(error).split())
    return Hello(
        this_machine(),
        os.getpid(),
        wanted or "",
        why_not,
        card_of(device),
        algorithms,
        platform.node(),
        version_here(),
    )


def meet(
    store: Store,
    hello: Hello,
    *,
    rank: int,
    size: int,
    seconds: float,
    heed: Callable[[], object] | None = None,
) -> list[Hello]:
    """Exchanges the Hellos of all ranks; returns them in rank order.

    heed  called while ranks have not come; may raise

    Raises Missing, for ranks that did not come within `seconds`, or UserError for a machine with
    another version of howdah, and where another process has written what this rank says.
    """
    store.set(f"hello/{rank}", json.dumps(asdict(hello)))
    until, keys = monotonic() + seconds, [f"hello/{peer}" for peer in range(size)]
    pause = SHORTEST
    while not store.check(keys):  # a wait of torch's stores would heed no stop signal
        if rank and store.check(["missing"]):
            raise Missing(json.loads(store.get("missing")), size, seconds)
        late = monotonic() > until
        if late and (missing := [n for n, key in enumerate(keys) if not store.check([key])]):
            store.set("missing", json.dumps(missing))  # the store may end with this rank
            raise Missing(missing, size, seconds)
        if heed:
            heed()
        sleep(pause)
        pause = min(2 * pause, LONGEST)
    told = [json.loads(store.get(key).decode()) for key in keys]
    for peer, other in enumerate(told):
        # Before other fields, which may be new.
        theirs, name = other.get("version", "of another age"), other.get("host", "another machine")
        if other["machine"] != hello.machine and theirs != hello.version:
            raise UserError(
                f"rank {peer} on {name} runs howdah {theirs} and rank {rank} on "
                f"{hello.host} {hello.version}: install one version on all machines"
            )
    found = [_read(one) for one in told]
    if found[rank] != hello:  # who may write to the store could take the ranks' doors off
        raise UserError(
            f"another process speaks as rank {rank} in the store where the ranks meet: start this "
            "rank once, and let no stranger reach the launcher's port"
        )
    return found


def part(store: Store, *, rank: int, size: int, without: Sequence[int] = ()) -> None:
    """Called by every rank that has read why this meeting comes to nothing. The process of rank 0
    may keep the store: it waits until all have read it, for LAST seconds at most.

    without  ranks that did not come
    """
    store.set(f"parted/{rank}", "")
    until, keys = monotonic() + LAST, [f"parted/{n}" for n in range(size) if n not in without]
    while rank == 0 and monotonic() < until and not store.check(keys):
        sleep(SHORTEST)


def spelled(ranks: Sequence[int]) -> str:
    """Ranks in a sentence."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


@cache
def version_here() -> str:
    """The version of howdah, with a checksum of its source, in which two clones may differ. It is
    read once: what runs is what was loaded.
    """
    total = 0
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        total = crc32(path.read_bytes(), total)
    return f"{__version__} (source {total:08x})"


def _read(hello: dict[str, Any]) -> Hello:
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
