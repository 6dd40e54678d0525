"""What all SVG drawings share, so that they look alike: colors, head, axis, legend.

title                                        head
figures
name    |=======|====|          |   number   lanes: the content of the drawing
        0      20     40     60              byte_axis
        [] weights  [] gradients             legend
"""

from collections.abc import Iterable, Iterator
from math import floor, log10

from howdah.base.quantities import spell
from howdah.draw.svg import element, words

INK, FAINT, GROUND, GRID = "#1f2933", "#6b7683", "#eef1f4", "#d5dae0"

# These also differ in lightness, for color-blind readers and for printers.
BLUE, ORANGE, RED, GREEN, GREY = "#6fa8dc", "#f0a04b", "#dd6b55", "#86c28f", "#a9b1ba"
PURPLE, TEAL, PINK, YELLOW = "#8e6fb5", "#2f7f79", "#b5557f", "#ecd25c"
HUES = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, TEAL, RED, PINK)

LETTER = 0.62  # width of a letter / its height, estimated high so that text fits
TOP = 84  # pixels from the top to the first lane


def head(x: float, title: str, figures: str) -> Iterator[str]:
    """The title of a drawing, and below it the line of its main figures."""
    yield words(x, 36, title, font_size=20, font_weight=600, fill=INK)
    yield words(x, 60, figures, font_size=13, fill=FAINT)


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A swatch and a name for each (name, color), on one line."""
    for name, color in entries:
        yield element("rect", x=x, y=y - 11, width=14, height=14, rx=2, fill=color)
        yield words(x + 20, y, name, font_size=13, fill=INK)
        x += 38 + 13 * LETTER * len(name)


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


def byte_axis(x: float, top: float, bottom: float, *, scale: float, most: float) -> Iterator[str]:
    """Vertical lines at round numbers of bytes, with their labels.

    x            pixels of 0 bytes
    top, bottom  pixels between which the lines are drawn
    scale        bytes of a pixel
    most         bytes at the right end
    """
    for tick in ticks(most):
        at = x + tick / scale
        label = spell(tick, "bytes")
        yield element("line", x1=at, x2=at, y1=top, y2=bottom + 6, stroke=GRID, stroke_width=1)
        yield words(at, bottom + 21, label, font_size=11, fill=FAINT, text_anchor="middle")
