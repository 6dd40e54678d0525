"""From blocks to tables: best and median, ratios, shares of the bound, goals met or not."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from cases import Case, goals

from howdah.bench.collectives import BOUND, Blocks


def summary(case: Case, blocks: dict[str, Blocks]) -> dict[str, Any]:
    """What results.json holds of a case. Times are microseconds of a call."""
    bound = min(blocks[BOUND].seconds)
    found = {}
    for one in case.contestants:
        turns, peer = blocks[one.name], blocks[one.peer]
        best, middle = min(turns.seconds), median(turns.seconds)
        found[one.name] = {
            "best": 1e6 * best,
            "median": 1e6 * middle,
            "share of the bound": bound / best,
            "peer": one.peer,
            "peer over it, best": min(peer.seconds) / best,
            "peer over it, median": median(peer.seconds) / middle,
            "calls in a block": turns.calls,
            "wrong elements": turns.wrong,
            "blocks": [1e6 * seconds for seconds in turns.seconds],
        }
    return {"case": case.name, "ranks": case.ranks, "contestants": found}


def refusals(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on results that were wrong; then no time may be quoted."""
    return [
        f"{one['case']}: {name} gave {found['wrong elements']} wrong elements"
        for one in summaries
        for name, found in one["contestants"].items()
        if found["wrong elements"]
    ]


def verdicts(summaries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every goal whose case was measured: how many times as fast was wanted, and was found."""
    by_name = {one["case"]: one["contestants"] for one in summaries}
    told = []
    for goal in goals():
        found = by_name.get(goal.case)
        if found is not None:
            times = found[goal.peer]["best"] / found[goal.contestant]["best"]
            told.append(
                {
                    "case": goal.case,
                    "contestant": goal.contestant,
                    "peer": goal.peer,
                    "goal": goal.factor,
                    "found": times,
                    "met": times >= goal.factor,
                }
            )
    return told


# -- markdown -----------------------------------------------------------------------


def markdown(machine: str, summaries: Sequence[dict[str, Any]]) -> str:
    """The whole of results.md."""
    parts = [f"# Collectives: results\n\nWritten by `run.py`. {machine}\n", _goals(summaries)]
    for ranks in sorted({one["ranks"] for one in summaries}):
        parts.append(f"## {ranks} ranks\n")
        parts += [_table(one) for one in summaries if one["ranks"] == ranks]
    return "\n".join(parts)


def _goals(summaries: Sequence[dict[str, Any]]) -> str:
    told = verdicts(summaries)
    met = sum(one["met"] for one in told)
    lines = [
        f"## Goals: {met} of {len(told)} met\n",
        "Best block against best block; how many times as fast.\n",
        "| case | of | against | goal | found | |",
        "|---|---|---|---|---|---|",
    ]
    for one in told:
        numbers = f"{one['goal']:g} | {one['found']:.2f} | {'met' if one['met'] else '**not met**'}"
        lines.append(f"| {one['case']} | {one['contestant']} | {one['peer']} | {numbers} |")
    return "\n".join(lines) + "\n"


def _table(one: dict[str, Any]) -> str:
    count = len(one["contestants"][BOUND]["blocks"])
    header = (
        f"### {one['case']}\n\n{count} block(s) of each.\n\n"
        "| | best, µs | median, µs | gloo ÷ it, best | gloo ÷ it, median | share of the bound |\n"
        "|---|---|---|---|---|---|\n"
    )
    return header + "".join(_row(name, found) for name, found in one["contestants"].items())


def _row(name: str, found: dict[str, Any]) -> str:
    times = f"{found['best']:,.1f} | {found['median']:,.1f}"
    ratios = f"{found['peer over it, best']:.2f} | {found['peer over it, median']:.2f}"
    if name in (BOUND, found["peer"]):
        ratios = " | "
    return f"| {name} | {times} | {ratios} | {found['share of the bound']:.1%} |\n"
