"""Predicted step times beside those of published runs: errors by source and by publisher.

    python bench/planner/run.py                    writes results.md and results.json
    python bench/planner/run.py --data FOLDER      where published/runs.csv lies
    python bench/planner/run.py --page             results.md again, of the last results.json

Takes a few minutes, and no accelerator. README.md says what is compared with what.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from howdah.validation.folds import baseline, constant, publisher_of
from howdah.validation.judging import (
    Judged,
    by_source,
    calibrated,
    judge,
    mean_over_sources,
    refused,
    sweeps,
)
from howdah.validation.rows import published_rows

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[2] / "shared" / "data"
OVER = "mean over sources"
ROW = ("id", "published", "predicted", "M0 error", "M1 error", "why not predicted")
HEADER = ("rows", "M0", "M1", "one constant", "one constant, M1")


def compare(path: Path) -> dict[str, Any]:
    """What results.json holds."""
    judged = judge(published_rows(path))
    beside = baseline(judged)
    every = [judged, calibrated(judged), beside, calibrated(beside)]
    return {
        "mean over sources": dict(zip(HEADER[1:], map(mean_over_sources, every), strict=True)),
        "constant": constant(baseline(judged, 1.0)),
        "sources": _by(every, lambda one: one.row["source"]),
        "publishers": _by(every, lambda one: publisher_of(one.row["source"])),
        "order": in_order(judged),
        "without prediction": [
            {"reason": reason, "counted as 100 %": scored, "rows": rows}
            for (reason, scored), rows in refused(judged).most_common()
        ],
        "said differently": _notes(judged),
        "a row": list(ROW),
        "compared": _rows(judged, every[1]),
    }


def _by(every: Sequence[Sequence[Judged]], key: Any) -> list[dict[str, Any]]:
    """Mean errors of M0, M1 and the baselines; of a publisher the mean over its sources."""
    found: dict[str, dict[str, Any]] = {}
    for name, judged in zip(HEADER[1:], every, strict=True):
        groups: dict[str, list[Judged]] = defaultdict(list)
        for one in judged:
            groups[key(one)].append(one)
        for group, ones in groups.items():
            errors = by_source(ones)
            if name == "M0" and errors:
                found[group] = {"name": group, "rows": sum(map(len, errors.values()))}
            if errors:
                found[group][name] = mean_over_sources(ones)
    return list(found.values())


def in_order(judged: Sequence[Judged]) -> dict[str, Any]:
    """Sweeps by source, and the means over sources."""
    groups = defaultdict(list)
    for one in sweeps(judged):
        groups[one.source].append(one)
    rows: list[dict[str, Any]] = [
        {
            "source": source,
            "sweeps": len(ones),
            "tau": mean(one.tau for one in ones),
            "regret": mean(one.regret for one in ones),
            "largest regret": max(one.regret for one in ones),
        }
        for source, ones in groups.items()
    ]
    over: dict[str, Any] = {}
    if rows:
        over = {name: mean(row[name] for row in rows) for name in ("tau", "regret")}
        over["largest regret"] = max(row["largest regret"] for row in rows)
    return {"sources": rows, OVER: over}


def _notes(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """What plans say differently from their rows, or had to assume, by source."""
    counted: dict[tuple[str, str], int] = defaultdict(int)
    for one in judged:
        for note in one.answer.notes if one.answer else ():
            counted[one.row["source"], note] += 1
    return [
        {"source": source, "note": note, "rows": rows} for (source, note), rows in counted.items()
    ]


def _rows(judged: Sequence[Judged], factored: Sequence[Judged]) -> dict[str, list[Any]]:
    """By source, of each row what `ROW` names."""
    found = defaultdict(list)
    for one, same in zip(judged, factored, strict=True):
        numbers = (one.published, one.predicted, one.error, same.error)
        rounded = (None if number is None else float(f"{number:.4g}") for number in numbers)
        found[one.row["source"]].append([one.row["id"], *rounded, one.reason])
    return dict(found)


def spelled(found: dict[str, Any]) -> str:
    """results.json, with each compared row on a line of its own."""
    text = json.dumps({**found, "compared": {}}, indent=1).removesuffix('"compared": {}\n}')
    rows = (
        f"{json.dumps(source)}: [\n" + ",\n".join(map(json.dumps, ones)) + "\n]"
        for source, ones in found["compared"].items()
    )
    return f'{text}"compared": {{\n' + ",\n".join(rows) + "\n}\n}\n"


# -- goals ---------------------------------------------------------------------------

FITTED, LEFT_OUT = "rows that profiles were fitted to", "publishers that nothing was fitted to"


class Goal(NamedTuple):
    """A figure that was promised: at most `commit`, or at least where `more` is better; `stretch`
    is what was hoped for. `path` leads to it, from the file to the number.
    """

    figure: str
    on: str
    commit: float
    stretch: float
    path: tuple[str, ...]
    unit: str = "%"
    more: bool = False


OWN, SEARCH, MEMORY = "results.json", "../search/results.json", "../memory/results.json"
ORDER, OUT = (OWN, "order", OVER), "left_out.json"
TAU = "Kendall's tau inside sweeps"
GOALS = (
    Goal("M0", LEFT_OUT, 20, 12, (OUT, OVER)),
    Goal("M0", FITTED, 10, 6, (OWN, OVER, "M0")),
    Goal("M1", LEFT_OUT, 8, 5, (OUT, "M1")),
    Goal("M1", FITTED, 8, 5, (OWN, OVER, "M1")),
    Goal(TAU, LEFT_OUT, 0.6, 0.8, (OUT, "order", "tau"), "", more=True),
    Goal(TAU, FITTED, 0.6, 0.8, (*ORDER, "tau"), "", more=True),
    Goal("regret, mean", LEFT_OUT, 4, 2, (OUT, "order", "regret")),
    Goal("regret, mean", FITTED, 4, 2, (*ORDER, "regret")),
    Goal("regret, largest", LEFT_OUT, 20, 8, (OUT, "order", "largest regret")),
    Goal("regret, largest", FITTED, 20, 8, (*ORDER, "largest regret")),
    Goal("memory of states", "rows that publish it", 3, 1, (MEMORY, "means", "states", OVER)),
    Goal("peak memory", "rows that publish it", 5, 1, (MEMORY, "means", "peak", OVER)),
    Goal(
        *("layouts whose closed form is within 10 % of their simulation", "bench/search", 100, 100),
        *((SEARCH, "within 10 %"), "%", True),
    ),
    Goal(
        *("layouts by closed form, a second and core", "bench/search", 1e4, 1e5),
        *((SEARCH, "speed", "layouts"), "", True),
    ),
    Goal(
        *("layouts by simulation, a second and core", "bench/search", 100, 1000),
        *((SEARCH, "speed", "simulations"), "", True),
    ),
)


def goals(results: Mapping[str, Any]) -> str:
    """The table of goals, met or missed.

    results  by name, the content of each file that a path begins with
    """
    lines = []
    for goal in GOALS:
        got: Any = results.get(goal.path[0], {})
        for key in goal.path[1:]:
            got = got.get(key) if got else None
        if got is not None:
            got *= 100 if goal.path[0] == MEMORY else 1
        sign = ">=" if goal.more else "<="
        asked = (f"{sign} {number:,g}{goal.unit}" for number in (goal.commit, goal.stretch))
        lines.append((goal.figure, goal.on, *asked, *_met(goal, got)))
    header = ("figure", "judged on", "goal", "stretch", "got", "")
    return _table(header, lines)


def _met(goal: Goal, got: float | None) -> tuple[str, str]:
    if got is None:
        return "", "not measured"
    held = [got >= n if goal.more else got <= n for n in (goal.commit, goal.stretch)]
    said = "missed" if not held[0] else "met, stretch too" if held[1] else "met"
    decimals = 0 if got >= 100 else 1 if goal.unit else 2
    return f"{got:,.{decimals}f}{goal.unit}", said


def results_beside() -> dict[str, Any]:
    """The other results that goals are judged on."""
    files = {goal.path[0] for goal in GOALS} - {OWN}
    return {name: json.loads((HERE / name).read_text("utf-8")) for name in files}


# -- markdown ----------------------------------------------------------------------


def markdown(found: dict[str, Any], beside: Mapping[str, Any]) -> str:
    """The whole of results.md.

    beside  the other results that goals are judged on
    """
    over = (OVER, "", *(_percent(found[OVER].get(name)) for name in HEADER[1:]))
    parts = [
        "# Step times of published runs: results\n\nWritten by `run.py`; errors are "
        "|ln(predicted / published)| in percent.\n",
        "## Goals\n\nA goal is easier to meet on rows that profiles were fitted to; what was "
        "promised is of publishers that nothing was fitted to (`left_out.md`). That rows which ran "
        "out of memory are refused, and 98 % of those that ran are not, is not judged.\n\n"
        f"{goals({**beside, OWN: found})}",
        f"## By source\n\n{_table(('source', *HEADER), [*_errors(found['sources']), over])}",
        "## By publisher\n\nThe constant is fitted on the rows of the other publishers.\n\n"
        f"{_table(('publisher', *HEADER), _errors(found['publishers']))}",
        f"## Order inside sweeps\n\n{_ordered(found['order'])}",
        "## Without a prediction\n\n"
        + _table(
            ("reason", "counted as 100 %", "rows"),
            [
                (one["reason"], "yes" if one["counted as 100 %"] else "no", one["rows"])
                for one in found["without prediction"]
            ],
        ),
        "## Said differently, or assumed\n\n"
        + _table(
            ("source", "note", "rows"),
            [(one["source"], one["note"], one["rows"]) for one in found["said differently"]],
        ),
    ]
    return "\n".join(parts)


def _errors(rows: Iterable[dict[str, Any]]) -> list[tuple[object, ...]]:
    return [
        (one["name"], one["rows"], *(_percent(one.get(name)) for name in HEADER[1:]))
        for one in rows
    ]


def _ordered(order: dict[str, Any]) -> str:
    lines = [*order["sources"]]
    if order[OVER]:
        lines.append({"source": OVER, "sweeps": "", **order[OVER]})
    names = ("source", "sweeps", "Kendall's tau", "regret", "largest regret")
    return _table(
        names,
        [
            (
                one["source"],
                one["sweeps"],
                f"{one['tau']:.2f}",
                _percent(one["regret"]),
                _percent(one["largest regret"]),
            )
            for one in lines
        ],
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}%"


def _table(header: tuple[str, ...], lines: Iterable[tuple[object, ...]]) -> str:
    rule = tuple("---" for _ in header)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (header, rule, *lines))


def main() -> int:
    """Writes results.md and results.json, and prints the first of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", action="store_true", help="results.md of the last results.json")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of published/")
    asked = parser.parse_args()
    path = asked.data / "published" / "runs.csv"
    if asked.page:
        found = json.loads((HERE / OWN).read_text("utf-8"))
        (HERE / "results.md").write_text(markdown(found, results_beside()), encoding="utf-8")
        return 0
    if not path.is_file():
        print(f"there is no {path}; give the folder of the published runs by --data")
        return 1
    found = compare(path)
    text = markdown(found, results_beside())
    print(text)
    (HERE / "results.md").write_text(text, encoding="utf-8")
    (HERE / OWN).write_text(spelled(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
