"""results.md from results.json."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Results = Mapping[str, Any]
UNITS = {"allocated", "reserved", "planned", "bytes", "bytes of a communicator"}


class Goal(NamedTuple):
    """What was asked for on one H200, and what was measured; None: it was not."""

    what: str
    floor: float
    goal: float
    got: float | None


def page(results: Results) -> str:
    """The whole page."""
    lines = ["# What a GPU did", "", *head(results), "", *states(results)]
    lines += ["", "## Goals", "", *goal_table(results)]
    for letter, part in sorted(results["parts"].items()):
        lines += ["", f"## {letter}: {part['name']}", "", *part_lines(part)]
    return "\n".join(lines) + "\n"


def head(results: Results) -> Iterator[str]:
    machine = results["machine"]
    card = machine["card"] or {}
    if machine["mode"] != "gpu":
        yield "**Not a result: tiny sizes on the CPU, which show that the script runs.**"
        yield ""
    yield (
        f"Written by `{results['command']}` on {card.get('name', 'no GPU')}"
        f"{_and(' driver ', card.get('driver_version'))}, torch {machine['torch']}"
        f"{_and(', CUDA ', machine['cuda'])}, Python {machine['python']}. Other processes took "
        f"{machine['others']:.1%} of the processors before."
    )


def _and(word: str, value: object) -> str:
    return f"{word}{value}" if value else ""


def states(results: Results) -> Iterator[str]:
    yield "| part | state | seconds | rows measured | clock, power behind it |"
    yield "|---|---|---|---|---|"
    for letter, part in sorted(results["parts"].items()):
        rows = part["rows"].values()
        measured = sum(not row["why"] for row in rows)
        card = part.get("card") or {}
        now = ", ".join(card[key] for key in ("clocks.sm", "power.draw") if card.get(key))
        yield (
            f"| {letter} {part['name']} | {part['state']} | {part['seconds']:.0f} | {measured} of "
            f"{len(rows)} | {now} |"
        )


def part_lines(part: Mapping[str, Any]) -> Iterator[str]:
    """A table for each set of fields, and below them the rows that were not measured."""
    rows = part["rows"]
    kinds = dict.fromkeys(tuple(row) for row in rows.values())
    for kind in kinds:
        fields = [field for field in kind if field != "why"]
        there = {name: row for name, row in rows.items() if tuple(row) == kind and not row["why"]}
        if there:
            yield f"| | {' | '.join(fields)} |"
            yield "|---" * (len(fields) + 1) + "|"
            for name, row in there.items():
                yield f"| {name} | {' | '.join(cell(f, row[f]) for f in fields)} |"
            yield ""
    for why in dict.fromkeys(row["why"] for row in rows.values() if row["why"]):
        names = [name for name, row in rows.items() if row["why"] == why]
        yield f"- not measured, {why}: {'; '.join(names)}"
    if part["said"]:
        yield from ("", "```", part["said"], "```")


def cell(field: str, value: object) -> str:
    """A value as people read it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if field in UNITS and isinstance(value, int):
        return f"{value / 1e9:.2f} GB" if value > 1e8 else f"{value / 1e6:.2f} MB"
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


# -- goals -----------------------------------------------------------------------------


def goals(results: Results) -> list[Goal]:
    """The goals of issue 15 beside what was measured."""

    def got(letter: str, row: str, field: str) -> float | None:
        value: float | None = results["parts"][letter]["rows"][row][field]
        return value

    def over(one: float | None, other: float | None) -> float | None:
        return one / other if one and other else None

    rate = got("F", "1b", "tokens/s")
    here = got("G", "howdah", "tokens/s")
    peers = [row["tokens/s"] for name, row in _rows(results, "G") if name != "howdah"]
    best = max((one for one in peers if one), default=None)
    planned = over(got("F", "1b", "planned"), got("F", "1b", "allocated"))
    fp8 = got("F", "8b of 4 layers, fp8", "tokens/s")
    return [
        Goal("1b at 4096, bf16: tokens/s", 45_000, 52_000, rate),
        Goal("8b of 4 layers: mfu, full square", 0.50, 0.55, got("F", *_EIGHT, "mfu full square")),
        Goal("beside the best peer", 1.00, 1.05, over(here, best)),
        Goal(
            "beside transformers' Trainer, eager",
            1.2,
            1.3,
            over(here, got("G", "transformers, eager", "tokens/s")),
        ),
        Goal("fp8 beside bf16, 8b of 4 layers", 1.10, 1.15, over(fp8, got("F", *_EIGHT, _RATE))),
        Goal("memory planned / allocated, off by at most", 0.05, 0.03, _off(planned)),
        Goal("busy share of a step", 0.95, 0.97, got("F", "kernels", "busy share")),
    ]


_EIGHT, _RATE = ("8b of 4 layers",), "tokens/s"


def _off(ratio: float | None) -> float | None:
    return None if ratio is None else abs(ratio - 1)


def _rows(results: Results, letter: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from results["parts"][letter]["rows"].items()


def goal_table(results: Results) -> Iterator[str]:
    """Goals of one H200; on another card they are only figures."""
    yield "| on one H200 | floor | goal | measured |"
    yield "|---|---|---|---|"
    for goal in goals(results):
        yield f"| {goal.what} | {goal.floor:g} | {goal.goal:g} | {cell('', goal.got)} |"
