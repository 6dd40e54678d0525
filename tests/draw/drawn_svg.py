"""What an SVG drawing holds, for the tests of several drawings."""

from typing import NamedTuple
from xml.etree import ElementTree

SVG = "{http://www.w3.org/2000/svg}"


class Drawn(NamedTuple):
    """A drawing that was read: its boxes by their hint, and all texts."""

    root: ElementTree.Element
    boxes: dict[str, ElementTree.Element]
    texts: list[str]

    def all(self, tag):
        """The elements of one kind, in order."""
        return list(self.root.iter(f"{SVG}{tag}"))


def read(drawing):
    root = ElementTree.fromstring(drawing)
    titles = [(rect, rect.find(f"{SVG}title")) for rect in root.iter(f"{SVG}rect")]
    boxes = {title.text: rect for rect, title in titles if title is not None}
    return Drawn(root, boxes, [text.text for text in root.iter(f"{SVG}text")])


def numbers(element, *names):
    return [float(element.get(name)) for name in names]


def outside(drawing):
    """The boxes that leave the page."""
    drawn = read(drawing)
    wide, high = numbers(drawn.root, "width", "height")

    def is_inside(rect):
        x, y, width, height = numbers(rect, "x", "y", "width", "height")
        return 0 <= x <= x + width <= wide and 0 <= y <= y + height <= high

    return [
        rect for rect in drawn.all("rect") if rect.get("width") != "100%" and not is_inside(rect)
    ]
