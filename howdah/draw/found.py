"""The answer of a search, as lines of text and as data."""

from collections.abc import Sequence
from typing import Any

from howdah.base.quantities import spell
from howdah.draw.columns import columns
from howdah.draw.tables import size_of
from howdah.plan.plan import Plan
from howdah.plan.storage import WINDOW
from howdah.search.budget import Priced
from howdah.search.search import Choice, Found

HEAD = ("", "a step", "tokens/s", "memory", "free", "micro-batch", "layout")


def show_found(found: Found, rows: Sequence[Priced] | None) -> list[str]:
    """The best layouts as a table, what rules the others out, and how far apart the first are.

    rows  of the table, with the cost of a run; None: the best, without costs
    """
    question = found.question
    lines = [
        f"search  {found.priced:,} layouts of {question.devices:,} x "
        f"{question.cluster.device.name}, {found.simulated} of them simulated",
        f"batch   {question.global_batch:,} x {question.sequence:,} tokens a step",
        *show_choices(
            [one.choice for one in rows] if rows else found.best,
            rows,
            usual=question.method.precision,
        ),
    ]
    if found.ruled_out:
        lines.append(f"out     {found.ruled_out.total():,} other layouts, by the reason:")
        counted = [(f"{n:,}", why) for why, n in found.ruled_out.most_common()]
        lines += [f"  {line}" for line in columns(counted, "><")]
    return [*lines, f"note    {_apart(found)}"]


def show_choices(
    choices: Sequence[Choice], rows: Sequence[Priced] | None, *, usual: str = ""
) -> list[str]:
    """Layouts as a table, with days and money if their costs are given, and another precision than
    the usual one.
    """
    kind = "rent" if rows and rows[0].cost.rent is not None else "purchase"
    cells = [(*HEAD[:-1], *(("days", f"USD ({kind})") if rows else ()), "devices", HEAD[-1])]
    for number, one in enumerate(choices):
        takes = rows[number].takes() if rows else {}
        money = f"{takes['money']:,.0f}" if "money" in takes else "?"
        costs = (f"{takes['days']:,.1f}", money) if rows else ()
        cells.append(
            (
                *(str(number + 1), spell(one.seconds, "seconds")),
                *(f"{one.time.tokens_per_second:,.0f}", size_of(one.peak)),
                *(size_of(one.capacity - one.peak), str(one.plan.micro_batch), *costs),
                *(f"{one.devices:,}", _spelled(one.plan, usual)),
            )
        )
    return [f"  {line}" for line in columns(cells, ">" * (len(cells[0]) - 1) + "<")]


def _spelled(plan: Plan, usual: str) -> str:
    """The layout of a plan; its window of weights and its precision where these are not usual."""
    window, precision = plan.storage.window, plan.method.precision
    words = [f"storage.window={window}"] * (window != WINDOW)
    words += [f"method.precision={precision}"] * (usual not in (precision, ""))
    return str(plan.layout) + (f" ({' '.join(words)})" if words else "")


def _apart(found: Found) -> str:
    """How far the second is behind the first, and whether that says anything."""
    first, bar = found.best[0], found.best[0].time.interval
    if len(found.best) == 1:
        return "no other layout fits"
    behind = found.best[1].seconds / first.seconds - 1
    gap = f"the second takes {behind:.1%} more than the first"
    if bar is None:
        return (
            f"{gap}; how far times by profile {first.time.profile.name} are off is not known, so "
            "take layouts that are a few per cent apart as equal, and measure"
        )
    low, high = (spell(end, "seconds") for end in bar)
    if found.alike == 1:
        return f"{gap}, which is more than the error of the prediction ({low} to {high})"
    return (
        f"{gap}; four of five runs of the first take {low} to {high}, and {found.alike} of these "
        "layouts lie within: none is claimed to be the fastest; measure"
    )


def found_data(found: Found, rows: Sequence[Priced] | None) -> dict[str, Any]:
    """What the search has found, for programs: in seconds and bytes."""
    best = [one.choice for one in rows] if rows else list(found.best)
    return {
        "priced": found.priced,
        "simulated": found.simulated,
        "ruled_out": dict(found.ruled_out),
        "global_batch": found.question.global_batch,
        "sequence": found.question.sequence,
        "within_error": found.alike,
        "best": [_row(one, rows[n] if rows else None) for n, one in enumerate(best)],
    }


def _row(one: Choice, cost: Priced | None) -> dict[str, Any]:
    return {
        "layout": str(one.plan.layout),
        "precision": one.plan.method.precision,
        "devices": one.devices,
        "micro_batch": one.plan.micro_batch,
        "window": one.plan.storage.window,
        "step_seconds": one.seconds,
        "step_seconds_80": one.time.interval,
        "tokens_per_second": one.time.tokens_per_second,
        "memory_bytes": one.peak,
        "free_bytes": one.capacity - one.peak,
        **(cost.takes() if cost else {}),
    }
