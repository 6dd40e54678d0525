"""What is measured between hosts, and what it is judged by: plain data.

A cell is one operation of one size on hosts of one profile, with all its contestants: every
algorithm that can run there, howdah's direct way (`default`), and gloo's own collectives. Sizes are
bytes of the whole vector; of an all-to-all, of what one rank has for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from howdah.sim.selector import SIZED, Shape, candidates

KIB, MIB = 1 << 10, 1 << 20
GLOO, DEFAULT = "gloo", "default"
OPS = (*SIZED, "all_to_all")
PIECES = (1, 2, 4, 8, 16, 32, 64, 128)  # of the pipelined ring
BLOCKS = 5
LINK_BOUND, LONG_ENOUGH = 0.9, 0.05  # of a price, and seconds: the bucket of a wire is 2 ms
NEAR, NEAR_MEDIAN = 0.25, 0.10  # measurement over price, minus 1
GOOD, SHARE = 1.10, 0.95  # of the best measured, and of cells
ROUND = 105  # cells in which the selector has been to each place


@dataclass(frozen=True)
class Cell:
    """One operation of one size; `texts` are those of its contestants."""

    profile: str
    shape: Shape
    op: str
    bytes: int
    texts: tuple[str, ...]
    grid: str = "link"

    @property
    def key(self) -> str:
        return f"{self.grid} {self.profile} {self.shape} {self.op} {self.bytes}"


def contestants(op: str, shape: Shape, *, grid: bool = False) -> tuple[str, ...]:
    """All of an operation; with `grid`, those for networks that are grids too."""
    return (*(text for text, _ in candidates(op, shape, grid=grid)), GLOO)


def link_cells() -> Iterator[Cell]:
    """Every algorithm beside its price and gloo; at 100 Mbit/s long vectors by a few."""
    for profile, sizes in {
        "flat-1g": (KIB, 64 * KIB, MIB, 16 * MIB),
        "edge-100m": (KIB, 64 * KIB, MIB),
    }.items():
        for shape in (Shape(4, 1), Shape(2, 2)):
            for op in OPS:
                for size in sizes:
                    yield Cell(profile, shape, op, size, contestants(op, shape, grid=True))
    for shape in (Shape(4, 1), Shape(2, 2)):
        texts = ("ring", "halving_doubling", GLOO)
        yield Cell("edge-100m", shape, "all_reduce", 16 * MIB, texts)


def sweep_cells() -> Iterator[Cell]:
    """The broadcast along a ring in K pieces."""
    texts = ("ring", *(f"ring_in_pieces pieces={k}" for k in PIECES[1:]))
    for profile, size in (("flat-1g", 16 * MIB), ("edge-100m", 2 * MIB)):
        yield Cell(profile, Shape(4, 1), "broadcast", size, texts, "sweep")


def selector_cells() -> Iterator[Cell]:
    """7 operations, 1 KiB to 64 MiB by fours, 2 to 8 ranks, three profiles. They take hours, so any
    first part of them is a fair sample: nine rounds of a visit to each place, of which the next has
    the next profile and the next shape, and where each operation has its turn with another size.

        round 0    1st place    op 0 with size 0, op 1 with size 1, ...
                   2nd place    op 0 with size 1, op 1 with size 2, ...
        round 1    1st place    op 0 with size 1, op 1 with size 2, ...
    """
    shapes = (Shape(2, 1), Shape(3, 1), Shape(2, 2), Shape(3, 2), Shape(4, 2))
    profiles = ("flat-1g", "spine-leaf", "slow-card")  # as 3 and 5 have no factor in common
    places = [(profiles[k % 3], shapes[k % 5]) for k in range(15)]  # each is there once
    sizes = [KIB << k for k in range(0, 17, 2)]
    for turn in range(len(sizes)):
        for number, (profile, shape) in enumerate(places):
            for at, op in enumerate(SIZED):
                size = sizes[(at + number + turn) % len(sizes)]
                texts = contestants(op, shape)[:-1]
                yield Cell(profile, shape, op, size, texts, "selector")


def tiny_cells() -> Iterator[Cell]:
    """To see that it works."""
    for shape in (Shape(2, 1), Shape(2, 2)):
        yield Cell("flat-10g", shape, "all_reduce", 64 * KIB, contestants("all_reduce", shape))
    yield Cell(
        "flat-10g", Shape(2, 1), "broadcast", MIB, ("ring", "ring_in_pieces pieces=4"), "sweep"
    )


GRIDS = {"link": link_cells, "sweep": sweep_cells, "selector": selector_cells, "tiny": tiny_cells}


def formula(hosts: int, pieces: int, size: int, rate: float) -> float:
    """Seconds of a broadcast along a ring of `hosts` in K pieces: (N-2+K)·S/(K·B)."""
    return (hosts - 2 + pieces) * size / (pieces * rate)
