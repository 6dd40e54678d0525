"""How busy the experts of a run were: a heat map, and where each would best be.

                0     5     10    15
    layers.1    .oO.. o..O. ....o O.      a column for each expert, or for the busiest of several
    layers.2    ..o.O ...o. O.o.. ..

The shade is an expert's share of its block's tokens beside the mean. The table below it compares
the busiest rank of ep as the run has it with `plan/expert_places.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from howdah.base.files import parse_json
from howdah.draw.palette import FAINT, GROUND, INK, RED, TOP, head
from howdah.draw.svg import blend, document, element, hint, words
from howdah.plan.expert_places import mean_busiest, orders
from howdah.plan.flat_buffers import BY_NUMBER

SHADES = " .:-=+*#%@"  # from none to twice the mean and more
COLUMNS = 64  # of the text
CELL, LEFT = 18, 110  # pixels of the drawing


class Heat(NamedTuple):
    """Tokens of each expert of each block, over some steps.

    blocks  by name, the tokens of each expert
    first, last, steps  the logged steps
    """

    blocks: Mapping[str, Sequence[int]]
    first: int
    last: int
    steps: int

    @property
    def title(self) -> str:
        return f"tokens of each expert, {self.steps} steps from {self.first} to {self.last}"


def row_of(line: bytes) -> dict[str, Any]:
    """A row of metrics.jsonl with counts of experts; empty for any other line, and for a damaged
    one, which a resumed run removes.
    """
    with suppress(ValueError):
        row = parse_json(line, finite=False)
        if isinstance(row, dict) and type(row.get("step")) is int and all(sizes_of(row).values()):
            return row if row.get("experts") else {}
    return {}


def sizes_of(row: Mapping[str, Any]) -> dict[str, int]:
    """How many counts a row has of each block; 0: what is there are none."""
    blocks = row.get("experts")
    if not isinstance(blocks, dict):
        return {"": 0}
    counts = {name: some if isinstance(some, list) else [] for name, some in blocks.items()}
    return {
        name: len(some) if {type(one) for one in some} == {int} else 0
        for name, some in counts.items()
    }


def shares(tokens: Sequence[int]) -> list[float]:
    """Each expert's tokens beside the mean."""
    total = sum(tokens)
    return [len(tokens) * count / total if total else 0.0 for count in tokens]


def heat_text(heat: Heat, ranks: Sequence[int]) -> str:
    """The heat map as text, and the table of places over each number of `ranks`."""
    width = max(map(len, heat.blocks))
    lines = [heat.title, ""]
    for name, tokens in heat.blocks.items():
        found = shares(tokens)
        each = -(-len(found) // COLUMNS)
        joined = [max(found[at : at + each]) for at in range(0, len(found), each)]
        shaded = "".join(SHADES[min(round(share * 5), len(SHADES) - 1)] for share in joined)
        lines.append(f"{name:{width}s}  |{shaded}|  {min(found):4.0%} to {max(found):4.0%}")
    several = next(iter(heat.blocks.values()))
    if len(several) > COLUMNS:
        lines.append(f"each column is the busiest of {-(-len(several) // COLUMNS)} experts")
    return "\n".join([*lines, "", *_places(heat, ranks)])


def _places(heat: Heat, ranks: Sequence[int]) -> Iterator[str]:
    yield "the busiest rank beside the mean, over all blocks:"
    for size in ranks:
        now = mean_busiest(heat.blocks, BY_NUMBER, size)
        then = mean_busiest(heat.blocks, orders(heat.blocks, size), size)
        yield f"  ep{size:<4d} by number {now:.2f}   by load {then:.2f}"


def heat_svg(heat: Heat) -> str:
    """The heat map as a drawing."""
    most = max(map(len, heat.blocks.values()))
    width, height = LEFT + CELL * most + 20, TOP + CELL * len(heat.blocks) + 20
    inside = [*head(16, "How busy experts were", heat.title)]
    for row, (name, tokens) in enumerate(heat.blocks.items()):
        y = TOP + CELL * row
        inside.append(words(16, y + 13, name, font_size=12, fill=INK))
        for expert, share in enumerate(shares(tokens)):
            said = hint(f"{name}, expert {expert}: {tokens[expert]:,} tokens, {share:.0%}")
            color = blend(GROUND, RED, min(share / 2, 1.0))
            box = {"x": LEFT + CELL * expert, "y": y, "width": CELL - 1, "height": CELL - 1}
            inside.append(element("rect", said, fill=color, **box))
    for expert in range(0, most, 5):
        x = LEFT + CELL * expert
        inside.append(words(x, TOP - 6, str(expert), font_size=10, fill=FAINT))
    return document(max(width, 420), height, *inside)
