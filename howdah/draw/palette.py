"""What all SVG drawings share, so that they look alike: colors, and the head."""

from collections.abc import Iterator

from howdah.draw.svg import words

INK, FAINT, GROUND, GRID = "#1f2933", "#6b7683", "#eef1f4", "#d5dae0"

# These also differ in lightness, for color-blind readers and for printers.
BLUE, ORANGE, RED, GREEN, GREY = "#6fa8dc", "#f0a04b", "#dd6b55", "#86c28f", "#a9b1ba"
PURPLE, TEAL, PINK, YELLOW = "#8e6fb5", "#2f7f79", "#b5557f", "#ecd25c"
HUES = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, TEAL, RED, PINK)

LETTER = 0.62  # width of a letter / its height, estimated high so that text fits
TOP = 84  # pixels of the head


def head(x: float, title: str, figures: str, *, top: float = 0.0) -> Iterator[str]:
    """The title of a drawing, and below it the line of its main figures."""
    yield words(x, top + 36, title, font_size=20, font_weight=600, fill=INK)
    yield words(x, top + 60, figures, font_size=13, fill=FAINT)
