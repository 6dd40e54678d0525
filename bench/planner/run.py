"""Predicted step times beside those of published runs: errors by source and by publisher.

    python bench/planner/run.py                    writes results.md and results.json
    python bench/planner/run.py --data FOLDER      where published/runs.csv lies

Takes a few minutes, and no accelerator. README.md says what is compared with what.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

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
        "order": _order(judged),
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


def _order(judged: Sequence[Judged]) -> dict[str, Any]:
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


# -- markdown ----------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """The whole of results.md."""
    over = (OVER, "", *(_percent(found[OVER].get(name)) for name in HEADER[1:]))
    parts = [
        "# Step times of published runs: results\n\nWritten by `run.py`; errors are "
        "|ln(predicted / published)| in percent.\n",
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
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of published/")
    path = parser.parse_args().data / "published" / "runs.csv"
    if not path.is_file():
        print(f"there is no {path}; give the folder of the published runs by --data")
        return 1
    found = compare(path)
    text = markdown(found)
    print(text)
    (HERE / "results.md").write_text(text, encoding="utf-8")
    (HERE / "results.json").write_text(spelled(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
