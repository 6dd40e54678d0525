"""The environment variables of a command: its launcher, the cache folder, settings of torch.

Commands read them here, and pass them on as arguments.
"""

import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from howdah.base.errors import UserError
from howdah.comm.settings import cache_folder
from howdah.config.recipe import Machine
from howdah.host.facts import has_card, usable_cores
from howdah.machines.cluster import Cluster
from howdah.machines.cluster_file import CLUSTERS, load_cluster

# What torch reads where there is a GPU. Segments that grow leave fewer gaps near the end of its
# memory. A failure of NCCL ends a run with howdah's sentence, not the process by torch's thread.
# The flight recorder keeps the last calls, which are written beside a run that hangs. With fewer
# queues than streams, messages of interleaved stages could wait for one another (docs/gpu.md).
FOR_CARDS = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}
PROFILER = {"KINETO_LOG_LEVEL": "6"}  # torch's profiler tells of each start on stderr otherwise
# Weights & Biases writes files, and uploads nothing, unless the user says so; MLflow writes files.
TRACKERS = {
    "WANDB_MODE": "offline",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # other names of the first
# The least for torch's CPU build and a run's threads, of address space and of what can be written.
LEAST = {
    resource.RLIMIT_AS: ("the address space", "-v", 1 << 30),
    resource.RLIMIT_DATA: ("a process's data", "-d", 1 << 28),
}
MOST_RANKS = 1 << 20


def launched() -> bool:
    """Whether a launcher, such as torchrun, has started this process as one of several ranks."""
    return {"RANK", "WORLD_SIZE"} <= set(os.environ)


def by_torchrun() -> bool:
    """Whether that launcher is torchrun, or one that keeps its words."""
    return launched() and "TORCHELASTIC_RUN_ID" in os.environ


def first_here() -> bool:
    """Whether this is the first rank on its machine, or the only one."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def cluster_named(text: str, *, devices: int | None = None) -> Cluster:
    """The cluster that a user names; `here` is this machine as `howdah measure` found it."""
    return load_cluster(text, devices=devices, own=cache_folder() / CLUSTERS)


def several_machines() -> bool:
    """Whether a launcher has started ranks on other machines, too."""
    return launched() and number_in("LOCAL_WORLD_SIZE") < number_in("WORLD_SIZE")


def ready_torch() -> Path:
    """Prepares the environment for loading torch; returns howdah's cache folder.

    By default torch keeps compiled code in a folder below /tmp whose name anyone can guess, and
    runs the code that it finds there. This function sets a folder of the user's own instead. Raises
    UserError if others can write to that folder, or if a limit of memory is too small for torch.
    """
    for which, (what, option, least) in LEAST.items():
        limit, _ = resource.getrlimit(which)
        if 0 <= limit < least:
            raise UserError(
                f"{what} is limited to {limit >> 20} MiB (ulimit {option}), and torch alone takes "
                f"{least >> 20}; raise the limit"
            )
    cache = cache_folder()
    for name, value in settings_for_torch(os.environ, card=has_card()).items():
        os.environ[name] = value
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


def settings_for_torch(given: Mapping[str, str], *, card: bool) -> dict[str, str]:
    """The variables to set before torch and trackers are used: those that the user has not `given`.

    card  whether the machine has a GPU
    """
    wanted = PROFILER | TRACKERS | (FOR_CARDS if card else {})
    if any(name in given for name in ALLOCATOR):
        wanted.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    return {name: value for name, value in wanted.items() if name not in given}


def this_machine(*, among: bool = False) -> Machine:
    """The facts of this machine that `resolve_run` needs. Raises UserError.

    among  whether this process is one of several ranks that a launcher has started
    """
    cache = ready_torch()
    from howdah.host.devices import find_cards

    cards = find_cards(visible_cards())
    if among:
        require_seat()
    return Machine(
        world=number_in("WORLD_SIZE") if among else None,
        local_world=number_in("LOCAL_WORLD_SIZE") if among else None,
        cores=usable_cores(),
        cuda=cards.usable,
        cache=cache,
        no_cuda=cards.lack,
    )


def require_seat() -> None:
    """Raises UserError where a launcher's numbers belong to no rank, or to no port."""
    rank, size = number_in("RANK", least=0), number_in("WORLD_SIZE")
    if rank >= size:
        raise UserError(f"RANK is {rank} and WORLD_SIZE {size}; a launcher counts ranks from 0")
    if os.environ.get("MASTER_PORT") == "0":
        raise UserError("MASTER_PORT is 0; ranks meet at a port that all of them know, from 1 on")


def visible_cards() -> str | None:
    """The value of CUDA_VISIBLE_DEVICES, which hides cards from torch; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def number_in(name: str, *, least: int = 1) -> int:
    """The number in the environment variable `name` of a launcher; `least` if it is not set.

    Raises UserError if it is not a whole number from `least` to MOST_RANKS.
    """
    word = os.environ.get(name, str(least))
    if not (word.isascii() and word.isdigit() and least <= int(word[:9]) <= MOST_RANKS):
        raise UserError(f"{name} is {word[:99]!r}, and a launcher gives a number from {least} on")
    return int(word)
