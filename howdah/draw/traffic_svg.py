"""Traffic drawn as SVG: a lane for each operation of each axis, bytes to the right.

    tp  all_gather      |nvlink==================|   27.65 GB  49.4%
        reduce_scatter  |nvlink==========|           18.52 GB  33.1%
    dp  all_gather      |nvl|ib====|                  9.52 GB  17.0%
                        0       10 GB      20 GB

A color is a class of links.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby

from howdah.base.quantities import spell
from howdah.draw.lanes import Box, Chart, Drawing, Lane, Note, draw_lanes
from howdah.draw.palette import FAINT, HUES
from howdah.draw.traffic import figures, in_order, share
from howdah.plan.recording import Traffic

PLOT, RIGHT, LANE = 860, 160, 30  # pixels: the axis, to the right of it, from lane to lane


def draw_traffic_svg(traffic: Mapping[Traffic, int], *, title: str = "sent in a step") -> str:
    """The drawing as SVG; `traffic` is that of one rank, or the sum over several ranks."""
    rows = in_order(traffic)
    links = sorted({row.link for row in rows})
    colors = {link: HUES[turn % len(HUES)] for turn, link in enumerate(links)}
    lanes = list(_lanes(rows, traffic, colors))
    most = max((lane.boxes[-1].stop for lane in lanes), default=0)
    drawing = Drawing(
        title,
        figures(traffic),
        [Chart(lanes, most, "bytes", pitch=LANE)] if lanes else [],
        [(link, [color]) for link, color in colors.items()],
    )
    return draw_lanes(drawing, width=PLOT, right=RIGHT)


def _lanes(
    rows: Sequence[Traffic], traffic: Mapping[Traffic, int], colors: Mapping[str, str]
) -> Iterator[Lane]:
    """A lane for each operation, with its bytes and percentage; each axis is a group of lanes."""
    total, before = sum(traffic.values()), ""
    for (axis, operation), each in groupby(rows, key=lambda row: row[:2]):
        links = list(each)
        counts = [traffic[row] for row in links]
        boxes = []
        for row, count, stop in zip(links, counts, accumulate(counts), strict=True):
            told = f"{axis} {operation} over {row.link}: {count:,} bytes"
            boxes.append(Box(stop - count, stop, colors[row.link], told))
        sent = sum(counts)
        notes = [Note(84, spell(sent, "bytes")), Note(140, share(sent, total), FAINT)]
        yield Lane(operation, boxes, notes=notes, group="" if axis == before else axis)
        before = axis
