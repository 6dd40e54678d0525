"""Memory drawn as text: a bar for each pipeline stage, cut by component.

    device, in GB                     24 GB
    stage 0  WMMGGGGOOOOAAAAAAAA··········|··  16.20   7.8 GB free
    stage 1  WMMGGGGGOOOOOAAAAAAAAAAAAAAAA|AA  25.30   1.3 GB over

The bar shows the moment (passes or update) that needs more. A table below it has the numbers of all
components, and of both moments. Homes other than the device are drawn separately, each to its own
scale.

The input is the rows of `sim.memory.memory` by label (for a plan: `draw.mesh.stage_labels`), so
that a measured run can be drawn like a planned one.
"""

from collections.abc import Iterator, Mapping
from math import floor
from typing import NamedTuple

from howdah.base.quantities import UNITS, spell
from howdah.draw.columns import columns
from howdah.plan.layout import Home
from howdah.sim.memory import BOTH, Held, Moment, peak

Stages = Mapping[str, list[Held]]  # label → rows, in the order of the drawing

# The components in the order of the drawing, from left to right, with their letters.
LETTERS = {
    "weights": "W",
    "masters": "M",
    "gathered": "U",
    "copies": "H",
    "gradients": "G",
    "reduced": "R",
    "moments": "O",
    "activations": "A",
    "recomputed": "C",
    "staged": "S",
    "programs": "P",
}
BAR = 56  # letters of the longest bar
FAR = 4  # a capacity above FAR times the longest bar is not marked: bars would be too short


# -- for both drawings -----------------------------------------------------------


class Panel(NamedTuple):
    """The memory of one home.

    capacity  bytes that the home has, marked in the drawing; None if not given
    most      length of the scale in bytes
    """

    home: Home
    stages: Stages
    capacity: float | None
    most: float

    @property
    def components(self) -> list[str]:
        """The components that any stage keeps in this home, from left to right."""
        used = {
            row.component for rows in self.stages.values() for row in rows if row.home == self.home
        }
        return [name for name in LETTERS if name in used]

    @property
    def marked(self) -> bool:
        return self.capacity is not None and self.capacity <= self.most

    def held(self, label: str, moment: Moment) -> list[tuple[str, int]]:
        """(component, bytes) of one stage at a moment, from left to right."""
        count = dict.fromkeys(self.components, 0)
        for row in self.stages[label]:
            if row.home == self.home and moment in row.moments:
                count[row.component] += row.bytes
        return list(count.items())

    def total(self, label: str, moment: Moment) -> int:
        return sum(count for _, count in self.held(label, moment))

    def need(self, label: str) -> int:
        return peak(self.stages[label], self.home)

    def room(self, label: str) -> str:
        """How many bytes a stage stays below the capacity, or exceeds it, in words."""
        if self.capacity is None:
            return ""
        left = self.capacity - self.need(label)
        return f"{spell(abs(left), 'bytes')} {'free' if left >= 0 else 'over'}"

    def number(self, count: float) -> str:
        """`count` bytes as text, in the unit of the panel, which is that of its longest bar."""
        return f"{count / UNITS['bytes'][self.unit]:.2f}"

    @property
    def unit(self) -> str:
        return spell(max(map(self.need, self.stages)), "bytes").split()[1]


def panels(stages: Stages, capacity: float | None) -> list[Panel]:
    """A panel for the device, and one for each other home that holds anything."""
    found = []
    for home in ("device", "host", "disk"):
        longest = max(peak(rows, home) for rows in stages.values())
        limit = capacity if home == "device" else None
        if longest or home == "device":
            near = limit if limit is not None and limit <= FAR * longest else 0
            found.append(Panel(home, stages, limit, max(longest, near, 1)))
    return found


# -- as text ---------------------------------------------------------------------


def draw_memory(
    stages: Stages, capacity: float | None = None, *, title: str = "memory of a step"
) -> str:
    """The drawing as text; `capacity` is a device's memory in bytes."""
    homes = ["\n".join([*_bars(panel), "", *_table(panel)]) for panel in panels(stages, capacity)]
    return "\n\n".join([title, *homes])


def _bars(panel: Panel) -> Iterator[str]:
    """A header, and a bar for each stage, with the capacity marked in one column of all bars."""
    margin, scale = max(map(len, panel.stages)), panel.most / BAR
    mark = round((panel.capacity or 0) / scale) if panel.marked else BAR
    head = f"{panel.home}, in {panel.unit}"
    if panel.capacity is not None:
        limit = spell(panel.capacity, "bytes")
        right = limit.rjust(margin + mark + 1 - len(head))  # ends above the mark
        head += f"  {right}" if panel.marked else f", of {limit}"
    yield head
    rows = []
    for label in panel.stages:
        moment = max(BOTH, key=lambda moment: panel.total(label, moment))
        bar = _bar(panel.held(label, moment), scale).ljust(BAR, "·")
        if panel.marked:
            bar = f"{bar[:mark]}|{bar[mark:]}"
        rows.append((label, bar, panel.number(panel.need(label)), panel.room(label)))
    yield from columns(rows, "<<>>")


def _bar(held: list[tuple[str, int]], scale: float) -> str:
    """A bar with a letter for each `scale` bytes.

    Letters lost by rounding down go to the components with the largest remainders.
    """
    exact = {name: count / scale for name, count in held}
    letters = {name: floor(length) for name, length in exact.items()}
    left = round(sum(exact.values())) - sum(letters.values())
    for name in sorted(exact, key=lambda name: letters[name] - exact[name])[:left]:
        letters[name] += 1
    return "".join(LETTERS[name] * count for name, count in letters.items())


def _table(panel: Panel) -> Iterator[str]:
    """For each stage, the most bytes of each component, and the sum of each moment."""
    names = panel.components
    rows = [("", *(LETTERS[name] for name in names), *BOTH)]
    for label in panel.stages:
        moments = [dict(panel.held(label, moment)) for moment in BOTH]
        most = [max(moment[name] for moment in moments) for name in names]
        totals = [panel.total(label, moment) for moment in BOTH]
        rows.append((label, *map(panel.number, (*most, *totals))))
    yield from columns(rows, "<" + ">" * (len(names) + 2))
    yield ", ".join(f"{LETTERS[name]} {name}" for name in names)
