"""Registers howdah with torch.distributed, so that other people's programs use it by one line:

    import howdah.comm.backend
    dist.init_process_group("howdah")

Ranks of one machine then meet in shared memory, and those of several over TCP; which of the two is
found by the ranks themselves. The group that torch then has is in `torch_backend/process_group.py`.
What one needs for connections between machines goes by `pg_options=Hosts(…)` of
`howdah.plan.comm`.
"""

import platform
import sys
from typing import Any

import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.plan.comm import Hosts

NAME = "howdah"
DEVICES = ("cpu", "cuda")
CREATOR = "_new_process_group_helper"  # of torch, which knows what the user wrote


def require_linux(system: str) -> None:
    """Raises UserError for any other system, by the word of `platform.system()`."""
    if system != "Linux":
        known = {"Darwin": "macOS"}.get(system, system)
        raise UserError(
            f'init_process_group("{NAME}") needs Linux, whose shared memory it uses, and this is '
            f'{known}: take "gloo"'
        )


def require_alone(backend: str) -> None:
    """Raises UserError if the backend is asked for beside another one, as in cpu:howdah,cuda:nccl:
    torch would make the group of one of them stand for both.
    """
    said = [part.partition(":") for part in str(backend).lower().split(",")]
    if any(name and name != NAME for _, _, name in said):
        raise UserError(
            f'"{backend}" asks for {NAME} beside another backend: write "{NAME}" alone, which '
            "moves tensors of the CPU itself and gives those of GPUs to NCCL"
        )


def create(options: Any, own: Any) -> dist.ProcessGroup:
    """The process group that torch asks for. Raises UserError.

    options  DistributedBackendOptions of torch
    own      pg_options of the user: `Hosts`, or None
    """
    require_linux(platform.system())
    require_alone(_asked_for())
    if not isinstance(own, Hosts | None):
        raise UserError(
            f"pg_options of {NAME} is a Hosts of howdah.plan.comm, not {type(own).__name__}"
        )
    from howdah.comm.torch_backend.process_group import connected  # needs Linux

    return connected(options, own)


def _asked_for() -> str:
    """The backend as the user wrote it, which torch does not pass on."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_code.co_name != CREATOR:
        frame = frame.f_back
    return str(frame.f_locals.get("backend", NAME))


def register() -> None:
    """Makes `howdah` known to torch.distributed. A second time does nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=[*DEVICES])


register()
