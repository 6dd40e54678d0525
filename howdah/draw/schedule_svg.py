"""Pipelines drawn as SVG from their timeline: a lane for each rank, time to the right.

    rank 0   |F0|F1|F2|        |  B0  |F3|  B1  |
             ====                      ======
    rank 1      |F0|F1|  |  B0  |F2|  B1  |
             0       5       10      15      20 s

A box is a computation: its color shows the kind, its shade the stage among those of the rank, and
its number the micro-batch. A strip below is a collective, which runs while the rank computes.
Resting the pointer on either shows its name and seconds.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from howdah.draw.palette import (
    BLUE,
    FAINT,
    GREEN,
    GREY,
    GRID,
    GROUND,
    INK,
    ORANGE,
    PINK,
    RED,
    TEAL,
    TOP,
    head,
    ticks,
)
from howdah.draw.schedule import NAMES, Box, boxes, figures, title
from howdah.draw.svg import blend, document, element, hint, words
from howdah.plan.schedule.actions import Kind
from howdah.plan.schedule.held import peak_held
from howdah.plan.schedule.lowering import Verb
from howdah.sim.timeline import Timeline

COLORS = {
    Kind.FORWARD: BLUE,
    Kind.BACKWARD: ORANGE,
    Kind.INPUT: RED,
    Kind.WEIGHT: GREEN,
    Kind.UPDATE: GREY,
}
STRIPS = {Verb.REDUCE: TEAL, Verb.TIE: PINK}

LEFT, PLOT, RIGHT = 76, 1180, 64  # pixels


class Frame(NamedTuple):
    """The scale of a drawing.

    scale  pixels per second
    pitch  pixels from one lane to the next
    strip  pixels of a strip's height; 0 without strips
    """

    scale: float
    pitch: float
    strip: float

    def x(self, seconds: float) -> float:
        return LEFT + seconds * self.scale

    def y(self, rank: int) -> float:
        return TOP + rank * self.pitch


def draw_svg(timeline: Timeline) -> str:
    """The drawing as SVG, with its axis in seconds, a legend and the figures of the timeline."""
    frame = _frame(timeline, timeline.makespan)
    return document(LEFT + PLOT + RIGHT, _height(timeline, frame), *_drawing(timeline, frame, ""))


def draw_beside(parts: Sequence[tuple[str, Timeline]]) -> str:
    """Several drawings with the same time scale, one below the other, each with its name."""
    longest = max(timeline.makespan for _, timeline in parts)
    inside: list[str] = []
    top = 0.0
    for name, timeline in parts:
        frame = _frame(timeline, longest)
        drawing = _drawing(timeline, frame, f"{name}: ")
        inside.append(element("g", *drawing, transform=f"translate(0 {top:g})"))
        top += _height(timeline, frame)
    return document(LEFT + PLOT + RIGHT, top, *inside)


def _frame(timeline: Timeline, seconds: float) -> Frame:
    """The frame in which `seconds` fill the width of the drawing."""
    pitch = min(44.0, max(20.0, 560 / len(timeline.spans)))
    strip = pitch / 7 if _verbs(timeline) & set(STRIPS) else 0.0
    return Frame(PLOT / (seconds or 1.0), pitch, strip)


def _height(timeline: Timeline, frame: Frame) -> float:
    return frame.y(len(timeline.spans)) + 84


def _verbs(timeline: Timeline) -> set[Verb]:
    return {span.instruction.verb for spans in timeline.spans for span in spans}


def _drawing(timeline: Timeline, frame: Frame, name: str) -> Iterator[str]:
    yield from _head(timeline, name)
    yield from _lanes(timeline, frame)
    yield from _axis(timeline, frame)
    yield from _boxes(timeline, frame)
    yield from _strips(timeline, frame)
    yield from _legend(timeline, _verbs(timeline), frame.y(len(timeline.spans)) + 62)


def _head(timeline: Timeline, name: str) -> Iterator[str]:
    yield from head(LEFT, f"{name}{title(timeline.schedule)}", figures(timeline))
    yield words(LEFT + PLOT + 12, TOP - 8, "held", font_size=11, fill=FAINT)


def _lanes(timeline: Timeline, frame: Frame) -> Iterator[str]:
    """For each lane the background, its name, and on the right the most that the rank holds."""
    size = min(13.0, frame.pitch * 0.55)
    for rank in range(len(timeline.spans)):
        y, name = frame.y(rank), f"rank {rank}"
        line = y + frame.pitch / 2 + size * 0.36
        held = str(peak_held(timeline.schedule, rank))
        yield element("rect", x=LEFT, y=y + 1, width=PLOT, height=frame.pitch - 2, fill=GROUND)
        yield words(LEFT - 10, line, name, font_size=size, fill=INK, text_anchor="end")
        yield words(LEFT + PLOT + 12, line, held, font_size=size, fill=FAINT)


def _axis(timeline: Timeline, frame: Frame) -> Iterator[str]:
    """Ticks at round numbers of seconds, six to fifteen of them."""
    makespan, bottom = timeline.makespan, frame.y(len(timeline.spans))
    if not makespan:
        return
    for tick in ticks(makespan):
        x = frame.x(tick)
        seconds = f"{tick:.6g}{' s' if tick == 0 else ''}"
        yield element("line", x1=x, x2=x, y1=TOP, y2=bottom + 6, stroke=GRID, stroke_width=1)
        yield words(x, bottom + 21, seconds, font_size=11, fill=FAINT, text_anchor="middle")


def _boxes(timeline: Timeline, frame: Frame) -> Iterator[str]:
    """The computations; a box has its number if it has room for the longest number."""
    drawn = list(boxes(timeline))
    longest = max((len(_number(box)) for box in drawn), default=1)
    height = frame.pitch - 4 - frame.strip
    for box in drawn:
        x, width = frame.x(box.start), (box.end - box.start) * frame.scale
        y = frame.y(box.rank) + 2
        yield element(
            "rect",
            hint(f"{box.action}: {box.start:.6g} to {box.end:.6g} s"),
            x=x,
            y=y,
            width=max(width - 1, width * 0.8),  # a gap to the next
            height=height,
            rx=min(2.5, width / 4),
            fill=_shade(box.action.kind, box.turn, box.turns),
        )
        size = min(12.0, height * 0.5, (width - 2) / (0.62 * longest))
        if size >= 6.5:
            x, line = x + width / 2, y + height / 2 + size * 0.36
            yield words(x, line, _number(box), font_size=size, fill=INK, text_anchor="middle")


def _number(box: Box) -> str:
    """The micro-batch of a box as text, with the token slice after a point."""
    return box.label.lstrip("0123456789")[1:]


def _strips(timeline: Timeline, frame: Frame) -> Iterator[str]:
    for rank, spans in enumerate(timeline.spans):
        for instruction, start, end in spans:
            if instruction.verb in STRIPS:
                yield element(
                    "rect",
                    hint(f"{instruction}: {start:.6g} to {end:.6g} s"),
                    x=frame.x(start),
                    y=frame.y(rank + 1) - 1 - frame.strip,
                    width=(end - start) * frame.scale,
                    height=frame.strip - 1,
                    fill=STRIPS[instruction.verb],
                )


def _shade(kind: Kind, turn: int, turns: int) -> str:
    """The color of a kind; lighter for the later stages of a rank."""
    return blend(COLORS[kind], "#ffffff", 0.52 * turn / max(1, turns - 1))


def _legend(timeline: Timeline, verbs: set[Verb], y: float) -> Iterator[str]:
    """A swatch for each kind in each of its shades, and one for each kind of strip."""
    turns = max((box.turns for box in boxes(timeline)), default=1)
    kinds = {box.action.kind for box in boxes(timeline)}
    entries = [
        (NAMES[kind], [_shade(kind, turn, turns) for turn in range(turns)])
        for kind in COLORS
        if kind in kinds
    ]
    entries += [(verb, [color]) for verb, color in STRIPS.items() if verb in verbs]
    x = float(LEFT)
    for name, colors in entries:
        for color in colors:
            yield element("rect", x=x, y=y - 11, width=14, height=14, rx=2, fill=color)
            x += 15
        yield words(x + 5, y, name, font_size=13, fill=INK)
        x += 7.2 * len(name) + 28
    if turns > 1:
        yield words(x, y, "lighter: later stages of a rank", font_size=13, fill=FAINT)
