"""`layout = "auto"` on this machine: which cluster it stands for, and one choice for all ranks.

Of ranks that torchrun has started, rank 0 searches, and the launcher's store brings the others its
answer: facts of a machine, such as its free memory, may differ from rank to rank.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from howdah.base.errors import UserError, shown
from howdah.cli.environment import cluster_named, number_in, this_machine
from howdah.comm.settings import cache_folder
from howdah.config.auto import Settled, settle, settled_before
from howdah.config.recipe import Machine, Run, WrongRun, problems_of
from howdah.host.facts import bf16_instructions, free_memory, has_card, total_memory, usable_cores
from howdah.machines.cards import cluster_of_card
from howdah.machines.cluster import Cluster, resized
from howdah.machines.cluster_file import CLUSTERS, load_cluster, measured_file
from howdah.plan.plan import Plan
from howdah.search.capacity import Room, holds

FULL = "more memory or cores than this machine has free"
WITHOUT = 1 / 60  # bf16 on a core without instructions for it, beside float32: rough
STAND_IN = "speeds are those of laptop-cpu; howdah measure finds those of this machine"


def settled(run: Run, machine: Machine) -> Settled:
    """The run with its layout: that of its folder, or the one that is found. Raises WrongRun."""
    if before := settled_before(run, machine.world):
        return before
    batch = run.batch if run.batch.global_batch is not None else replace(run.batch, global_batch=1)
    comm = replace(run.comm, sparse=False)  # it depends on the layout, which is not known yet
    if problems := problems_of(replace(run, layout="dp1", batch=batch, comm=comm), None):
        raise WrongRun(problems, run)
    try:
        return _settled_now(run, machine)
    except UserError as problem:
        raise WrongRun([str(problem)], run) from None


def _settled_now(run: Run, machine: Machine) -> Settled:
    cluster, note = cluster_of(run, machine)
    on_cards = bool(cluster.device.cuda_names)

    def refuse(plan: Plan) -> str:
        ranks = machine.local_world or plan.layout.world
        if on_cards or run.cluster:
            return ""
        return "" if holds(plan, Room(free_memory(), machine.cores, ranks)) else FULL

    return settle(run, cluster, refuse=refuse, note=note)


def settled_by_all(run: Run, machine: Machine) -> tuple[Settled, Any]:
    """The settled run on every rank that torchrun has started, and the store, to be kept while
    others may read from it.
    """
    from howdah.comm.announce import announce

    def decide() -> str:
        found = settled(run, machine)
        batch = found.run.batch
        return json.dumps(
            [found.run.layout, batch.global_batch, batch.micro_batch, found.told, [*found.why]]
        )

    text, store = announce(decide, first=number_in("RANK", least=0) == 0)
    layout, size, micro, told, why = json.loads(text)
    batch = replace(run.batch, global_batch=size, micro_batch=micro)
    return Settled(replace(run, layout=layout, batch=batch, schedule=None), told, why), store


def machine_for(run: Run) -> Machine:
    """The facts of this machine that a layout is searched for. Loads torch only where there may be
    a card to ask for.
    """
    if not run.cluster and run.device != "cpu" and has_card():
        return this_machine()
    return Machine(None, None, usable_cores(), cuda=0, cache=Path())


def cluster_of(run: Run, machine: Machine) -> tuple[Cluster, str]:
    """The cluster that a layout is searched for, and a note on it. Raises UserError.

    The recipe names it; or it is this machine as `howdah measure` found it with as many ranks; or a
    shipped cluster with the same cards, or cores.
    """
    if run.cluster:
        return cluster_named(run.cluster, devices=machine.world), ""
    on_cards = run.device == "cuda" or (run.device == "auto" and machine.cuda > 0)
    devices = machine.world or (machine.cuda if on_cards else machine.cores)
    if machine.world not in (None, machine.local_world):
        raise UserError(
            "layout=auto on several machines needs to know the network between them; name the "
            "cluster in the recipe, such as cluster='h100x16', or a file of your own (howdah "
            "cluster new)"
        )
    if measured_file(cache_folder() / CLUSTERS, devices).is_file():
        here = cluster_named("here", devices=devices)
        measured = getattr(here.device.flops, run.method.precision, None)
        if bool(here.device.cuda_names) == on_cards and measured:
            return here, ""
    return _like_cards(devices) if on_cards else (like_cores(devices), STAND_IN)


def _like_cards(devices: int) -> tuple[Cluster, str]:
    """A shipped cluster with the cards of this machine."""
    import torch

    name = torch.cuda.get_device_name(0)
    cluster = cluster_of_card(name)
    if cluster is None:
        raise UserError(
            f"layout=auto does not know {shown(name)}; name a cluster in the recipe: "
            "cluster='FILE.toml' (howdah cluster new writes one)"
        )
    note = f"links are those of {cluster.name}; a file of howdah cluster new may say your own"
    if devices <= cluster.devices_per_node:
        return resized(cluster, devices), note
    return replace(cluster, devices_per_node=devices, nodes=1), note


def like_cores(cores: int) -> Cluster:
    """A machine like this one, without a card and with so many cores: a rank for each, which share
    its memory.
    """
    laptop = load_cluster("laptop-cpu")
    total = total_memory()
    size = total / cores if total else laptop.device.memory
    flops, measured = laptop.device.flops, dict(laptop.measured)
    if bf16_instructions() == []:
        assert flops.float32 is not None
        flops = replace(flops, bf16=WITHOUT * flops.float32)
        measured["device.flops.bf16"] = WITHOUT * measured["device.flops.float32"]
    device = replace(laptop.device, memory=max(size, 2 * laptop.device.reserved), flops=flops)
    return replace(
        laptop,
        name="this machine",
        device=device,
        devices_per_node=cores,
        nodes=1,
        measured=tuple(measured.items()),
    )
