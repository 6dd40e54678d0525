"""Bus bandwidth over size, as SVG: a line for each operation, and one for the bound.

    bus bandwidth
     10 GB/s |          - - - -  bound
             |      - -  _____   all_reduce
      1 GB/s |  - -  ___/
             |   ___/
    100 MB/s |__/
             8 B      64 KiB   16 MiB

Both axes are logarithmic. On the left, where a line is straight and steep, a call takes the same
time at every size (latency); on the right, its time is proportional to its bytes (bandwidth).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import ceil, floor, log2, log10

from howdah.base.quantities import spell
from howdah.bench.table import Row, counted
from howdah.draw.palette import FAINT, GREY, GRID, GROUND, HUES, INK, LETTER, TOP, head
from howdah.draw.svg import document, element, hint, words

LEFT, WIDE, HIGH, RIGHT = 96, 720, 400, 190  # pixels
DASHES = {"own": "", "arena": "7 4"}
LABELS = 9  # the most labels below the horizontal axis

Point = tuple[int, float]  # bytes, bus bandwidth in bytes per second
Series = dict[tuple[str, str], list[Point]]  # (operation, Row.place) → its points by size


def series(rows: Sequence[Row]) -> Series:
    """The points of each line; lines are in the order of the rows."""
    found: Series = {}
    for row in rows:
        found.setdefault((row.op, row.place), []).append((row.bytes, row.bus_bandwidth))
    return {name: sorted(points) for name, points in found.items()}


def bound(rows: Sequence[Row]) -> list[Point]:
    """The line of the bound: at each size, the highest bound of any operation."""
    by_size = groupby(sorted(rows, key=lambda row: row.bytes), key=lambda row: row.bytes)
    return [(size, max(row.bound_bandwidth for row in each)) for size, each in by_size]


def draw_bandwidth(rows: Sequence[Row]) -> str:
    """The SVG text of a drawing of one or more rows, all of one run."""
    lines, limit, first = series(rows), bound(rows), rows[0]
    points = [point for each in (*lines.values(), limit) for point in each]
    place = _Axes([size for size, _ in points], [speed for _, speed in points])
    colors = dict(zip(dict.fromkeys(op for op, _ in lines), HUES, strict=False))
    figures = f"{first.ranks} ranks, {first.transport}, {first.dtype}; "
    figures += f"best of {counted(len(first.seconds), 'block')}"
    drawn = [_line(place, limit, GREY, "2 4")]
    for (op, where), each in lines.items():
        drawn.append(_line(place, each, colors[op], DASHES[where]))
        drawn += _dots(place, op, each, colors[op])
    return document(
        LEFT + WIDE + RIGHT,
        TOP + HIGH + 60,
        *head(LEFT, "Bus bandwidth by size", figures),
        *_grid(place),
        *drawn,
        *_names(lines, colors),
    )


class _Axes:
    """Converts sizes (bytes) and speeds (bytes per second) to pixel positions in the drawing."""

    def __init__(self, sizes: Sequence[int], speeds: Sequence[float]) -> None:
        self.sizes = sorted(set(sizes))
        self.first, self.last = floor(log10(min(speeds))), ceil(log10(max(speeds)))
        self.last += self.first == self.last

    def x(self, size: float) -> float:
        low, high = log2(self.sizes[0]), log2(self.sizes[-1])
        return LEFT + WIDE * ((log2(size) - low) / (high - low) if high > low else 0.5)

    def y(self, speed: float) -> float:
        return TOP + HIGH * (self.last - log10(speed)) / (self.last - self.first)


def _grid(place: _Axes) -> Iterator[str]:
    bottom = TOP + HIGH
    yield element("rect", x=LEFT, y=TOP, width=WIDE, height=HIGH, fill=GROUND, fill_opacity=0.5)
    for decade in range(place.first, place.last + 1):
        y = place.y(10.0**decade)
        yield element("line", x1=LEFT, x2=LEFT + WIDE, y1=y, y2=y, stroke=GRID)
        label = spell(10.0**decade, "bytes/s")
        yield words(LEFT - 10, y + 4, label, font_size=11, fill=FAINT, text_anchor="end")
    step = -(-len(place.sizes) // LABELS)
    for size in place.sizes[::step]:
        x = place.x(size)
        yield element("line", x1=x, x2=x, y1=TOP, y2=bottom + 6, stroke=GRID)
        yield words(x, bottom + 21, binary(size), font_size=11, fill=FAINT, text_anchor="middle")
    middle = LEFT + WIDE / 2
    label = "bytes of the whole vector"
    yield words(middle, bottom + 44, label, font_size=12, fill=FAINT, text_anchor="middle")


def binary(size: int) -> str:
    """A number of bytes as text, with a unit that is a power of 1024.

    >>> binary(8), binary(65536), binary(1536)
    ('8 B', '64 KiB', '1.5 KiB')
    """
    power = min(int(log2(size)) // 10, 3)
    return f"{size / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _line(place: _Axes, points: Sequence[Point], color: str, dashes: str) -> str:
    path = " ".join(f"{place.x(size):.2f},{place.y(speed):.2f}" for size, speed in points)
    style = {"stroke_dasharray": dashes} if dashes else {}
    return element("polyline", points=path, fill="none", stroke=color, stroke_width=2.2, **style)


def _dots(place: _Axes, op: str, points: Sequence[Point], color: str) -> Iterator[str]:
    for size, speed in points:
        told = hint(f"{op}, {binary(size)}: {spell(speed, 'bytes/s')}")
        yield element("circle", told, cx=place.x(size), cy=place.y(speed), r=3.4, fill=color)


def _names(lines: Series, colors: dict[str, str], *, bounded: bool = True) -> Iterator[str]:
    """The legend at the right: a stroke and a name for each line, the bound last."""
    entries = [
        (op if where == "own" else f"{op}, {where}", colors[op], DASHES[where])
        for op, where in lines
    ]
    x, y = LEFT + WIDE + 16, float(TOP + 10)
    for name, color, dashes in [*entries, *[("bound", GREY, "2 4")] * bounded]:
        style = {"stroke_dasharray": dashes} if dashes else {}
        yield element("line", x1=x, x2=x + 22, y1=y, y2=y, stroke=color, stroke_width=2.4, **style)
        size = 13 if 13 * LETTER * len(name) < RIGHT - 46 else 11
        yield words(x + 30, y + 4.5, name, font_size=size, fill=INK)
        y += 22


def draw_lines(title: str, told: str, lines: Mapping[str, Sequence[Point]]) -> str:
    """The SVG text of lines of bytes/s over bytes, by name; as many as there are colors."""
    points = [point for each in lines.values() for point in each]
    place = _Axes([size for size, _ in points], [speed for _, speed in points])
    named = dict(zip(lines, HUES, strict=False))
    drawn = []
    for name, color in named.items():
        drawn.append(_line(place, lines[name], color, ""))
        drawn += _dots(place, name, lines[name], color)
    legend: Series = {(name, "own"): [*lines[name]] for name in named}
    return document(
        LEFT + WIDE + RIGHT,
        TOP + HIGH + 60,
        *head(LEFT, title, told),
        *_grid(place),
        *drawn,
        *_names(legend, named, bounded=False),
    )
