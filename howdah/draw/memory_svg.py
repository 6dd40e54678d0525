"""Memory drawn as SVG: a lane for each pipeline stage, cut by component, bytes to the right.

                                                  80 GB   passes, GB  update
    device  stage 0 |weights|gradients|moments|activations|     75.1    40.2   4.9 GB free
                    ===========================           |
                    0         20 GB      40 GB      60 GB

The bar shows the passes, the strip below it the update, when no activations are held. Homes are
drawn one below the other.
"""

from collections.abc import Iterator
from itertools import accumulate

from howdah.base.quantities import spell
from howdah.draw.lanes import Box, Chart, Drawing, Lane, Note, draw_lanes
from howdah.draw.memory import Panel, Stages, panels
from howdah.draw.palette import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED
from howdah.draw.svg import blend
from howdah.sim.memory import BOTH, Moment

# Related components have shades of one color.
COLORS = {
    "weights": BLUE,
    "masters": blend(BLUE, "#ffffff", 0.45),
    "gathered": blend(BLUE, "#000000", 0.25),
    "copies": blend(BLUE, "#000000", 0.5),
    "gradients": ORANGE,
    "reduced": blend(ORANGE, "#ffffff", 0.45),
    "moments": blend(PURPLE, "#ffffff", 0.3),
    "activations": GREEN,
    "recomputed": blend(GREEN, "#ffffff", 0.5),
    "staged": blend(PURPLE, "#000000", 0.25),
    "programs": blend(ORANGE, "#000000", 0.35),
}
PLOT, RIGHT = 860, 290  # pixels of the axis, and to the right of it
ENDS, ROOM = {"passes": 92, "update": 150}, 166  # pixels from the axis to the notes


def draw_memory_svg(
    stages: Stages, capacity: float | None = None, *, title: str = "memory of a step"
) -> str:
    """The drawing as SVG; `capacity` is a device's memory in bytes."""
    found = panels(stages, capacity)
    used = {name for panel in found for name in panel.components}
    drawing = Drawing(
        title,
        _figures(found[0]),
        [_chart(panel) for panel in found],
        [(name, [color]) for name, color in COLORS.items() if name in used],
        "bars: the passes; strips: the update",
    )
    return draw_lanes(drawing, width=PLOT, right=RIGHT)


def _figures(device: Panel) -> str:
    """The summary below the title: the largest need of a stage, and which stage it is."""
    worst = max(device.stages, key=device.need)
    room = device.room(worst)
    return f"at most {spell(device.need(worst), 'bytes')}, on {worst}{room and f': {room}'}"


def _chart(panel: Panel) -> Chart:
    """The lanes of one home; its capacity is the mark."""
    first, *rest = (_lane(panel, label) for label in panel.stages)
    return Chart(
        [first._replace(group=panel.home), *rest],
        panel.most,
        "bytes",
        headers=[Note(ENDS["passes"], f"passes, {panel.unit}"), Note(ENDS["update"], "update")],
        mark=panel.capacity if panel.marked else None,
    )


def _lane(panel: Panel, label: str) -> Lane:
    """The lane of a stage, with the sum of each moment, and the room that is left."""
    totals = {moment: panel.number(panel.total(label, moment)) for moment in BOTH}
    notes = [Note(ENDS[moment], total) for moment, total in totals.items()]
    if room := panel.room(label):
        notes.append(Note(ROOM, room, RED if room.endswith("over") else FAINT, "start"))
    passes, update = (list(_bar(panel, label, moment)) for moment in BOTH)
    return Lane(label, boxes=passes, strip=update, notes=notes)


def _bar(panel: Panel, label: str, moment: Moment) -> Iterator[Box]:
    """The components of a stage at a moment, side by side."""
    held = [(name, count) for name, count in panel.held(label, moment) if count]
    stops = accumulate(count for _, count in held)
    for (name, count), stop in zip(held, stops, strict=True):
        told = f"{label}, {moment}: {name} {spell(count, 'bytes')} ({count:,} bytes)"
        yield Box(stop - count, stop, COLORS[name], told, panel.number(count))
