"""The mesh drawn as text: ranks by stage and node, and the groups of ranks along each axis.

    pp2 dp4 tp2 1f1b x8: 16 ranks on 2 nodes of 8

    stage 0  embedding, layers.0 to 15
      node 0   0  1 |  2  3 |  4  5 |  6  7
    stage 1  layers.16 to 31, head
      node 1   8  9 | 10 11 | 12 13 | 14 15

    tp  parts of each matrix  8 groups of 2  inside a node  0 1 | 2 3 | …
    dp  replicas              4 groups of 4  inside a node  0 2 4 6 | 1 3 5 7 | …
    pp  stages                8 groups of 2  over 2 nodes   0 8 | 1 9 | …

Between ranks, `|` marks the start of the next replica and `:` that of the next cp rank's part of
the sequence. Neighbours with nothing between them are tp ranks, which hold slices of the same
matrices. For a large world, only the first and the last ranks are shown.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple, TypeVar

import numpy as np

from howdah.draw.columns import columns
from howdah.machines.network import axis_groups
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Axis, Stride, axis
from howdah.plan.plan import Plan
from howdah.plan.stages import stages_of
from howdah.shapes.part import Part

# The axes, which are shown if they have more than one rank, and the meaning of their groups.
MEANING: dict[Axis, str] = {
    "tp": "parts of each matrix",
    "cp": "parts of each sequence",
    "dp": "replicas",
    "pp": "stages",
    "ep": "experts",
    "shard": "one copy of the states",
    "hpz": "a second copy of the weights",
}
SMALL = 64  # most ranks of a world that is shown in full
STAGES, NODES, RANKS = 3, 3, 12  # shown of a larger one: stages; nodes or ranks of a stage
LINE = 16  # ranks on a line of text

T = TypeVar("T")


class Node(NamedTuple):
    """A node, and those of its ranks that are on one pipeline rank."""

    number: int
    ranks: range


class Band(NamedTuple):
    """One pipeline rank in the drawing.

    name    the label of its stages
    parts   the parts of the model on them
    nodes   the nodes that are shown; None for those left out
    hidden  number of nodes left out
    """

    name: str
    parts: str
    nodes: list[Node | None]
    hidden: int


# -- for both drawings -----------------------------------------------------------


def bands(plan: Plan, per_node: int) -> list[Band | None]:
    """The pipeline ranks in order, with one None in place of those left out, if any."""
    pp = axis(plan.layout, "pp")
    small, labels = plan.layout.world <= SMALL, stage_labels(plan)
    found: list[Band | None] = []
    for pp_index in some(range(pp.size), pp.size if small else STAGES):
        if pp_index is None:
            found.append(None)
            continue
        ranks = range(pp_index * pp.stride, (pp_index + 1) * pp.stride)
        nodes = range(ranks.start // per_node, (ranks.stop - 1) // per_node + 1)
        numbers = some(nodes, len(nodes) if small else max(NODES, RANKS // per_node))
        shown = [n if n is None else _node(n, ranks, per_node) for n in numbers]
        hidden = len(nodes) + 1 - len(shown)
        found.append(Band(labels[pp_index], _parts(plan, pp_index), shown, hidden))
    return found


def _node(number: int, ranks: range, per_node: int) -> Node:
    """Node `number` with those of `ranks` that are on it; other stages may share the node."""
    first = number * per_node
    return Node(number, range(max(ranks.start, first), min(ranks.stop, first + per_node)))


def some(items: Sequence[T], most: int) -> list[T | None]:
    """All of `items` if they are at most `most`; else the first `most` - 1, None, and the last."""
    return list(items) if len(items) <= most else [*items[: most - 1], None, items[-1]]


def stage_labels(plan: Plan) -> list[str]:
    """For each pipeline rank, the stages that it runs: `stage 1`, `stages 1 5`."""
    each = [stages_of(plan.stages.where, pp_index) for pp_index in range(plan.layout.pp)]
    return [f"stage{'s' * (len(mine) > 1)} {listed(mine)}" for mine in each]


def listed(numbers: Sequence[int]) -> str:
    """The numbers as text; of more than four, the first three and the last: 0 8 16 … 1016."""
    return " ".join("…" if number is None else str(number) for number in some(numbers, 4))


def _parts(plan: Plan, pp_index: int) -> str:
    """The parts of the model on a pipeline rank: embedding, layers.0 to 3; layers.8 to 11"""
    mine = stages_of(plan.stages.where, pp_index)
    return "; ".join(", ".join(_runs(plan.stages.parts[stage])) for stage in mine)


def _runs(parts: Sequence[Part]) -> Iterator[str]:
    """The layers of each stack as one range, other parts by their names."""
    for _, group in groupby(parts, key=lambda part: part.stack):
        first, *rest = group
        yield f"{first} to {rest[-1].layer}" if rest else first


def axes(layout: Layout) -> dict[Axis, Stride]:
    """The axes that are drawn, with their groups."""
    found = {name: axis(layout, name) for name in MEANING}
    split = {"shard": layout.zero and layout.shard, "hpz": layout.hpz}
    return {
        name: stride for name, stride in found.items() if stride.size > 1 and split.get(name, True)
    }


def title(plan: Plan, per_node: int) -> str:
    """The title of the drawing: layout, ranks and nodes."""
    world = plan.layout.world
    nodes = -(-world // per_node)
    ranks = f"{plan.layout}: {world} rank{'s' * (world > 1)}"
    return f"{ranks} on {f'{nodes} nodes' if nodes > 1 else 'a node'} of {per_node}"


def groups(stride: Stride, world: int) -> Iterator[range]:
    """The ranks of each group of an axis."""
    return (stride.group(rank) for rank in range(world) if stride.index_of(rank) == 0)


def how_many(stride: Stride, world: int) -> str:
    """Number and size of the groups of an axis: 8 groups of 2"""
    count = world // stride.size
    return f"{count} group{'s' * (count > 1)} of {stride.size}"


def reach(stride: Stride, world: int, per_node: int) -> str:
    """The largest number of nodes that a group of an axis spans, in words."""
    on = axis_groups(world, size=stride.size, stride=stride.stride) // per_node
    nodes = 1 + int((np.diff(on, axis=1) > 0).sum(axis=1).max())
    return f"over {nodes} nodes" if nodes > 1 else "inside a node"


# -- as text ---------------------------------------------------------------------


def draw_mesh(plan: Plan, per_node: int) -> str:
    """The drawing as text, for nodes of `per_node` devices that ranks fill in order."""
    blocks = [title(plan, per_node), "\n".join(_stages(plan, per_node))]
    table = "\n".join(_groups(plan.layout, per_node))
    return "\n\n".join([*blocks, table] if table else blocks)


def _stages(plan: Plan, per_node: int) -> Iterator[str]:
    layout = plan.layout
    last = layout.world - 1
    margin, width = len(f"  node {last // per_node}  "), len(str(last))
    for band in bands(plan, per_node):
        if band is None:
            yield f"… {layout.pp - STAGES} stages more"
            continue
        yield f"{band.name}  {band.parts}"
        for node in band.nodes:
            if node is None:
                yield f"  … {band.hidden} nodes more"
                continue
            for start in range(0, len(node.ranks), LINE):
                name = "" if start else f"  node {node.number}"
                yield f"{name:{margin}}{_ranks(node.ranks[start : start + LINE], layout, width)}"
    if layout.server:
        yield f"servers  a range of every part: {listed(range(layout.workers, layout.world))}"


def _ranks(ranks: range, layout: Layout, width: int) -> str:
    line = f"{ranks[0]:{width}}"
    for rank in ranks[1:]:
        replica, sequence = rank % (layout.cp * layout.tp) == 0, rank % layout.tp == 0
        between = " | " if replica else " : " if sequence else " "
        line += f"{between}{rank:{width}}"
    return line


def _groups(layout: Layout, per_node: int) -> list[str]:
    """A line for each axis: its meaning, its groups, the nodes they span, the first two groups."""
    world = layout.workers
    rows = []
    for name, stride in axes(layout).items():
        first = [listed(group) for group in islice(groups(stride, world), 2)]
        members = " | ".join([*first, "…"] if world > 2 * stride.size else first)
        numbers = (how_many(stride, world), reach(stride, world, per_node))
        rows.append((name, MEANING[name], *numbers, members))
    return columns(rows, "<<<<<")
