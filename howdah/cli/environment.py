"""The environment variables of a command: its launcher, the cache folder, settings of torch.

Commands read them here, and pass them on as arguments.
"""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from howdah.base.errors import UserError
from howdah.config.recipe import Machine
from howdah.host.facts import usable_cores

TORCH_BYTES = 1 << 30  # of address space: the least for torch's CPU build and a run's threads
MOST_RANKS = 1 << 20


def launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= set(os.environ)


def ready_torch() -> Path:
    """Prepares the environment for loading torch; returns howdah's cache folder.

    By default torch keeps compiled code in a folder below /tmp whose name anyone can guess, and
    runs the code that it finds there. This function sets a folder of the user's own instead. Raises
    UserError if others can write to that folder, or if the address space is too small for torch.
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
        with suppress(OSError):  # reported by torch when it needs the folder
            Path(own).mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.stat(own)
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise UserError(
                    f"{own}, where torch keeps code that it runs, is not this user's alone: make "
                    "it so (chown, chmod go-w), or set TORCHINDUCTOR_CACHE_DIR to another folder"
                )
    return cache


def this_machine(*, among: bool = False) -> Machine:
    """The facts of this machine that `resolve_run` needs. Raises UserError.

    among  whether this process is one of several ranks that a launcher has started
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
    """The number in the environment variable `name` of a launcher; `least` if it is not set.

    Raises UserError if it is not a whole number from `least` to MOST_RANKS.
    """
    word = os.environ.get(name, str(least))
    if not (word.isascii() and word.isdigit() and least <= int(word[:9]) <= MOST_RANKS):
        raise UserError(f"{name} is {word[:99]!r}, and a launcher gives a number from {least} on")
    return int(word)
