"""What the environment of a command says: who started it, where caches lie, what torch may do.

Only files at the top read it; everything below is told.
"""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from howdah.base.errors import UserError
from howdah.config.recipe import Machine
from howdah.host.facts import usable_cores

TORCH_BYTES = 1 << 30  # of addresses that its build for CPUs and a run's few threads take at least
MOST_RANKS = 1 << 20


def launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= set(os.environ)


def ready_torch() -> Path:
    """What must be so before torch is loaded; the cache folder. Raises UserError.

    torch keeps what it compiles in a folder of a name that everybody can guess, below /tmp, and
    runs what it finds there: here it is the user's own.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if 0 <= limit < TORCH_BYTES:
        raise UserError(
            f"the address space is limited to {limit >> 20} MiB (ulimit -v), and torch alone takes "
            f"{TORCH_BYTES >> 20}; raise the limit"
        )
    base = os.environ.get("HOWDAH_CACHE") or os.environ.get("XDG_CACHE_HOME")
    cache = (Path(base) if base else Path.home() / ".cache") / "howdah"
    if "torch" not in sys.modules:
        own = os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
        with suppress(OSError):  # found to be so when somebody needs it
            Path(own).mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.stat(own)
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise UserError(
                    f"{own}, where torch keeps code that it runs, is not this user's alone: make "
                    "it so (chown, chmod go-w), or set TORCHINDUCTOR_CACHE_DIR to another folder"
                )
    return cache


def this_machine(*, among: bool = False) -> Machine:
    """What must be known of where a run starts.

    among  as one of the ranks that a launcher has started
    """
    cache = ready_torch()
    import torch

    return Machine(
        world=number_in("WORLD_SIZE") if among else None,
        local_world=number_in("LOCAL_WORLD_SIZE") if among else None,
        cores=usable_cores(),
        cuda=torch.cuda.device_count(),
        cache=cache,
    )


def number_in(name: str, *, least: int = 1) -> int:
    """The number that a launcher gives in the variable of this name; `least` where it gives none.

    Raises UserError.
    """
    word = os.environ.get(name, str(least))
    if not (word.isascii() and word.isdigit() and least <= int(word[:9]) <= MOST_RANKS):
        raise UserError(f"{name} is {word[:99]!r}, and a launcher gives a number from {least} on")
    return int(word)
