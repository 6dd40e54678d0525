"""Whether all ranks have the same settings. Under torchrun each machine reads a recipe of its own;
with another seed or rate there a run would train, and nobody would hear of it.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any
from zlib import crc32

from howdah.base.errors import UserError, shown
from howdah.checkpoint.gather import exchange
from howdah.parallel.mesh import Mesh
from howdah.train.job import Job

OWN = {  # what may be elsewhere on another machine: its contents are compared, or rank 0's count
    *("data.sources", "data.validation", "data.tokenizer"),
    *("train.callbacks", "train.tracker", "method.loss"),
}


def require_same_settings(mesh: Mesh, job: Job) -> None:
    """Raises UserError unless the run is the same on all ranks; it names a setting and a rank."""
    mine, algorithm = settings_of(job), str(job.plan.comm.algorithm)
    numbers = [float(crc32(text.encode())) for text in (algorithm, json.dumps(mine))]
    totals = mesh.world.sum_scalars(numbers)  # added up as in `same_text.py`
    alike, same = (t == n * mesh.world.size for t, n in zip(totals, numbers, strict=True))
    if not alike:  # then nothing else can be sent
        raise UserError(
            f"the ranks have different algorithms, rank {mesh.rank} '{algorithm}'; give all of "
            "them the same comm.algorithm"
        )
    if same:
        return
    first, *others = [json.loads(said) for said in exchange(mesh.world, json.dumps(mine))]
    rank, other = next((r, one) for r, one in enumerate(others, 1) if one != first)
    key = next(key for key in first if first[key] != other.get(key))
    here, there = shown(first[key]), shown(other.get(key, "another table"))
    raise UserError(
        f"the ranks have different settings: {key} is {here} for rank 0 and {there} for rank "
        f"{rank}; give all machines the same recipe and keys"
    )


def settings_of(job: Job) -> dict[str, str]:
    """By key, what must be the same on all ranks."""
    tables = {"model": job.shape, "data": job.data, "batch": job.batch, "method": job.method}
    found = {"seed": str(job.seed), "layout": str(job.layout)}
    found["compile"] = str(job.compile)
    for name, table in {**tables, "train": job.train}.items():
        found |= dict(_flat(table, name))
    return found


def _flat(table: Any, path: str) -> Iterator[tuple[str, str]]:
    for one in fields(table):
        key, value = f"{path}.{one.name}", getattr(table, one.name)
        if key in OWN:
            continue
        if is_dataclass(value):
            yield from _flat(value, key)
        else:
            yield key, str(value)
