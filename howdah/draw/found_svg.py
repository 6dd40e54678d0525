"""The time of a step over the number of devices, as SVG: the best layout on each number.

a step                           both axes are logarithmic, so that an ideal
  8 s |*..                       speed-up is a straight line (dashed). The band
  4 s |   *...                   is the error of the prediction; a point tells
  2 s |       *  *               its layout while the pointer rests on it
      +-----------
       8  16  32 64  devices
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil, floor, log10

from howdah.base.quantities import spell
from howdah.draw.palette import BLUE, FAINT, GRID, TOP, head
from howdah.draw.svg import document, element, hint, words
from howdah.search.search import Choice

WIDTH, HEIGHT, LEFT, RIGHT, BOTTOM = 760.0, 480.0, 90.0, 30.0, 60.0
APART = 44  # pixels between the numbers of an axis
Place = tuple[float, float]  # pixels from the left, and from the top


def plot_devices(choices: Sequence[Choice], title: str) -> str:
    """The drawing of the best layouts on several numbers of devices, at least one."""
    some = sorted(choices, key=lambda one: one.devices)
    bars = [one.time.interval or (one.seconds, one.seconds) for one in some]
    ideal = some[0].seconds * some[0].devices / some[-1].devices
    ends = min([ideal, *(low for low, _ in bars)]), max(high for _, high in bars)
    across = _scale(some[0].devices, some[-1].devices, LEFT, WIDTH - RIGHT)
    up = _scale(*ends, HEIGHT - BOTTOM, TOP)
    places = [(across(one.devices), up(one.seconds)) for one in some]
    band = [(x, up(high)) for (x, _), (_, high) in zip(places, bars, strict=True)]
    band += [(x, up(low)) for (x, _), (low, _) in reversed([*zip(places, bars, strict=True)])]
    fastest = min(some, key=lambda one: one.seconds)
    figures = f"fastest: {spell(fastest.seconds, 'seconds')} on {fastest.devices:,} devices"
    return document(
        WIDTH,
        HEIGHT,
        *head(LEFT, title, figures),
        *_grid(some, across, up, ends),
        element("polygon", points=_spelled(band), fill=BLUE, fill_opacity=0.25),
        _line([places[0], (places[-1][0], up(ideal))], FAINT, stroke_dasharray="5 4"),
        _line(places, BLUE),
        *(_point(one, place) for one, place in zip(some, places, strict=True)),
    )


def _scale(low: float, high: float, start: float, stop: float) -> Callable[[float], float]:
    """Maps numbers to places by their logarithm; one number alone is put in the middle."""
    span = log10(high) - log10(low)

    def place(number: float) -> float:
        share = (log10(number) - log10(low)) / span if span else 0.5
        return start + share * (stop - start)

    return place


def _grid(
    some: Sequence[Choice],
    across: Callable[[float], float],
    up: Callable[[float], float],
    ends: tuple[float, float],
) -> Iterator[str]:
    """The lines of seconds, 1, 2 and 5 of each power of ten, and the numbers of both axes."""
    bottom, text = HEIGHT - BOTTOM, partial(words, font_size=12, fill=FAINT)
    powers = range(floor(log10(ends[0])), ceil(log10(ends[1])) + 1)
    for seconds in (step * 10.0**power for power in powers for step in (1, 2, 5)):
        if ends[0] <= seconds <= ends[1]:
            at = up(seconds)
            yield element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at, stroke=GRID)
            yield text(LEFT - 8, at + 4, spell(seconds, "seconds"), text_anchor="end")
    free = LEFT - APART
    for one in some:
        if (x := across(one.devices)) >= free + APART:
            free = x
            yield text(x, bottom + 20, f"{one.devices:,}", text_anchor="middle")
    yield text((LEFT + WIDTH - RIGHT) / 2, bottom + 44, "devices", text_anchor="middle")
    yield text(LEFT - 8, TOP - 8, "a step", text_anchor="end")


def _point(one: Choice, place: Place) -> str:
    seconds = spell(one.seconds, "seconds")
    told = hint(f"{one.devices:,} devices, {seconds} a step: {one.plan.layout}")
    return element("circle", told, cx=place[0], cy=place[1], r=4, fill=BLUE)


def _line(places: Sequence[Place], color: str, **more: str) -> str:
    line = partial(element, "polyline", points=_spelled(places), fill="none", stroke=color)
    return line(stroke_width=2, **more)


def _spelled(places: Sequence[Place]) -> str:
    return " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
