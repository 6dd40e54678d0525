"""The mesh drawn as SVG: ranks in their nodes by stage, and a small copy for each axis.

    stage 0: embedding, layers.0 to 15          tp                  dp
    +-node 0------------------+                 +-------------+     +-------------+
    | [0][1] [2][3] [4][5]    |                 | aa bb cc    |     | ab ab ab    |
    +-------------------------+                 +-------------+     +-------------+

In the small copies, the ranks of one color are a group of the axis: they communicate with each
other. If there are more groups than colors, the colors repeat, first lighter and then darker; the
remaining groups are grey. Resting the pointer on a rank shows all its groups.
"""

from collections.abc import Callable, Iterator
from textwrap import shorten
from typing import NamedTuple

from howdah.draw.mesh import (
    MEANING,
    STAGES,
    Band,
    Node,
    axes,
    bands,
    how_many,
    listed,
    reach,
    title,
)
from howdah.draw.palette import BLUE, FAINT, GRID, GROUND, HUES, INK, LETTER, TOP, head
from howdah.draw.svg import blend, document, element, hint, text_at, words
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Stride
from howdah.plan.plan import Plan

LEFT, WIDTH, LEAST = 40, 1180, 720  # pixels: the margin, the largest and the smallest width
COLUMNS, ACROSS = 8, 32  # most ranks on a line of a node, and of a stage
BETWEEN = 36  # pixels from one small copy to the next
SHADES = (("#ffffff", 0.0), ("#ffffff", 0.5), ("#000000", 0.35))  # mixed into the hues, by round


class Size(NamedTuple):
    """Sizes in pixels.

    wide, high  one rank
    gap         between replicas
    pad         around a node
    text        height of letters; 0 for no text
    """

    wide: float
    high: float
    gap: float
    pad: float
    text: float


LARGE, SMALL = Size(32, 24, 5, 7, 12), Size(13, 13, 3, 4, 0)


class Spot(NamedTuple):
    """A node or a line of text, with its position and size in a copy of the mesh."""

    x: float
    y: float
    wide: float
    high: float
    what: Node | str


class Copy(NamedTuple):
    """The mesh at one size; ranks of one tp group have no gap between them.

    shown   the pipeline ranks, from `bands`
    stages  number of pipeline ranks
    tp      size of a tp group
    """

    shown: list[Band | None]
    stages: int
    tp: int
    size: Size

    def spots(self) -> Iterator[Spot]:
        """The nodes and texts: nodes from left to right, stages one below the other."""
        size, y = self.size, 0.0
        line = 1.6 * size.text
        for band in self.shown:
            if band is None:
                more = f"… {self.stages - STAGES} stages more" if line else "…"
                yield self._words(0, y, more)
                y += max(line, size.high) + size.pad
                continue
            if line:
                name = shorten(f"{band.name}: {band.parts}", 150, placeholder=" …")
                yield self._words(0, y, name)
            x, y, below = 0.0, y + line, 0.0
            most = max(len(node.ranks) for node in band.nodes if node)
            for turn, node in enumerate(band.nodes):
                if turn and turn % max(1, ACROSS // min(most, COLUMNS)) == 0:
                    x, y = 0.0, below
                more = f"… {band.hidden} nodes more" if line else "…"
                spot = self._node(x, y, node) if node else self._words(x, y + 6, more)
                yield spot
                x += spot.wide + size.pad
                below = max(below, y + spot.high + size.pad)
            y = below + size.pad

    def _words(self, x: float, y: float, text: str) -> Spot:
        letters = self.size.text or self.size.high
        return Spot(x, y, len(text) * letters * LETTER, 1.6 * letters, text)

    def _node(self, x: float, y: float, node: Node) -> Spot:
        size, places = self.size, [self.place(node, rank) for rank in node.ranks]
        name = 10 * LETTER * len(f"node {node.number}") if size.text else 0.0
        wide = max(name + size.pad, max(across for across, _ in places) + size.wide) + size.pad
        return Spot(x, y, wide, max(down for _, down in places) + size.high + size.pad, node)

    def place(self, node: Node, rank: int) -> tuple[float, float]:
        """The position of a rank in its node: (x, y) in pixels."""
        size, turn = self.size, rank - node.ranks.start
        first = rank - turn % COLUMNS
        gaps = rank // self.tp - first // self.tp
        x = size.pad + turn % COLUMNS * size.wide + gaps * size.gap
        return x, size.pad + 1.2 * size.text + turn // COLUMNS * (size.high + 2)


def draw_mesh_svg(plan: Plan, per_node: int) -> str:
    """The drawing as SVG, for nodes of `per_node` devices that ranks fill in order."""
    layout, shown = plan.layout, bands(plan, per_node)
    sizes = (LARGE._replace(wide=max(LARGE.wide, 8.0 * len(str(layout.world)))), SMALL)
    large, small = (Copy(shown, layout.pp, layout.tp, size) for size in sizes)
    wide, high = _extent(large)
    across, down = _extent(small)
    ranks = [rank for band in shown if band for node in band.nodes if node for rank in node.ranks]
    x, y, right = float(LEFT), TOP + high + 40, LEFT + wide
    drawn = [*_draw(large, LEFT, TOP, layout, lambda rank: blend(BLUE, "#ffffff", 0.55))]
    for name, stride in axes(layout).items():
        label = f"{name}: {MEANING[name]}"
        note = f"{how_many(stride, layout.workers)}, {reach(stride, layout.workers, per_node)}"
        step = max(across, 7.6 * len(label), 6.6 * len(note)) + BETWEEN
        if x + step > LEFT + max(WIDTH, wide):
            x, y = float(LEFT), y + down + 70
        drawn.append(words(x, y, label, font_size=13, font_weight=600, fill=INK))
        drawn.append(words(x, y + 18, note, font_size=12, fill=FAINT))
        drawn += _draw(small, x, y + 30, layout, _painter(stride, ranks))
        x, right = x + step, max(right, x + step - BETWEEN)
    below = y + down + 30 if axes(layout) else TOP + high
    figures = "in the small copies, ranks of one color talk to each other along the axis"
    return document(
        max(LEAST, right + LEFT),
        below + 24,
        *head(LEFT, title(plan, per_node), figures if axes(layout) else "one rank talks to no one"),
        *drawn,
    )


def _extent(copy: Copy) -> tuple[float, float]:
    """Width and height of a copy in pixels."""
    spots = list(copy.spots())
    return max(spot.x + spot.wide for spot in spots), max(spot.y + spot.high for spot in spots)


def _painter(stride: Stride, shown: list[int]) -> Callable[[int], str]:
    """The function from a rank to the color of its group.

    Groups get one hue after the other, in the order of the ranks `shown`.
    """
    number: dict[range, int] = {}
    for rank in shown:
        number.setdefault(stride.group(rank), len(number))

    def paint(rank: int) -> str:
        turn, hue = divmod(number[stride.group(rank)], len(HUES))
        return blend(HUES[hue], *SHADES[turn]) if turn < len(SHADES) else GRID

    return paint


def _draw(
    copy: Copy, x: float, y: float, layout: Layout, paint: Callable[[int], str]
) -> Iterator[str]:
    """The elements of one copy of the mesh; its upper left corner is at x, y."""
    for spot in copy.spots():
        left, top = x + spot.x, y + spot.y
        if isinstance(spot.what, str):
            letters = copy.size.text or copy.size.high
            yield words(left, top + letters, spot.what, font_size=letters, fill=INK)
            continue
        box = {"x": left, "y": top, "width": spot.wide, "height": spot.high, "rx": 3}
        yield element("rect", fill=GROUND, stroke=GRID, **box)
        if copy.size.text:
            corner, line = left + copy.size.pad, top + copy.size.pad + 6
            yield words(corner, line, f"node {spot.what.number}", font_size=10, fill=FAINT)
        for rank in spot.what.ranks:
            across, down = copy.place(spot.what, rank)
            at = left + across, top + down
            yield from _rank(rank, at, copy.size, layout, fill=paint(rank))


def _rank(
    rank: int, at: tuple[float, float], size: Size, layout: Layout, *, fill: str
) -> Iterator[str]:
    x, y = at
    told = [f"{name} {listed(stride.group(rank))}" for name, stride in axes(layout).items()]
    note, wide = hint(f"rank {rank}: {'; '.join(told)}"), size.wide - 1
    yield element("rect", note, x=x, y=y, width=wide, height=size.high, rx=2, fill=fill)
    if size.text:
        letters = min(12.0, (size.wide - 4) / (LETTER * len(str(rank))))
        middle = x + wide / 2, y + size.high / 2
        yield text_at(*middle, str(rank), size=letters, fill=INK, text_anchor="middle")
