"""Traffic drawn as SVG: a lane for each operation of each axis, bytes to the right.

    tp  all_gather      |nvlink==================|   27.65 GB  49.4%
        reduce_scatter  |nvlink==========|           18.52 GB  33.1%
    dp  all_gather      |nvl|ib====|                  9.52 GB  17.0%
                        0        10        20 GB

A color is a class of links. Resting the pointer on a bar shows its exact bytes.
"""

from collections.abc import Iterator, Mapping

from howdah.base.quantities import spell
from howdah.draw.palette import (
    FAINT,
    GROUND,
    HUES,
    INK,
    LETTER,
    TOP,
    byte_axis,
    head,
    legend,
)
from howdah.draw.svg import document, element, hint, words
from howdah.draw.traffic import figures, in_order, share, sums
from howdah.plan.recording import Traffic

PLOT, RIGHT, LANE = 860, 160, 30  # pixels
APART = 10  # pixels between the lanes of two axes

Lanes = dict[tuple[str, str], float]  # (axis, operation) → top of its lane, in pixels


def draw_traffic_svg(traffic: Mapping[Traffic, int], *, title: str = "sent in a step") -> str:
    """The drawing as SVG; `traffic` is that of one rank, or the sum over several ranks."""
    rows = in_order(traffic)
    lanes, bottom = _lanes(rows)
    axes = 13 * LETTER * max((len(row.axis) for row in rows), default=0)
    left = 48 + axes + 13 * LETTER * max((len(row.operation) for row in rows), default=0)
    links = sorted({row.link for row in rows})
    colors = {link: HUES[turn % len(HUES)] for turn, link in enumerate(links)}
    return document(
        left + PLOT + RIGHT,
        bottom + (72 if rows else 0),
        *head(left, title, figures(traffic)),
        *_names(lanes, left, axes),
        *_bars(traffic, lanes, left, colors),
        *legend(left, bottom + 50, colors.items()),
    )


def _lanes(rows: list[Traffic]) -> tuple[Lanes, float]:
    """The tops of the lanes, and the bottom of the last one."""
    lanes: Lanes = {}
    top, before = float(TOP), rows[0].axis if rows else ""
    for axis, operation, _ in rows:
        if (axis, operation) not in lanes:
            top += APART * (axis != before)
            lanes[axis, operation] = top
            top, before = top + LANE, axis
    return lanes, top


def _names(lanes: Lanes, left: float, wide: float) -> Iterator[str]:
    """The background of each lane and its operation; an axis is named at its first lane."""
    named: set[str] = set()
    for (axis, operation), y in lanes.items():
        line = y + LANE / 2 + 4.5
        yield element("rect", x=left, y=y + 1, width=PLOT, height=LANE - 2, fill=GROUND)
        yield words(left - 10, line, operation, font_size=13, fill=INK, text_anchor="end")
        if axis not in named:
            yield words(24, line, axis, font_size=13, font_weight=600, fill=INK)
        named.add(axis)


def _bars(
    traffic: Mapping[Traffic, int], lanes: Lanes, left: float, colors: Mapping[str, str]
) -> Iterator[str]:
    """The grid; for each lane a bar with a piece for each link, and its bytes and percentage."""
    ends = sums((row[:2], count) for row, count in traffic.items())
    total, most = sum(traffic.values()), max(ends.values(), default=0)
    if not total:
        return
    bottom = max(lanes.values()) + LANE
    yield from byte_axis(left, TOP, bottom, scale=most / PLOT, most=most)
    x = dict.fromkeys(lanes, left)
    for row in in_order(traffic):
        lane, count = row[:2], traffic[row]
        width = count / most * PLOT
        yield element(
            "rect",
            hint(f"{row.axis} {row.operation} over {row.link}: {count:,} bytes"),
            x=x[lane],
            y=lanes[lane] + 4,
            width=max(width - 1, width * 0.8, 0.5),  # a gap to the next, and never 0
            height=LANE - 8,
            rx=min(2.5, width / 4),
            fill=colors[row.link],
        )
        x[lane] += width
    for lane, y in lanes.items():
        line, part = y + LANE / 2 + 4.5, share(ends[lane], total)
        sent = spell(ends[lane], "bytes")
        yield words(left + PLOT + 84, line, sent, font_size=13, fill=INK, text_anchor="end")
        yield words(left + PLOT + 140, line, part, font_size=13, fill=FAINT, text_anchor="end")
