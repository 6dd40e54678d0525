"""Predictions for each publisher by profiles that were fitted to the runs of all others.

    python bench/planner/left_out.py RUNS.csv

Writes left_out.json and left_out.md beside itself, after each publisher: a run that was stopped
goes on where it was. `--anew` begins again.

A profile is fitted again without the publisher's rows, and without rows of the same configurations,
to some rows of each source (`fit.py`). It predicts all rows of the publisher. One that is refused
counts as 100 %, as in `run.py`; M1, the order inside sweeps and the constant are those of `run.py`,
too. A framework of which no other publisher has runs is predicted by the profile that its own is
like, as far as others have runs of that, and else by the generic one, fitted to runs of all
frameworks. Each source counts as much as every other.

The interval of a publisher is what holds four fifths of the others' errors; `plan` prints that of
all publishers. How many of the publisher's own runs it holds says whether it can be believed.

Kinds of devices (profiles/devices.toml) are not fitted again: their values come from other data,
some of it micro-benchmarks of publishers that are left out here.
"""

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from fit import beginning, fitted, rows_of, rows_to_fit, speed_up
from run import OVER, in_order

from howdah.base.errors import UserError
from howdah.sim.profile import Profile, family_of, profile_of
from howdah.validation.folds import configuration, publisher_of
from howdah.validation.judging import (
    Judged,
    by_source,
    calibrated,
    judge,
    mean_over_sources,
    seconds_of,
)
from howdah.validation.plans import Answer, answer
from howdah.validation.rows import Row, published_rows

HERE = Path(__file__).parent
COVERED = 0.8  # of the errors lie inside of the interval
FEWEST = 3  # rows of other publishers that a framework's own profile is fitted to
ROUNDS = 3


def profiles_without(
    rows: Sequence[Answer], publisher: str, own: Sequence[Answer]
) -> dict[str, Profile]:
    """By name, the profiles of a publisher's own rows, fitted to others'.

    rows  of which profiles are fitted to those of others
    """
    seen = {configuration(one) for one in own}
    others = [
        one
        for one in rows
        if publisher_of(one.row["source"]) != publisher and configuration(one) not in seen
    ]
    found: dict[str, Profile] = {}
    fits: dict[str, Profile] = {}
    for name in sorted({profile_of(one.framework).name for one in own}):
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


def weighted(judged: Sequence[Judged]) -> list[tuple[float, float]]:
    """|ln(predicted / published)| of each predicted row, with a weight that makes all sources
    equal.
    """
    there = [one for one in judged if one.predicted]
    often = Counter(one.row["source"] for one in there)
    return [
        (abs(log(one.predicted / one.published)), 1 / often[one.row["source"]]) for one in there
    ]


def summary(judged: Mapping[str, list[Judged]], used: Mapping[str, list[str]]) -> dict[str, Any]:
    """What left_out.md shows.

    judged  by publisher, its rows
    used    by publisher, the profiles that predicted them
    """
    every = [one for ones in judged.values() for one in ones]
    covered, publishers = [], []
    for publisher, ones in judged.items():
        others = [one for name, rows in judged.items() if name != publisher for one in rows]
        spread = quantile(weighted(others), COVERED) if others else 0.0
        errors = weighted(ones)
        covered += [(error <= spread, weight) for error, weight in errors]
        publishers.append(
            {
                "publisher": publisher,
                "sources": len(by_source(ones)),
                "rows": sum(map(len, by_source(ones).values())),
                "refused": sum(not one.predicted for one in ones if one.error is not None),
                "profiles": used[publisher],
                **measures(ones),
                "factor": exp(spread),
            }
        )
    order = in_order(every)
    return {
        OVER: mean_over_sources(every),
        "M1": mean_over_sources(calibrated(every)),
        "rows": sum(one["rows"] for one in publishers),
        "sources": len(by_source(every)),
        "covered": 100 * sum(w for inside, w in covered if inside) / sum(w for _, w in covered),
        "factor": exp(quantile(weighted(every), COVERED)),
        "order": order[OVER],
        "publishers": publishers,
        "by source": [
            {"source": source, "rows": len(errors), "M0": mean(errors)}
            for source, errors in by_source(every).items()
        ],
    }


def measures(judged: Sequence[Judged]) -> dict[str, float | None]:
    """Errors as they are and with one row of each cluster known, and the order inside sweeps."""
    order = in_order(judged)[OVER]
    found = {"error": mean_over_sources(judged), "M1": mean_over_sources(calibrated(judged))}
    return found | {name: order.get(name) for name in ("tau", "regret", "largest regret")}


def markdown(found: dict[str, Any]) -> str:
    def shown(value: float | None, unit: str = "%") -> str:
        return "" if value is None else f"{value:.1f}%" if unit else f"{value:.2f}"

    rows = [
        f"| {one['publisher']} | {one['sources']} | {one['rows']} | {one['refused']} | "
        f"{', '.join(one['profiles'])} | {shown(one['error'])} | {shown(one['M1'])} | "
        f"{shown(one['tau'], '')} | {shown(one['regret'])} | {shown(one['largest regret'])} | "
        f"{one['factor']:.2f} |"
        for one in found["publishers"]
    ]
    sources = [
        f"| {one['source']} | {one['rows']} | {one['M0']:.1f}% |" for one in found["by source"]
    ]
    order, header = found["order"], "publisher | sources | rows | refused | profiles | M0 | M1"
    return "\n".join(
        [
            "# Step times of publishers that nothing was fitted to",
            "",
            "Written by `left_out.py`; errors are |ln(predicted / published)| in percent, 100 of a "
            "row that is refused.",
            "",
            f"Mean over {found['sources']} sources, {found['rows']:,} rows: {found[OVER]:.1f}%; "
            f"with one row of each cluster and framework known, {found['M1']:.1f}%. Inside sweeps "
            f"tau is {shown(order.get('tau'), '')}, the regret {shown(order.get('regret'))}, at "
            f"most {shown(order.get('largest regret'))}. The stated 80 % interval holds "
            f"{found['covered']:.0f}% of the runs of publishers that it was not made from; of all "
            f"publishers it is the time divided and multiplied by {found['factor']:.2f}.",
            "",
            f"| {header} | tau | regret | largest | factor of the others' interval |",
            "|---" * 11 + "|",
            *rows,
            "",
            "| source | rows | M0 |",
            "|---|---|---|",
            *sources,
            "",
        ]
    )


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("runs", type=Path)
    words.add_argument("--anew", action="store_true")
    asked = words.parse_args()
    kept = HERE / "left_out.json"
    done = {} if asked.anew or not kept.exists() else json.loads(kept.read_text())["predicted"]
    sample = rows_to_fit(asked.runs)
    rows: dict[str, list[Row]] = defaultdict(list)
    for row in published_rows(asked.runs):
        rows[publisher_of(row["source"])].append(row)
    judged: dict[str, list[Judged]] = {}
    for publisher, own in rows.items():
        judged[publisher] = predicted_rows(sample, publisher, own, done.get(publisher, {}))
        if not any(one.error is not None for one in judged[publisher]):
            del judged[publisher]
            continue
        by_id = {one.row["id"]: one.predicted for one in judged[publisher] if one.predicted}
        done[publisher] = {"profiles": USED[publisher], "rows": by_id}
        print(publisher, len(by_id), flush=True)
        found = summary(judged, {name: one["profiles"] for name, one in done.items()})
        kept.write_text(json.dumps({**found, "predicted": done}, indent=1) + "\n")
        (HERE / "left_out.md").write_text(markdown(found))


USED: dict[str, list[str]] = {}  # by publisher, the profiles that predicted its rows


def predicted_rows(
    sample: Sequence[Answer], publisher: str, rows: Sequence[Row], known: Mapping[str, Any]
) -> list[Judged]:
    """All of a publisher's rows, predicted by profiles without it, or as is known from before."""
    if known:
        USED[publisher] = known["profiles"]
        return judge(rows, predict=lambda one: seconds_before(one, known["rows"]))
    own = [one for one in map(answer, rows) if isinstance(one, Answer)]
    undo = speed_up()
    profiles = profiles_without(sample, publisher, own)
    undo()
    USED[publisher] = sorted({one.name for one in profiles.values()})
    return judge(
        rows, predict=lambda one: seconds_of(one, profiles[profile_of(one.framework).name])
    )


def seconds_before(one: Answer, rows: Mapping[str, float]) -> float:
    """What an earlier call has predicted. Raises UserError if it was refused then."""
    if one.row["id"] not in rows:
        raise UserError("refused before")
    return rows[one.row["id"]]


if __name__ == "__main__":
    main()
