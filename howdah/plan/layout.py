"""Layout: how one run is split over devices, without changing what it computes.

A layout has one short, strict spelling, which is the flag, the log line and the table row:

    single          one process                      dp1
    dp2 x4          two replicas, four micro-batches each per step
    dp* x4          as many replicas as the world has processes

Parsing reverses printing. A word that is unknown or said twice is refused with the nearest
word that is known. `dp*`, and a missing `x`, are open until `resolve` is told the world and
the batch; everything that runs takes a resolved layout.
"""

import re
from dataclasses import dataclass, replace

from howdah.plan.problems import BadInput, nearest

WORDS = {"dp": "replicas (dp2, or dp* for the rest)", "x": "micro-batches per step (x4)"}


@dataclass(frozen=True)
class Layout:
    """The choices that keep the result.

    dp      replicas of the model, each with its own part of the batch; None is `dp*`.
    micros  micro-batches that each replica takes per step (accumulation); None follows
            from the batch.
    """

    dp: int | None = 1
    micros: int | None = None

    def __post_init__(self) -> None:
        for word, number in (("dp", self.dp), ("x", self.micros)):
            if number is not None and number < 1:
                raise BadInput(f"layout: {word}{number} must be at least {word}1")

    def __str__(self) -> str:
        ranks = "dp*" if self.dp is None else "single" if self.dp == 1 else f"dp{self.dp}"
        return ranks if self.micros is None else f"{ranks} x{self.micros}"

    @property
    def world(self) -> int:
        """How many processes the layout needs; the layout must be resolved."""
        if self.dp is None:
            raise ValueError("dp* has no world until it is resolved")
        return self.dp


def parse_layout(text: str) -> Layout:
    """The layout that `text` spells. Raises BadInput, naming the word that is wrong."""
    numbers: dict[str, int | None] = {}
    for word in text.split():
        name, number = _split(word, text)
        if name in numbers:
            raise BadInput(f"layout {text!r}: {word!r} says {name} a second time; say it once")
        numbers[name] = number
    return Layout(dp=numbers.get("dp", 1), micros=numbers.get("x"))


def _split(word: str, text: str) -> tuple[str, int | None]:
    if word == "single":
        return "dp", 1
    if word in WORDS:
        raise BadInput(f"layout {text!r}: {word!r} needs a number: {WORDS[word]}")
    match = re.fullmatch(r"([a-z_]+?)([0-9]+|\*)", word)
    if match is None or match[1] not in WORDS:
        name = match[1] if match else word.rstrip("0123456789*")
        raise BadInput(f"layout {text!r}: unknown word {word!r}{nearest(name, [*WORDS, 'single'])}")
    if match[2] == "*":
        if match[1] != "dp":
            raise BadInput(f"layout {text!r}: only dp can be '*'; give {match[1]} a number")
        return "dp", None
    return match[1], int(match[2])


def resolve(layout: Layout, world: int | None) -> Layout:
    """`layout` with `dp*` filled in from the `world`'s number of processes.

    Raises BadInput when the layout does not have exactly `world` ranks. A `world` of None
    means that the layout decides how many processes are started; then `dp*` is refused.
    """
    if world is None:
        if layout.dp is None:
            raise BadInput(
                "layout 'dp*' takes the number of processes from torchrun; without torchrun "
                "give a number, such as dp2"
            )
        return layout
    if layout.dp is None:
        return replace(layout, dp=world)
    if layout.world != world:
        raise BadInput(
            f"layout '{layout}' needs {layout.world} processes but there are {world}; "
            f"use dp{world} or dp*, or start {layout.world} processes"
        )
    return layout
