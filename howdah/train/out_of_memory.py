"""A rank whose device has no memory left: the run ends with one sentence about its plan.

torch tells how much one tensor wanted. What a user can change is the layout, so the sentence has
what the plan counts for this rank, what the device has, and what would take less on the same ranks
(`search/smaller.py`). The other ranks end as after any failure.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from howdah.base.errors import Unfinished, pasted
from howdah.base.quantities import spell
from howdah.host.measured import Capacity, capacity
from howdah.parallel.mesh import Mesh
from howdah.plan.plan import Plan
from howdah.search.smaller import Smaller, smaller
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory, peak
from howdah.train.job import Job

ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+ [KMGT]?i?B)")
LESS = 0.9  # of what was too much: workspaces of kernels and gaps are not in the plan
LARGEST = 3  # components that are named
FEW = 1 << 30  # bytes beside the run's own that are not worth a word


@contextmanager
def out_of_memory(job: Job, mesh: Mesh, ranks: int) -> Iterator[None]:
    """Turns the OutOfMemoryError of torch into Unfinished, with a sentence for the user.

    ranks  those of the run on this machine; they may share a card
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        there = capacity(mesh.device, ranks)
        told = sentence(job.plan, mesh.rank, there, said=str(error), folder=job.folder)
        raise Unfinished(told) from None


def sentence(plan: Plan, rank: int, there: Capacity, *, said: str, folder: Path) -> str:
    """What the plan counts for `rank`, what its device has, and the commands that take less.

    said    torch's message
    folder  the run folder
    """
    held = memory(plan, rank, kernels_of(plan))
    counted = peak([row for row in held if row.home == "device"])
    largest = sorted(held, key=lambda row: -row.bytes)[:LARGEST]
    parts = ", ".join(f"{row.component} {spell(row.bytes, 'bytes')}" for row in largest)
    return (
        f"rank {rank} ran out of memory on {_spell(there)}{_more(said)}; '{plan.layout}' with "
        f"micro-batches of {plan.micro_batch} counts {spell(counted, 'bytes')} for it ({parts}, "
        f"...); {_way_out(smaller(plan, LESS * min(counted, there.each or counted)), folder)}"
    )


def _spell(there: Capacity) -> str:
    if not there.total:  # the system does not say
        return there.name
    shared = f" for {there.ranks} ranks" if there.ranks > 1 else ""
    others = ""
    if there.ranks == 1 and there.others > FEW:
        others = f", of which other processes and the driver hold {spell(there.others, 'bytes')}"
    return f"{there.name} ({spell(there.total, 'bytes')}{shared}{others})"


def _more(said: str) -> str:
    asked = ASKED.search(said)
    return f" where a tensor wanted {asked[1]} more" if asked else ""


def _way_out(ways: list[Smaller], folder: Path) -> str:
    if not ways:
        return "nothing near it takes less: take more ranks, or a smaller model"
    told = " or ".join(
        f"layout='{way.layout}' batch.micro_batch={way.micro_batch} "
        f"(counts {spell(way.bytes, 'bytes')})"
        for way in ways
    )
    return f"go on with: howdah train {pasted(folder)} {told}"
