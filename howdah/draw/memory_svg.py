"""Memory drawn as SVG: a lane for each pipeline stage, cut by component, bytes to the right.

                                               80 GB   passes  update
    stage 0   |weights|gradients|moments|activations|  :   75.1    40.2   4.9 GB free
              ===========================              :
              0        20        40        60        80

The bar shows the passes, the strip below it the update, when no activations are held. Resting the
pointer on either shows the component and its exact bytes. Homes are drawn one below the other.
"""

from collections.abc import Iterator

from howdah.base.quantities import spell
from howdah.draw.memory import Panel, Stages, panels
from howdah.draw.palette import (
    BLUE,
    FAINT,
    GREEN,
    GROUND,
    INK,
    LETTER,
    ORANGE,
    PURPLE,
    RED,
    TOP,
    byte_axis,
    head,
    legend,
)
from howdah.draw.svg import blend, document, element, hint, words
from howdah.sim.memory import BOTH

# Related components have shades of one color.
COLORS = {
    "weights": BLUE,
    "masters": blend(BLUE, "#ffffff", 0.45),
    "gathered": blend(BLUE, "#000000", 0.25),
    "gradients": ORANGE,
    "reduced": blend(ORANGE, "#ffffff", 0.45),
    "moments": blend(PURPLE, "#ffffff", 0.3),
    "activations": GREEN,
    "recomputed": blend(GREEN, "#ffffff", 0.5),
}
PLOT, RIGHT = 860, 290  # pixels
BETWEEN = 78  # pixels from the lanes of one home to those of the next


def draw_memory_svg(
    stages: Stages, capacity: float | None = None, *, title: str = "memory of a step"
) -> str:
    """The drawing as SVG; `capacity` is a device's memory in bytes."""
    left = 24 + 13 * LETTER * max(map(len, stages))
    pitch, top = min(44.0, max(20.0, 560 / len(stages))), TOP + 14.0
    found = panels(stages, capacity)
    drawn: list[str] = []
    for panel in found:
        drawn += [*_lanes(panel, left, top, pitch), *_columns(panel, left + PLOT, top, pitch)]
        top += pitch * len(stages) + BETWEEN
    used = [name for name in COLORS if any(name in panel.components for panel in found)]
    note = "bar: the passes; strip below it: the update"
    return document(
        left + PLOT + RIGHT,
        top,
        *head(left, title, _figures(found[0])),
        *drawn,
        *legend(left, top - 22, [(name, COLORS[name]) for name in used]),
        words(left + PLOT, 60, note, font_size=13, fill=FAINT, text_anchor="end"),
    )


def _figures(device: Panel) -> str:
    """The summary below the title: the largest need of a stage, and which stage it is."""
    worst = max(device.stages, key=device.need)
    room = device.room(worst)
    return f"at most {spell(device.need(worst), 'bytes')}, on {worst}{room and f': {room}'}"


def _lanes(panel: Panel, left: float, top: float, pitch: float) -> Iterator[str]:
    """The lanes of one home: backgrounds, names, grid, bars, and the mark of the capacity."""
    scale, bottom = panel.most / PLOT, top + pitch * len(panel.stages)
    size = min(13.0, pitch * 0.55)
    yield words(left, top - 8, panel.home, font_size=11, fill=FAINT)
    for lane, label in enumerate(panel.stages):
        y = top + lane * pitch
        line = y + pitch / 2 + size * 0.36
        yield element("rect", x=left, y=y + 1, width=PLOT, height=pitch - 2, fill=GROUND)
        yield words(left - 10, line, label, font_size=size, fill=INK, text_anchor="end")
    yield from byte_axis(left, top, bottom, scale=scale, most=panel.most)
    for lane, label in enumerate(panel.stages):
        yield from _bars(panel, label, left, top + lane * pitch, pitch)
    if panel.capacity is not None and panel.marked:
        x, limit = left + panel.capacity / scale, spell(panel.capacity, "bytes")
        yield element("line", x1=x, x2=x, y1=top - 4, y2=bottom + 3, stroke=RED, stroke_width=2)
        yield words(x, top - 8, limit, font_size=11, fill=RED, text_anchor="middle")


def _bars(panel: Panel, label: str, left: float, y: float, pitch: float) -> Iterator[str]:
    """The bar of the passes and the strip of the update, with numbers where they fit."""
    strip = pitch / 6
    places = ((y + 2, pitch - 6 - strip), (y + pitch - 2 - strip, strip))
    for moment, (top, height) in zip(BOTH, places, strict=True):
        x, size = left, min(12.0, height * 0.5)
        for name, count in panel.held(label, moment):
            if not count:
                continue
            width, number = count / panel.most * PLOT, panel.number(count)
            yield element(
                "rect",
                hint(f"{label}, {moment}: {name} {spell(count, 'bytes')} ({count:,} bytes)"),
                x=x,
                y=top,
                width=max(width - 1, width * 0.8),  # a gap to the next
                height=height,
                fill=COLORS[name],
            )
            if size >= 6.5 and width > size * LETTER * len(number) + 4:
                middle, line = x + width / 2, top + height / 2 + size * 0.36
                yield words(middle, line, number, font_size=size, fill=INK, text_anchor="middle")
            x += width


def _columns(panel: Panel, x: float, top: float, pitch: float) -> Iterator[str]:
    """The columns to the right of the lanes: both moments, and the room that is left."""
    size = min(13.0, pitch * 0.55)
    passes, update, room = x + 92, x + 150, x + 166
    for end, name in ((passes, f"passes, {panel.unit}"), (update, "update")):
        yield words(end, top - 8, name, font_size=11, fill=FAINT, text_anchor="end")
    for lane, label in enumerate(panel.stages):
        line = top + (lane + 0.5) * pitch + size * 0.36
        for end, moment in zip((passes, update), BOTH, strict=True):
            number = panel.number(panel.total(label, moment))
            yield words(end, line, number, font_size=size, fill=INK, text_anchor="end")
        left = panel.room(label)
        color = RED if left.endswith("over") else FAINT
        yield words(room, line, left, font_size=size, fill=color)
