"""`howdah validate planner`: predicted times beside those of published runs."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from howdah.base.errors import UserError, nearest, shown
from howdah.draw.columns import columns

if TYPE_CHECKING:
    from howdah.validation.rows import Row

MODES = ("m0", "m1")
validate_app = typer.Typer(no_args_is_help=True, help="Compare predictions with published runs.")


@validate_app.callback()
def _validate() -> None:
    """Compare predictions with published runs."""


@validate_app.command("planner")
def _planner(
    runs: Annotated[Path, typer.Option(help="CSV of published runs")],
    mode: Annotated[
        str, typer.Option(help="m0: as predicted; m1: with a factor from one row of each group")
    ] = "m0",
    as_json: Annotated[bool, typer.Option("--json", help="every row, for programs")] = False,
) -> None:
    """Predict the step time of published runs, and print the errors by source."""
    from howdah.validation.folds import baseline, shipped_constant
    from howdah.validation.judging import calibrated, judge
    from howdah.validation.rows import published_rows
    from howdah.validation.summary import summary

    if mode.lower() not in MODES:
        raise UserError(f"--mode {shown(mode)} is unknown{nearest(mode, MODES)}")
    factor = mode.lower() == "m1"
    rows = published_rows(runs)
    if not rows:
        raise UserError(f"{runs.name} has no rows below its first line; give a CSV of runs")
    judged = judge(_counted(rows))
    beside = baseline(judged, shipped_constant())
    if factor:
        judged, beside = calibrated(judged), calibrated(beside)
    found = summary("m1" if factor else "m0", judged, beside)
    print(json.dumps(found, indent=1) if as_json else "\n".join(_table(found)))


def _counted(rows: "list[Row]") -> "Iterator[Row]":
    """The rows; a terminal sees a bar."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    quiet = not console.is_terminal
    yield from track(rows, "predicting", console=console, disable=quiet, transient=True)


def _table(found: dict[str, Any]) -> list[str]:
    cells = [("source", "rows", "error", "one constant")]
    for one in found["sources"]:
        own, other = f"{one['error']:.1f} %", f"{one['baseline_error']:.1f} %"
        cells.append((one["source"], str(one["rows"]), own, other))
    over = (found[name] for name in ("mean_over_sources", "baseline_mean_over_sources"))
    own, other = (f"{error:.1f} %" for error in over)
    lines = columns([*cells, ("mean over sources", "", own, other)], "<" + 3 * ">")
    order = found["sweeps"]
    if order["count"]:
        lines.append(
            f"order inside {order['count']} sweeps: Kendall's tau {order['tau']:.2f}; regret mean "
            f"{order['regret_mean']:.1f} %, largest {order['regret_max']:.1f} %"
        )
    for one in found["without_prediction"]:
        counted = "refused, counted as 100 %" if one["scored"] else "left out"
        lines.append(f"{one['rows']} rows {counted}: {one['reason']}")
    return lines
