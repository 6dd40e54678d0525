"""What is trained in the benchmark of forms, as plain data: a layout, at two sizes of model.

    tp2           both ranks take the same rows; x1
    pp2           two stages, eight micro-batches of a row; gpipe and 1f1b
    dp2 zero3     a replica on each rank; x1 and x4
    dp2 tp2       four ranks, a replica on each pair; x1

A replica takes `rows` rows of `sequence` tokens per step, whatever ranks it is made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cases import LARGE, SMALL, TINY, Case

from howdah.plan.layout import Layout, parse_layout
from howdah.plan.mesh_axes import axis

LAYOUTS = (("tp2", 1), ("pp2", 8), ("dp2 zero3", 1), ("dp2 zero3", 4), ("dp2 tp2", 1))


@dataclass(frozen=True)
class Form(Case):
    """One comparison: `layout` is what the contestants are laid out as, without its schedule."""

    layout: str = ""

    @property
    def name(self) -> str:
        return f"{self.layout} x{self.micros}, {self.model}"

    @property
    def tokens(self) -> int:
        return self.parsed.replicas * self.rows * self.sequence

    @property
    def parsed(self) -> Layout:
        """The layout; with the default schedule, where there are stages."""
        return parse_layout(f"{self.layout} x{self.micros}")

    def replica(self, rank: int) -> int:
        return axis(self.parsed, "replicas").index_of(rank)


def forms(*, tiny: bool, repeats: int) -> Iterator[Form]:
    """Every layout at every size; few steps in a block where a step is long."""
    sizes = [("4.2M", SMALL, 128, 3), ("24.6M", LARGE, 256, 1)]
    if tiny:
        sizes = [("tiny", TINY, 16, 3)]
    for model, shape, sequence, steps in sizes:
        for layout, micros in LAYOUTS:
            yield Form(
                model,
                shape,
                "float32",
                sequence,
                ranks=parse_layout(layout).world,
                micros=micros,
                steps=steps,
                blocks=repeats,
                rows=max(4, micros),
                layout=layout,
            )
