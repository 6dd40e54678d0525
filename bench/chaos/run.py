"""Runs the parts of the chaos, and writes results.json and results.md (see README.md).

Rows of parts that were not run again stay as they were.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from disks import disks
from hosts import hosts
from kills import LAYOUTS, kills
from loop import loop
from signals import stops

HERE = Path(__file__).parent
Row = dict[str, Any]
READ: dict[str, Any] = {"capture_output": True, "text": True}

PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "kills": lambda folder: kills(folder, each=10, layouts=LAYOUTS, seed=1),
    "signals": lambda folder: stops(folder, ("dp2", "single")),
    "disks": disks,
    "hosts": hosts,
}


def main() -> None:
    """Runs what is asked for, and writes all that is known."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument(
        "--only", default=",".join((*PARTS, "loop")), help="parts, separated by commas"
    )
    words.add_argument(
        "--steps", type=int, default=24000, help="of the loop's run; enough for 600 s"
    )
    given = words.parse_args()
    asked = [one for one in given.only.split(",") if one]
    parts = PARTS | {"loop": partial(loop, seconds=600, steps=given.steps, seed=1)}
    kept: dict[str, Any] = {}
    if (HERE / "results.json").exists():
        kept = json.loads((HERE / "results.json").read_text())
    for name in asked:
        folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/var/tmp"))
        rows = []
        for row in parts[name](folder):
            rows.append(row)
            print(json.dumps(row), flush=True)
        kept[name] = {"commit": commit(), "rows": rows}
        shutil.rmtree(folder, ignore_errors=True)
        (HERE / "results.json").write_text(without_paths(json.dumps(kept, indent=1)) + "\n")
    (HERE / "results.md").write_text(without_paths(report(kept)))
    failed = [row for part in kept.values() for row in part["rows"] if not survived(row)]
    sys.exit(1 if failed else 0)


def without_paths(text: str) -> str:
    """The same with folders of this machine left out: the last two names of a path tell enough."""
    return re.sub(r"(?:/[\w.@+-]+)+(?=(?:/[\w.@+-]+){2})", "...", text)


def commit() -> str:
    """The commit that was measured, short; with a mark when the tree held more."""
    git = ["git", "-C", str(HERE)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=False, **READ)
    dirty = subprocess.run([*git, "status", "--porcelain"], check=False, **READ)
    return name.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def survived(row: Row) -> bool:
    """Whether a row is as it must be."""
    return bool(row["equal"] if row["kind"] == "end" else row["survived"])


# -- the report --------------------------------------------------------------------


def report(kept: dict[str, Any]) -> str:
    """results.md."""
    lines = ["# How runs end", "", "Seconds are from the strike until no process of the run lives."]
    for name, part in kept.items():
        lines += ["", f"## {name} ({part['commit']})", ""]
        lines += TABLES[name](part["rows"])
        bad = [row for row in part["rows"] if not survived(row)]
        lines += [
            "",
            f"{len(part['rows']) - len(bad)} of {len(part['rows'])} rows are as they must be.",
        ]
        lines += [f"- not so: `{json.dumps(row)[:600]}`" for row in bad]
    if (HERE / "served.json").exists():
        lines += served_table(json.loads((HERE / "served.json").read_text()))
    if (HERE / "fuzz.json").exists():
        lines += fuzz_table(json.loads((HERE / "fuzz.json").read_text()))
    return "\n".join(lines) + "\n"


def served_table(rows: list[Row]) -> list[str]:
    """What `served.py --write` found."""
    *runs, came = rows
    lines = ["", "## served", ""]
    lines += ["| run | steps | killed: workers, servers | applied | lost | twice | loss, alone |"]
    lines += ["|---" * 7 + "|"]
    for row in runs:
        killed, losses = (
            f"{row['workers']}, {row['servers']}",
            f"{row['loss']:.4f}, {row['alone']:.4f}",
        )
        what = row["seed"], row["steps"], killed, row["applied"], row["lost"], row["twice"], losses
        lines.append(f"| {' | '.join(map(str, what))} |")
    fine = "as it must be" if came["survived"] else "not as it must be"
    rest = sum(len(row["left"]) for row in runs) or "nothing"
    told = f"The mean loss is {came['apart']:+.2%} of that of runs left alone; left behind: {rest}"
    return [*lines, "", f"{told}. That is {fine}."]


def fuzz_table(rows: list[Row]) -> list[str]:
    """What `fuzz.py --write` found."""
    lines = ["", "## fuzz", "", "| kind | asked | answered | refused in a sentence | failed |"]
    lines.append("|---|---|---|---|---|")
    for row in rows:
        failed = row["failed"] if isinstance(row["failed"], int) else len(row["failed"])
        what = row["kind"], row["asked"], row["answered"], row["refused"], failed
        lines.append(f"| {' | '.join(map(str, what))} |")
    return lines


def seconds(rows: list[Row]) -> str:
    """Median and worst."""
    took = [row["ended"] for row in rows if row["ended"] >= 0]
    return f"{median(took):.1f} / {max(took):.1f}" if took else "-"


def by(rows: list[Row], key: str) -> Iterator[tuple[str, list[Row]]]:
    """Rows grouped by a column."""
    for name, some in groupby(
        sorted(rows, key=lambda row: str(row[key])), lambda row: str(row[key])
    ):
        yield name, list(some)


def kills_table(rows: list[Row]) -> list[str]:
    """By victim, and by layout."""
    struck = [row for row in rows if row["kind"] == "kill"]
    late = sum(row["steps"] > 0 for row in struck)
    lines = [
        f"{len(struck)} kills, {late} of them after a step of that start.",
        "",
        "| struck | attempts | survived | seconds, median / worst | left behind |",
        "|---|---|---|---|---|",
    ]
    for target, some in by(struck, "target"):
        left = sum(len(row["left"]) for row in some)
        fine = sum(map(survived, some))
        lines.append(f"| {target} | {len(some)} | {fine} | {seconds(some)} | {left or 'nothing'} |")
    lines += ["", "| layout, after ten kills | bits of a run left alone |", "|---|---|"]
    ends = [row for row in rows if row["kind"] == "end"]
    return lines + [
        f"| {row['layout']} | {'equal' if row['equal'] else 'NOT EQUAL'} |" for row in ends
    ]


def signals_table(rows: list[Row]) -> list[str]:
    """By moment."""
    lines = [
        "| moment | stops | survived | seconds, median / worst | codes |",
        "|---|---|---|---|---|",
    ]
    for moment, some in by(rows, "moment"):
        codes: dict[int, int] = defaultdict(int)
        for row in some:
            codes[row["code"]] += 1
        said = ", ".join(f"{code}: {count}" for code, count in sorted(codes.items()))
        fine = sum(map(survived, some))
        lines.append(f"| {moment} | {len(some)} | {fine} | {seconds(some)} | {said} |")
    return lines


def disks_table(rows: list[Row]) -> list[str]:
    """A row each."""
    lines = ["| place | state | exit code | steps of 40 | survived |", "|---|---|---|---|---|"]
    for row in rows:
        fine = "yes" if survived(row) else "NO"
        what = row["place"], row["state"], row["code"], row["steps"], fine
        lines.append(f"| {' | '.join(map(str, what))} |")
    return lines


def hosts_table(rows: list[Row]) -> list[str]:
    """A row each."""
    lines = [
        "| layout | trouble | exit codes | ended after, s | survived |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        told = "-" if row["what"] == "slow" else ", ".join(f"{s:.0f}" for s in row["ended"])
        fine = "yes" if survived(row) else "NO"
        lines.append(f"| {row['layout']} | {row['what']} | {row['codes']} | {told} | {fine} |")
    return lines


def loop_table(rows: list[Row]) -> list[str]:
    """One sentence."""
    (row,) = rows
    bits = "equal" if row["equal"] else "NOT EQUAL"
    return [
        f"{row['layout']}: struck {row['struck']} times in {row['seconds']:.0f} s, started by hand "
        f"{row['starts']} times (a killed launcher starts nothing again); bits of one left alone: "
        f"{bits}."
    ]


TABLES = {
    "kills": kills_table,
    "signals": signals_table,
    "disks": disks_table,
    "hosts": hosts_table,
    "loop": loop_table,
}

if __name__ == "__main__":
    main()
