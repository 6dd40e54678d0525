"""Boxes in lanes along one axis, drawn as SVG: the form of pipelines, memory and traffic.

                title                                                  Drawing
                figures
                                              mark  headers            Chart
    group  name |  label  | label |     | label |     notes              Lane
                ===========       ======        |                          its strip
           name |   label   |    label    |     |     notes
                0     5 GB     10 GB     15 GB
                [] name  [] name  note                                 legend

A picture says what is in its lanes, in bytes or seconds; where that is on the page is decided here.
Resting the pointer on a box shows its hint.
"""

from collections.abc import Iterator, Sequence
from math import floor, log10
from typing import NamedTuple

from howdah.base.quantities import spell
from howdah.draw.palette import FAINT, GRID, GROUND, INK, LETTER, RED, TOP, head
from howdah.draw.svg import document, element, hint, text_at, words

MARGIN = 24  # pixels, left of the names
APART = 10  # pixels between groups of lanes
BELOW = 78  # pixels from the last lane to what comes next: the axis and the legend


class Box(NamedTuple):
    """A box from `start` to `stop` on the axis; its label is left out if it has no room."""

    start: float
    stop: float
    color: str
    hint: str
    label: str = ""


class Note(NamedTuple):
    """A text to the right of a lane, `x` pixels from the end of the axis."""

    x: float
    text: str
    color: str = INK
    anchor: str = "end"


class Lane(NamedTuple):
    """One lane.

    strip  thin boxes below the others
    group  name of the group of lanes that begins here
    """

    name: str
    boxes: Sequence[Box]
    strip: Sequence[Box] = ()
    notes: Sequence[Note] = ()
    group: str = ""


class Chart(NamedTuple):
    """Lanes on a common axis.

    most     value at the right end of the axis
    kind     what the values are: bytes, seconds
    headers  texts above the notes
    mark     a value that is marked by a line through all lanes
    pitch    the most pixels from one lane to the next
    """

    lanes: Sequence[Lane]
    most: float
    kind: str
    headers: Sequence[Note] = ()
    mark: float | None = None
    pitch: float = 44.0


class Drawing(NamedTuple):
    """Charts one below the other, with a head and a legend.

    legend  the shades of the color of each name
    note    text behind the legend
    """

    title: str
    figures: str
    charts: Sequence[Chart]
    legend: Sequence[tuple[str, Sequence[str]]]
    note: str = ""


def draw_lanes(*drawings: Drawing, width: float, right: float) -> str:
    """The SVG of drawings, one below the other.

    width  pixels of the axis
    right  pixels to the right of the axis
    """
    lanes = [lane for drawing in drawings for chart in drawing.charts for lane in chart.lanes]
    names = max((len(lane.name) for lane in lanes), default=0)
    groups = max((len(lane.group) for lane in lanes), default=0)
    left = MARGIN + 13 * LETTER * (names + groups) + (MARGIN if groups else 0)
    top = 0.0
    inside: list[str] = []
    for drawing in drawings:
        inside += head(left, drawing.title, drawing.figures, top=top)
        top += TOP
        for chart in drawing.charts:
            plot = _Plot(chart, left, top, width)
            inside += plot.elements()
            top = plot.bottom + BELOW
        inside += _legend(left, top - 22, drawing)
    return document(left + width + right, top, *inside)


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, 6 to 15 steps of 1, 2 or 5 times a power of ten.

    >>> ticks(80)
    [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]
    """
    most *= 1 + 1e-9  # so that 0.6 has six steps of 0.1 despite rounding
    power = 10.0 ** floor(log10(most / 6))
    lead = most / 6 / power
    step = power * (5 if lead >= 5 else 2 if lead >= 2 else 1)
    return [tick * step for tick in range(floor(most / step) + 1)]


class _Plot:
    """A chart on the page; (left, top) is the upper left corner of its first lane."""

    def __init__(self, chart: Chart, left: float, top: float, width: float) -> None:
        self.chart, self.left, self.top, self.width = chart, left, top, width
        self.scale = width / (chart.most or 1.0)
        self.pitch = min(chart.pitch, max(20.0, 560 / len(chart.lanes)))
        self.strip = self.pitch / 7 if any(lane.strip for lane in chart.lanes) else 0.0
        self.size = min(13.0, self.pitch * 0.55)  # of texts beside lanes
        labels = [box.label for lane in chart.lanes for box in lane.boxes]
        self.longest = max(map(len, labels), default=0) or 1
        self.placed: list[tuple[Lane, float]] = []  # each lane, and the pixel of its top
        for lane in chart.lanes:
            top += APART * bool(lane.group and self.placed)
            self.placed.append((lane, top))
            top += self.pitch
        self.bottom = top

    def elements(self) -> Iterator[str]:
        for x, text, _, anchor in self.chart.headers:
            at = self.left + self.width + x, self.top - 8
            yield words(*at, text, font_size=11, fill=FAINT, text_anchor=anchor)
        for lane, y in self.placed:
            yield from self._beside(lane, y)
        yield from self._axis()
        for lane, y in self.placed:
            yield from self._boxes(lane, y)
        yield from self._mark()

    def _x(self, value: float) -> float:
        return self.left + value * self.scale

    def _beside(self, lane: Lane, y: float) -> Iterator[str]:
        """The background of a lane, its name, and the notes at its right."""
        x, middle, size = self.left, y + self.pitch / 2, self.size
        height = self.pitch - 2
        yield element("rect", x=x, y=y + 1, width=self.width, height=height, fill=GROUND)
        yield text_at(x - 10, middle, lane.name, size=size, fill=INK, text_anchor="end")
        if lane.group:
            yield text_at(MARGIN, middle, lane.group, size=size, fill=INK, font_weight=600)
        for right, text, color, anchor in lane.notes:
            x = self.left + self.width + right
            yield text_at(x, middle, text, size=size, fill=color, text_anchor=anchor)

    def _axis(self) -> Iterator[str]:
        """Lines at round values, with their labels."""
        top, bottom = self.top, self.bottom
        for tick in ticks(self.chart.most) if self.chart.most else ():
            x, label = self._x(tick), spell(tick, self.chart.kind) if tick else "0"
            yield element("line", x1=x, x2=x, y1=top, y2=bottom + 6, stroke=GRID, stroke_width=1)
            yield words(x, bottom + 21, label, font_size=11, fill=FAINT, text_anchor="middle")

    def _boxes(self, lane: Lane, y: float) -> Iterator[str]:
        for box in lane.boxes:
            yield from self._box(box, y + 2, self.pitch - 4 - self.strip)
        for box in lane.strip:
            yield from self._box(box, y + self.pitch - 1 - self.strip, self.strip)

    def _box(self, box: Box, y: float, height: float) -> Iterator[str]:
        """A box; its label is made small enough for the longest label of all boxes."""
        x, width = self._x(box.start), (box.stop - box.start) * self.scale
        yield element(
            "rect",
            hint(box.hint),
            x=x,
            y=y,
            width=max(width - 1, width * 0.8, 0.5),  # a gap to the next, and never 0
            height=height,
            rx=min(2.5, width / 4, height / 4),
            fill=box.color,
        )
        size = min(12.0, height * 0.5, (width - 2) / (LETTER * self.longest))
        if box.label and size >= 6.5:
            middle = x + width / 2, y + height / 2
            yield text_at(*middle, box.label, size=size, fill=INK, text_anchor="middle")

    def _mark(self) -> Iterator[str]:
        if self.chart.mark is None:
            return
        x, label = self._x(self.chart.mark), spell(self.chart.mark, self.chart.kind)
        top, bottom = self.top - 4, self.bottom + 3
        yield element("line", x1=x, x2=x, y1=top, y2=bottom, stroke=RED, stroke_width=2)
        yield words(x, top - 4, label, font_size=11, fill=RED, text_anchor="middle")


def _legend(x: float, y: float, drawing: Drawing) -> Iterator[str]:
    """For each name the swatches of its shades; the note behind the last."""
    for name, shades in drawing.legend:
        for color in shades:
            yield element("rect", x=x, y=y - 11, width=14, height=14, rx=2, fill=color)
            x += 15
        yield words(x + 5, y, name, font_size=13, fill=INK)
        x += 23 + 13 * LETTER * len(name)
    if drawing.note:
        yield words(x, y, drawing.note, font_size=13, fill=FAINT)
