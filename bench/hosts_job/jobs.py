"""What is trained between hosts, as plain data: a layout on a network.

    dp4, zero1, zero2, zero3     a rank on each of four hosts
    dp4 tp2                      two ranks on each of them: tp inside a host, dp between hosts

A replica takes the rows that it takes in ../data_parallel, in one micro-batch, and the model is the
small one of there: its step sends for a fifth of a second on cards of 1 Gbit/s, and for two seconds
on cards of 100 Mbit/s.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cases import SMALL, TINY, method
from clusters import rate
from layouts import Form
from profiles import profile_named

from howdah.plan.batch import Batch
from howdah.plan.layout import parse_layout
from howdah.plan.plan import Plan, make_plan
from howdah.plan.recording import Wires
from howdah.sim.traffic import step_traffic

LAYOUTS = ("dp4", "dp4 zero1", "dp4 zero2", "dp4 zero3", "dp4 tp2")
STEPS = {"flat-1g": 3, "edge-100m": 1}  # of a block
BLOCKS = 5


@dataclass(frozen=True)
class Job(Form):
    """One comparison.

    profile  of the network
    each     ranks on a host
    """

    profile: str = ""
    each: int = 1

    @property
    def name(self) -> str:
        return f"{self.layout}, {self.profile}"

    @property
    def hosts(self) -> int:
        return self.ranks // self.each

    @property
    def plan(self) -> Plan:
        """howdah's."""
        batch = Batch(self.parsed.readers * self.rows, self.rows // self.micros)
        return make_plan(
            self.shape, self.parsed, batch, sequence=self.sequence, method=method(self)
        )

    @property
    def leaves(self) -> int:
        """Bytes that must leave the busiest card in a step."""
        return leaving(self.plan, self.each)

    @property
    def link(self) -> float:
        """Seconds in which that card can send them."""
        return self.leaves / rate(profile_named(self.profile, self.hosts).card)


def leaving(plan: Plan, each: int) -> int:
    """The most bytes that a host of `each` ranks sends to others in a step. In these layouts no two
    ranks of a host send the same, so nobody has less to send.
    """
    wires, world = Wires("inside", "between", each), plan.layout.world
    counts = [
        sum(
            count
            for rank in range(first, first + each)
            for row, count in step_traffic(plan, rank, wires).items()
            if row.link == "between"
        )
        for first in range(0, world, each)
    ]
    return max(counts)


def jobs(*, tiny: bool) -> Iterator[Job]:
    """Every layout on both networks; tiny: two layouts, and a network that takes no time."""
    model, shape, sequence, blocks = ("4.2M", SMALL, 128, BLOCKS)
    steps, layouts = STEPS, LAYOUTS
    if tiny:
        model, shape, sequence, blocks = ("tiny", TINY, 16, 2)
        steps, layouts = {"flat-10g": 2}, ("dp4 zero3", "dp4 tp2")
    for profile, count in steps.items():
        for layout in layouts:
            yield Job(
                model,
                shape,
                "float32",
                sequence,
                ranks=parse_layout(layout).world,
                micros=1,
                steps=count,
                blocks=blocks,
                layout=layout,
                profile=profile,
                each=2 if "tp" in layout else 1,
            )
