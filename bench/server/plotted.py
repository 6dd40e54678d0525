"""The loss over time under each rule, as SVG: what `slowed.py` has found."""

from collections.abc import Iterator, Mapping, Sequence

from howdah.draw.palette import FAINT, GRID, HUES, INK, TOP, head
from howdah.draw.svg import document, element, words

LEFT, WIDE, HIGH, RIGHT = 64, 640, 320, 110  # pixels
LINES = 5  # of the grid, in each direction

Curve = Sequence[tuple[float, float]]  # seconds, loss


def loss_over_time(curves: Mapping[str, Curve], title: str, told: str) -> str:
    """The SVG text of a line for each rule; both axes are linear."""
    points = [point for curve in curves.values() for point in curve]
    last = max(seconds for seconds, _ in points)
    low, high = (edge(loss for _, loss in points) for edge in (min, max))

    def x(seconds: float) -> float:
        return LEFT + WIDE * seconds / last

    def y(loss: float) -> float:
        return TOP + HIGH * (high - loss) / (high - low)

    def grid() -> Iterator[str]:
        for number in range(LINES + 1):
            seconds, loss = last * number / LINES, low + (high - low) * number / LINES
            ends = {"x1": LEFT, "x2": LEFT + WIDE, "stroke": GRID}
            yield element("line", y1=y(loss), y2=y(loss), **ends)
            beside = {"font_size": 11, "fill": FAINT, "text_anchor": "end"}
            yield words(LEFT - 8, y(loss) + 4, f"{loss:.2f}", **beside)
            below = {"font_size": 11, "fill": FAINT, "text_anchor": "middle"}
            yield words(x(seconds), TOP + HIGH + 20, f"{seconds:.0f} s", **below)

    drawn = []
    for number, ((rule, curve), color) in enumerate(zip(curves.items(), HUES, strict=False)):
        path = " ".join(f"{x(seconds):.2f},{y(loss):.2f}" for seconds, loss in curve)
        drawn.append(element("polyline", points=path, fill="none", stroke=color, stroke_width=2.2))
        at = TOP + 10 + 22 * number
        right = LEFT + WIDE + 14
        ends = {"x1": right, "x2": right + 22, "stroke": color, "stroke_width": 2.4}
        drawn.append(element("line", y1=at, y2=at, **ends))
        drawn.append(words(right + 30, at + 4.5, rule, font_size=13, fill=INK))
    width, height = LEFT + WIDE + RIGHT, TOP + HIGH + 40
    return document(width, height, *head(LEFT, title, told), *grid(), *drawn)
