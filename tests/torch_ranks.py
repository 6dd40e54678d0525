"""Runs functions on ranks that have a process group of torch.distributed, of any backend."""

from datetime import timedelta

import torch
import torch.distributed as dist

import howdah.comm.backend
from howdah.comm.torch_backend.process_group import connected
from howdah.plan.comm import Hosts

SECONDS = 60
KEPT = []  # gloo's: a process aborts when a thread of gloo is the last to let its own group go


def ranks_of(workers, folder, backend="howdah", ranks=2, seconds=SECONDS):
    """Calls functions on `ranks` workers inside of a process group; their results by rank.

    backend  howdah; howdah_tcp, the same over TCP; gloo
    """
    used = iter(range(1000))

    def run(function, *arguments):
        path = folder / f"store{next(used)}-{backend}"
        place = str(path), backend, seconds
        return workers.run(_inside, place, function, arguments, ranks=ranks)

    return run


def _inside(transport, place, function, arguments):
    """One rank: its group is there while the function runs."""
    path, backend, seconds = place
    howdah.comm.backend.register()
    if backend == "howdah_tcp" and backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(backend, over_tcp, extended_api=True, devices=["cpu"])
    store = dist.FileStore(path, transport.size)
    dist.init_process_group(
        backend,
        store=store,
        rank=transport.rank,
        world_size=transport.size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        return function(transport.rank, *arguments)
    finally:
        if backend == "gloo":
            groups = dist.distributed_c10d._world.pg_map
            KEPT.extend(group._get_backend(torch.device("cpu")) for group in groups)
        dist.destroy_process_group()


def over_tcp(options, own):
    """A group that does not share memory, though its ranks could."""
    return connected(options, own or Hosts(trust="network"), "tcp")


def told(function, *arguments):
    """The name and the text of the error that a call raises; empty without one."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
