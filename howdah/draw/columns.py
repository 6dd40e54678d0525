"""Lines of text whose cells are in columns."""

from collections.abc import Sequence


def columns(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """The rows as lines, with two spaces between columns.

    sides  for each column the side at which its cells are aligned: < left, > right

    >>> columns([("tp", "8 GB"), ("world", "256 B")], "<>")
    ['tp      8 GB', 'world  256 B']
    """
    widths = (max((len(row[at]) for row in rows), default=0) for at in range(len(sides)))
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*row).rstrip() for row in rows]
