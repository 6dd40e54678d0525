"""What is trained in the benchmark of forms, as plain data: a layout, at two sizes of model.

    tp2           both ranks take the same rows; x1
    pp2           two stages, eight micro-batches of a row; gpipe and 1f1b
    dp2 zero3     a replica on each rank; x1 and x4
    dp2 tp2       four ranks, a replica on each pair; x1
    cp2           both ranks take the same rows, and half of their tokens each; x1
    dp2 ep2       a replica on each rank, of a model with experts on both; x1

A replica takes `rows` rows of `sequence` tokens per step, whatever ranks it is made of.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from cases import LARGE, SMALL, TINY, Case

from howdah.plan.layout import Layout, parse_layout
from howdah.plan.mesh_axes import axis
from howdah.shapes.shape import Experts, ModelShape

LAYOUTS = (
    *(("tp2", 1), ("pp2", 8), ("dp2 zero3", 1), ("dp2 zero3", 4), ("dp2 tp2", 1)),
    *(("cp2", 1), ("dp2 ep2", 1)),
)
LONGER = 4  # times the tokens of the others: what is compared is attention


@dataclass(frozen=True)
class Form(Case):
    """One comparison: `layout` is what the contestants are laid out as, without its schedule."""

    layout: str = ""

    @property
    def name(self) -> str:
        return f"{self.layout} x{self.micros}, {self.model}"

    @property
    def tokens(self) -> int:
        return self.parsed.readers * self.rows * self.sequence

    @property
    def parsed(self) -> Layout:
        """The layout; with the default schedule, where there are stages."""
        return parse_layout(f"{self.layout} x{self.micros}")

    def replica(self, rank: int) -> int:
        return axis(self.parsed, "dp").index_of(rank)


def sized(layout: str, shape: ModelShape, sequence: int) -> tuple[ModelShape, int]:
    """The model and the tokens of a row for a layout."""
    if "cp" in layout:
        return replace(shape, context=LONGER * sequence), LONGER * sequence
    if "ep" in layout:
        return replace(shape, experts=Experts(8, 2, shape.ffn_size // 2)), sequence
    return shape, sequence


def forms(*, tiny: bool, repeats: int) -> Iterator[Form]:
    """Every layout at every size; few steps in a block where a step is long."""
    sizes = [("4.2M", SMALL, 128, 3), ("24.6M", LARGE, 256, 1)]
    if tiny:
        sizes = [("tiny", TINY, 16, 3)]
    for model, plain, sequence, steps in sizes:
        for layout, micros in LAYOUTS:
            shape, length = sized(layout, plain, sequence)
            yield Form(
                model,
                shape,
                "float32",
                length,
                ranks=parse_layout(layout).world,
                micros=micros,
                steps=steps,
                blocks=repeats,
                rows=max(4, micros),
                layout=layout,
            )
