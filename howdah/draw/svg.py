"""SVG as text: the few elements that drawings of plans need.

    document(100, 20, element("rect", x=0, y=0, width=50.125, height=20, fill="#eee"))

An element is a string, so inner elements are made before outer ones. Text is escaped in `words` and
`hint`, attributes in `element`, so that names given by a user cannot break the drawing.
"""

from html import escape  # xml.sax would load a network stack: 20 ms of every start

FONT = "system-ui, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


def element(tag: str, *inside: str, **attributes: str | float) -> str:
    """The text <tag …>inside</tag>; an attribute `text_anchor` is written text-anchor."""
    written = "".join(
        f' {name.replace("_", "-")}="{_escaped(_spelled(value))}"'
        for name, value in attributes.items()
    )
    return f"<{tag}{written}>{''.join(inside)}</{tag}>" if inside else f"<{tag}{written}/>"


def words(x: float, y: float, text: str, **attributes: str | float) -> str:
    """A line of text on the baseline y; `text_anchor` is the point at x: start, middle or end."""
    return element("text", escape(text, quote=False), x=x, y=y, **attributes)


def text_at(x: float, y: float, text: str, *, size: float, **attributes: str | float) -> str:
    """A line of text with the middle of its letters, which are `size` pixels high, at y."""
    return words(x, y + 0.36 * size, text, font_size=size, **attributes)


def hint(text: str) -> str:
    """A text that is shown while the pointer rests on the element that contains the hint."""
    return element("title", escape(text, quote=False))


def document(width: float, height: float, *inside: str) -> str:
    """A complete SVG document on a white background; sizes are pixels, and it scales to fit."""
    return element(
        "svg",
        element("rect", width="100%", height="100%", fill="#ffffff"),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_spelled(width)} {_spelled(height)}",
        width=width,
        height=height,
        font_family=FONT,
    )


def blend(color: str, other: str, share: float) -> str:
    """`color` with a fraction `share` of the `other` mixed in; both as #rrggbb.

    >>> blend("#000000", "#ffffff", 0.5)
    '#808080'
    """
    mine, theirs = (bytes.fromhex(c.removeprefix("#")) for c in (color, other))
    mixed = (round(a + (b - a) * share) for a, b in zip(mine, theirs, strict=True))
    return "#" + bytes(mixed).hex()


def _spelled(value: str | float) -> str:
    """An attribute as text; numbers to a hundredth of a pixel, without trailing zeros."""
    return value if isinstance(value, str) else f"{round(value, 2):g}"


def _escaped(text: str) -> str:
    """An attribute's value, between double quotes."""
    return escape(text, quote=False).replace('"', "&quot;")
