"""Predicted memory beside that of published runs: errors by source, and row by row.

    python bench/memory/run.py                    writes results.md and results.json
    python bench/memory/run.py --data FOLDER      where published/runs.csv lies

Takes seconds, and no accelerator. README.md says what is compared with what.
"""

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from frameworks import GIB, TRIED, framework_of, predict, predict_states
from rows import Row, plan_of, read

from howdah.plan.plan import Plan

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[2] / "shared" / "data"
OVER = "mean over sources"
SPREAD = ("rows", "mean of sizes", "mean", "least", "most")
STATES = re.compile(r"(?:steady allocated|params\+grads\+optimizer) ([\d.]+)")


def compare(path: Path) -> dict[str, Any]:
    """What results.json holds."""
    compared, plans, left_out = [], [], Counter[tuple[str, str]]()
    for row in read(path):
        plan = plan_of(row)
        if isinstance(plan, str):
            left_out[row["source"], plan] += 1
            continue
        plans.append((row, plan))
        one = {
            "id": row["id"],
            "source": row["source"],
            "model": row["model"],
            "layout": f"{plan.layout} micro-batch {plan.micro_batch}",
            **_beside("peak", float(row["mem_gb"]), predict(row, plan, framework_of(row))),
        }
        if stated := STATES.search(row["mem_kind"]):
            one |= _beside("states", float(stated[1]), predict_states(row, plan))
        compared.append(one)
    reasons = [
        {"source": source, "reason": reason, "rows": count}
        for (source, reason), count in sorted(left_out.items())
    ]
    tried = _tried(plans)
    return {"means": means(compared), "compared": compared, "tried": tried, "left out": reasons}


def means(compared: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of peak and states: the mean size of the errors of each source, and over the sources."""
    found = {}
    for what in ("peak", "states"):
        by_source = defaultdict(list)
        for one in compared:
            if what in one:
                by_source[one["source"]].append(abs(one[f"{what} error"]))
        sizes = {source: mean(errors) for source, errors in by_source.items()}
        found[what] = sizes | {OVER: mean(sizes.values())}
    return found


def _tried(plans: list[tuple[Row, Plan]]) -> list[dict[str, Any]]:
    """Errors with the settings that were looked at and not taken."""
    found = []
    for prefix, says, change in TRIED:
        errors = [
            predict(row, plan, change(framework_of(row))) / GIB / float(row["mem_gb"]) - 1
            for row, plan in plans
            if row["source"].startswith(prefix)
        ]
        found.append({"source": prefix, "setting": says, "errors": errors})
    return found


def _beside(what: str, measured: float, predicted: float) -> dict[str, float]:
    told = round(predicted / GIB, 3)
    return {what: measured, f"{what} predicted": told, f"{what} error": told / measured - 1}


# -- markdown ----------------------------------------------------------------------


def markdown(found: dict[str, Any]) -> str:
    """The whole of results.md."""
    by_source = defaultdict(list)
    for one in found["compared"]:
        by_source[one["source"]].append(one)
    parts = ["# Memory of published runs: results\n\nWritten by `run.py`.\n"]
    for what, title in (("peak", "Peak"), ("states", "States alone, where they are published")):
        parts.append(f"## {title}\n\n{_summary(what, by_source, found['means'][what][OVER])}")
    tried = [(one["source"], one["setting"], *_spread(one["errors"])) for one in found["tried"]]
    parts.append(
        "## Settings that were looked at and not taken\n\n"
        "The choice was made on these same rows.\n\n"
        f"{_table(('source', 'instead', *SPREAD), tried)}"
    )
    counts = [(one["source"], one["reason"], one["rows"]) for one in found["left out"]]
    parts.append(f"## Left out\n\n{_table(('source', 'reason', 'rows'), counts)}")
    parts += [f"## {source}\n\n{_rows(ones)}" for source, ones in by_source.items()]
    return "\n".join(parts)


def _summary(what: str, by_source: dict[str, list[dict[str, Any]]], over: float) -> str:
    lines: list[tuple[object, ...]] = []
    for source, ones in by_source.items():
        errors = [one[f"{what} error"] for one in ones if what in one]
        if errors:
            lines.append((source, *_spread(errors)))
    return _table(("source", *SPREAD), [*lines, (OVER, "", f"{over:.1%}", "", "", "")])


def _spread(errors: list[float]) -> tuple[object, ...]:
    edges = (f"{one:+.1%}" for one in (mean(errors), min(errors), max(errors)))
    return len(errors), f"{mean(map(abs, errors)):.1%}", *edges


def _rows(ones: list[dict[str, Any]]) -> str:
    lines = [
        (
            one["id"],
            one["model"],
            one["layout"],
            one["peak"],
            f"{one['peak predicted']:.2f}",
            f"{one['peak error']:+.1%}",
        )
        for one in ones
    ]
    return _table(("id", "model", "layout", "published", "predicted", "error"), lines)


def _table(header: tuple[str, ...], lines: Iterable[tuple[object, ...]]) -> str:
    rule = tuple("---" for _ in header)
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in (header, rule, *lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of published/")
    path = parser.parse_args().data / "published" / "runs.csv"
    if not path.is_file():
        print(f"there is no {path}; give the folder of the published runs by --data")
        return 1
    found = compare(path)
    text = markdown(found)
    print(text.partition("## Left out")[0])
    (HERE / "results.md").write_text(text, encoding="utf-8")
    (HERE / "results.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
