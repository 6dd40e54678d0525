"""What is where in a job, and the bytes that this process sends in a step.

Bytes are those of the lists that also run: sums of gradients (`plan/sums.py`), gathers of weights,
means of module buffers, six scalars. They equal what `comm` counts. Under zero3 the order in which
a module uses its units is known when one step has run; before that, gathers are not in the sum.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from howdah.base.quantities import spell
from howdah.plan.flat_buffers import shares
from howdah.plan.recording import Traffic
from howdah.plan.sharding import shard_axes
from howdah.sim.traffic import SCALAR_BYTES, Sender, halves

if TYPE_CHECKING:
    from howdah.foreign.job import Job

SCALARS = 6  # of an update: `Job.update`


@dataclass(frozen=True)
class Outline:
    """What a job has decided; `str` prints it.

    units   elements of each unit, by name
    sent    bytes that this process sends in a step, by axis, operation and link
    whole   whether `sent` has everything
    """

    layout: str
    units: dict[str, int]
    sent: dict[Traffic, int]
    whole: bool

    def __str__(self) -> str:
        width = max(map(len, self.units))
        rows = [f"  {name:<{width}}  {count:>12,} weights" for name, count in self.units.items()]
        sent = spell(sum(self.sent.values()), "bytes")
        more = "" if self.whole else ", and gathers of weights, known after a step"
        return "\n".join([f"{self.layout}:", *rows, f"  each step sends {sent}{more}"])


def outline(job: "Job") -> Outline:
    """The outline of a job, for this process."""
    table, laid = job.laid.table, job.laid
    units: dict[str, int] = {}
    for buffer in table.every:
        elements = sum(segment.box.elements for segment in buffer.segments)
        unit = table.unit_of[buffer.unit]
        units[unit] = units.get(unit, 0) + elements
    gathers = laid.weights.gathers(job.kind(job.layout.micros or 1))
    whole = not laid.weights.shares or bool(gathers)
    return Outline(str(job.layout), units, step_bytes(job, gathers), whole)


def step_bytes(job: "Job", gathers: Counter[str]) -> dict[Traffic, int]:
    """Bytes that this process sends in a step.

    gathers  under zero3, how often each buffer comes
    """
    laid, rank, layout = job.laid, job.rank, job.layout
    sender = Sender(rank, laid.mesh.wires, Counter())
    everyone = range(layout.world)
    for row in laid.sums.sums:
        times = (layout.micros or 1) if row.every_micro else 1
        for elements in row.messages:
            sizes = shares(elements, len(row.ranks)) * laid.table.master_bytes * times
            halves(sender, row.axis, row.op, row.ranks, sizes)
    for name in laid.sharers:
        unit, inside = laid.units[name], shard_axes(layout, name)[0]
        times = gathers[name] if layout.zero == 3 else 1
        size = (unit.stop - unit.start) * unit.weights.element_size() * times
        operation = "broadcast" if layout.gather == "broadcast" else "all_gather"
        sender.send("dp", operation, inside.group(rank), size)
    means, broadcasts = laid.statistics.bytes_of_step()
    for width, elements in means.items():
        halves(sender, "dp", "all_reduce", everyone, shares(elements, layout.world) * width)
    if rank == 0:
        sender.send("dp", "broadcast", everyone, sum(broadcasts))
    sender.send("dp", "scalars", everyone, SCALARS * SCALAR_BYTES, by_hosts=True)
    return {traffic: count for traffic, count in sender.sent.items() if count}
