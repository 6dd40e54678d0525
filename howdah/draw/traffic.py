"""Traffic drawn as text: the bytes of a step by axis, operation and link, the most first.

    dp  reduce_scatter  ib      193.8 GB  41.2%  ████████████████████████
        all_gather      ib      6.057 GB   1.3%  ▊
    tp  all_gather      nvlink  161.6 GB  34.3%  ████████████████████

Bars are linear, so that they can be added by eye. A count that is too small for the scale has the
thinnest bar, because it is not zero.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from howdah.base.quantities import spell
from howdah.draw.columns import columns
from howdah.plan.recording import Traffic

K = TypeVar("K")

BAR = 40  # letters of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉"


def draw_traffic(traffic: Mapping[Traffic, int], *, title: str = "sent in a step") -> str:
    """The drawing as text; `traffic` is that of one rank, or the sum over several ranks."""
    return "\n".join([title, figures(traffic), "", *_rows(traffic)]).rstrip()


def figures(traffic: Mapping[Traffic, int]) -> str:
    """The line of main figures: all bytes, and the percentage of each class of links."""
    total = sum(traffic.values())
    if not total:
        return "nothing is sent"
    links = sums((row.link, count) for row, count in traffic.items())
    shares = (f"{share(count, total)} {link}" for link, count in links.most_common())
    return f"{spell(total, 'bytes')}, {', '.join(shares)}"


def in_order(traffic: Mapping[Traffic, int]) -> list[Traffic]:
    """The rows with any bytes, largest axis first, then largest operation, then largest link."""
    axes = sums((row.axis, count) for row, count in traffic.items())
    operations = sums((row[:2], count) for row, count in traffic.items())
    return sorted(
        (row for row, count in traffic.items() if count),
        key=lambda row: (-axes[row.axis], row.axis, -operations[row[:2]], row[1], -traffic[row]),
    )


def _rows(traffic: Mapping[Traffic, int]) -> list[str]:
    """A row for each link of an operation; only the first row of an axis names the axis."""
    rows, total = in_order(traffic), sum(traffic.values())
    scale = max(traffic.values(), default=0) / BAR
    cells = []
    for before, row in zip([None, *rows], rows, strict=False):
        axis = "" if before and before.axis == row.axis else row.axis
        operation = "" if before and before[:2] == row[:2] else row.operation
        count = traffic[row]
        numbers = spell(count, "bytes"), share(count, total)
        cells.append((axis, operation, row.link, *numbers, _bar(count / scale)))
    return columns(cells, "<<<>><")


def _bar(length: float) -> str:
    """A bar of `length` letters, but at least an eighth of a letter."""
    whole, eighths = divmod(max(1, round(length * 8)), 8)
    return ("█" * whole + EIGHTHS[eighths]).rstrip()


def share(count: int, total: int) -> str:
    """`count` as a percentage of `total`, as text."""
    return f"{count / total:.1%}"


def sums(pairs: Iterable[tuple[K, int]]) -> Counter[K]:
    """For each key, the sum of its counts."""
    added: Counter[K] = Counter()
    for key, count in pairs:
        added[key] += count
    return added
