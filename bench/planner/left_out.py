"""Predictions for each publisher by profiles that were fitted to the runs of all others.

    python bench/planner/left_out.py RUNS.csv

Writes left_out.json and left_out.md beside itself, after each publisher: a run that was stopped
goes on where it was. `--anew` begins again.

A profile is fitted again without the publisher's rows, and without rows of the same configurations.
A framework of which no other publisher has runs is predicted by the profile that its own is like,
as far as others have runs of that, and else by the generic one, fitted to runs of all frameworks.
Each source counts as much as every other.

The interval of a publisher is what holds four fifths of the others' errors; `plan` prints that of
all publishers. How many of the publisher's own runs it holds says whether it can be believed.

Kinds of devices (profiles/devices.toml) are not fitted again: their values come from other data.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from fit import beginning, fitted, rows_of, rows_to_fit, speed_up

from howdah.base.errors import UserError
from howdah.sim.profile import Profile, family_of, profile_of
from howdah.validation.folds import configuration, publisher_of
from howdah.validation.judging import seconds_of
from howdah.validation.plans import Answer

Row = dict[str, Any]
HERE = Path(__file__).parent
COVERED = 0.8  # of the errors lie inside of the interval
FEWEST = 3  # rows of other publishers that a framework's own profile is fitted to
ROUNDS = 3


def profiles_without(rows: list[Answer], publisher: str) -> dict[str, Profile]:
    """By name, the profiles of the publisher's rows, fitted to the others' rows."""
    own = [one for one in rows if publisher_of(one.row["source"]) == publisher]
    seen = {configuration(one) for one in own}
    others = [
        one
        for one in rows
        if publisher_of(one.row["source"]) != publisher and configuration(one) not in seen
    ]
    found: dict[str, Profile] = {}
    fits: dict[str, Profile] = {}
    for name in {profile_of(one.framework).name for one in own}:
        kind, same = name, rows_of(name, others)
        while len(same) < FEWEST and kind != "generic":
            kind = family_of(kind)
            same = rows_of(kind, others)
        if kind not in fits:
            fits[kind] = fitted(same, beginning(kind), rounds=ROUNDS)
        found[name] = fits[kind]
    return found


def quantile(errors: Sequence[tuple[float, float]], share: float) -> float:
    """The error below which `share` of the weight lies; (error, weight) of each row."""
    whole, below = sum(weight for _, weight in errors), 0.0
    for error, weight in sorted(errors):
        below += weight
        if below >= share * whole:
            return error
    return 0.0


def weighted(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """|ln(predicted / published)| of each row, with a weight that makes all sources equal."""
    often = Counter(row["source"] for row in rows)
    return [
        (abs(log(row["predicted"] / row["published"])), 1 / often[row["source"]]) for row in rows
    ]


def summary(done: dict[str, list[Row]]) -> dict[str, Any]:
    """What left_out.md shows."""
    every = [row for rows in done.values() for row in rows]
    covered, found = [], []
    for publisher, rows in done.items():
        others = [row for row in every if row not in rows]
        spread = quantile(weighted(others), COVERED) if others else 0.0
        by_source: dict[str, list[float]] = defaultdict(list)
        for row, (error, weight) in zip(rows, weighted(rows), strict=True):
            by_source[row["source"]].append(error)
            covered.append((error <= spread, weight))
        found.append(
            {
                "publisher": publisher,
                "sources": len(by_source),
                "rows": len(rows),
                "profiles": sorted({row["profile"] for row in rows}),
                "error": 100 * mean(map(mean, by_source.values())),
                "factor": exp(spread),
            }
        )
    sources: dict[str, list[float]] = defaultdict(list)
    for row, (error, _) in zip(every, weighted(every), strict=True):
        sources[row["source"]].append(error)
    return {
        "mean over sources": 100 * mean(map(mean, sources.values())),
        "sources": len(sources),
        "covered": 100 * sum(w for inside, w in covered if inside) / sum(w for _, w in covered),
        "factor": exp(quantile(weighted(every), COVERED)),
        "publishers": found,
    }


def markdown(found: dict[str, Any]) -> str:
    rows = [
        f"| {one['publisher']} | {one['sources']} | {one['rows']} | {', '.join(one['profiles'])} | "
        f"{one['error']:.1f}% | {one['factor']:.2f} |"
        for one in found["publishers"]
    ]
    return "\n".join(
        [
            "# Step times of publishers that nothing was fitted to",
            "",
            "Written by `left_out.py`; errors are |ln(predicted / published)| in percent, M0.",
            "",
            f"Mean over {found['sources']} sources: {found['mean over sources']:.1f}%. The stated "
            f"80 % interval holds {found['covered']:.0f}% of the runs of publishers that it was "
            f"not made from; of all publishers it is the time divided and multiplied by "
            f"{found['factor']:.2f}.",
            "",
            "| publisher | sources | rows | profiles | error | factor of the others' interval |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("runs", type=Path)
    words.add_argument("--anew", action="store_true")
    asked = words.parse_args()
    kept = HERE / "left_out.json"
    done = {} if asked.anew or not kept.exists() else json.loads(kept.read_text())["rows"]
    speed_up()
    rows = rows_to_fit(asked.runs)
    for publisher in dict.fromkeys(publisher_of(one.row["source"]) for one in rows):
        if publisher not in done:
            done[publisher] = predicted_rows(rows, publisher)
            print(publisher, len(done[publisher]), flush=True)
        found = summary(done)
        kept.write_text(json.dumps({**found, "rows": done}, indent=1) + "\n")
        (HERE / "left_out.md").write_text(markdown(found))


def predicted_rows(rows: list[Answer], publisher: str) -> list[Row]:
    """The publisher's rows, predicted by profiles without it; those that can be predicted."""
    profiles, found = profiles_without(rows, publisher), []
    for one in rows:
        if publisher_of(one.row["source"]) == publisher:
            profile = profiles[profile_of(one.framework).name]
            row = {"id": one.row["id"], "source": one.row["source"], "profile": profile.name}
            with suppress(UserError):
                seconds = seconds_of(one, profile)
                found.append({**row, "predicted": seconds, "published": one.published})
    return found


if __name__ == "__main__":
    main()
