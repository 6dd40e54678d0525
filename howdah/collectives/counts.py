"""Rounds and bytes of a program, exactly: what formulas of the literature are held to.

Sizes may be elements, bytes or fractions. With `even_sizes` all results are fractions of the
vector: the ring all-reduce sends 2(P-1)/P of it from each rank.
"""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

from howdah.collectives.program import Program, Step
from howdah.collectives.walk import walk

Size = TypeVar("Size", int, Fraction)


def even_sizes(chunks: int) -> list[Fraction]:
    """The sizes of `chunks` equal chunks of a vector of size 1."""
    return [Fraction(1, chunks)] * chunks


def rounds(program: Program) -> int:
    """Rounds from the first message to the last."""
    return walk(program).rounds


def sent(program: Program, sizes: Sequence[Size]) -> list[Size]:
    """The size of all that each rank sends."""
    bounds = _bounds(sizes)
    return [_sum(steps, bounds, ("send",)) for steps in program.steps]


def received(program: Program, sizes: Sequence[Size]) -> list[Size]:
    """The size of all that each rank receives."""
    bounds = _bounds(sizes)
    return [_sum(steps, bounds, ("receive", "add")) for steps in program.steps]


def leaving(
    program: Program, sizes: Sequence[Size], node_of: Callable[[int], int]
) -> dict[int, Size]:
    """The size of all that leaves each node: what its network cards send."""
    nodes: dict[int, list[Step]] = {node_of(rank): [] for rank in range(program.ranks)}
    for rank, steps in enumerate(program.steps):
        nodes[node_of(rank)] += [s for s in steps if node_of(s.peer) != node_of(rank)]
    bounds = _bounds(sizes)
    return {node: _sum(steps, bounds, ("send",)) for node, steps in nodes.items()}


def _bounds(sizes: Sequence[Size]) -> list[Size]:
    """The size of all chunks before each one, and of all."""
    bounds = [sizes[0] - sizes[0]]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return bounds


def _sum(steps: Iterable[Step], bounds: Sequence[Size], kinds: tuple[str, ...]) -> Size:
    moved = (span for step in steps if step.kind in kinds for span in step.spans)
    return sum((bounds[stop] - bounds[start] for start, stop in moved), bounds[0])
