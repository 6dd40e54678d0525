"""From turns to results.md: speeds, shares of the bound, who is faster, what overlaps."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from jobs import Job
from measure import WARM_UP, Blocks, together
from on_hosts import OURS, entrants
from summary import AGREE, disagreement, ratios, spread

HEADERS, BESIDE = 1.10, 1 << 20  # bytes that a card sends for one of a message; of a block, others
COLUMNS = (
    *("job", "by", "tokens/s (quartiles)", "howdah ÷ it (quartiles)", "ms of a step"),
    *("processor ms of a rank", "MB of the busiest card", "share of the bound"),
)


def summary(job: Job, ranks: Sequence[Blocks], trace: Sequence[str]) -> dict[str, Any]:
    """What results.json holds of a job. The bound of a step: what must leave the busiest card, or
    the computing alone of the same repeat if that takes longer.
    """
    some = entrants(job)
    blocks: Blocks = {}
    for name in ranks[0]:
        each = zip(*(rank[name] for rank in ranks), strict=True)
        blocks[name] = [
            replace(together(turns), seen=max(turn.seen for turn in turns)) for turns in each
        ]
    took = {
        one.name: [turn.seconds / job.steps for turn in blocks[one.name][WARM_UP:]] for one in some
    }
    bounds = [max(job.link, alone) for alone in took["bound"]]
    rows = {
        one.name: {
            "kind": one.kind,
            "tokens per second": spread([job.tokens / seconds for seconds in took[one.name]]),
            "seconds": spread(took[one.name]),
            "ours beside it": spread(ratios(took[one.name], took[OURS])),
            "share of the bound": spread(ratios(bounds, took[one.name])),
            "processor milliseconds": median(
                1000 * turn.busy / job.steps for turn in blocks[one.name][WARM_UP:]
            ),
            "card": median(turn.seen / job.steps for turn in blocks[one.name][WARM_UP:]),
        }
        for one in some
    }
    trained = [one for one in some if one.kind != "bound"]
    worst = disagreement(blocks, trained)
    leaves = job.leaves
    problems = [
        f"{job.name}: the losses of {name} differ by {most:.1e} from howdah's"
        for name, most in worst.items()
        if not most <= AGREE[job.precision]
    ]
    if not leaves <= rows[OURS]["card"] <= HEADERS * leaves + BESIDE:
        sent = f"{rows[OURS]['card'] / 1e6:.2f} MB, not {leaves / 1e6:.2f}"
        problems.append(f"{job.name}: howdah's busiest card sent {sent}")
    return {
        "job": job.name,
        "tokens per step": job.tokens,
        "seconds of the link": job.link,
        "MB that must leave the busiest card": leaves / 1e6,
        "rows": rows,
        "goals": [goal(name, row) for name, row in rows.items() if row["kind"] == "peer"],
        "largest loss difference": worst,
        "trace": [*trace],
        "problems": problems,
        "seconds of each block": {name: [t.seconds for t in ts] for name, ts in blocks.items()},
    }


def goal(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """No slower than a peer; a tie, where that is between the quartiles of the repeats."""
    beside = row["ours beside it"]
    low, high = beside["quartiles"]
    verdict = "met" if beside["median"] >= 1 else "tie" if low <= 1 <= high else "missed"
    return {"beside": name, "got": beside["median"], "verdict": verdict}


def report(about: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page of the results."""
    goals = [(row["job"], one) for row in rows for one in row["goals"]]
    met = sum(one["verdict"] != "missed" for _, one in goals)
    lines = [f"# Training between hosts: results\n\nWritten by `run.py`. {about}", ""]
    lines += [f"## No slower than a peer: {met} of {len(goals)} met", ""]
    lines += ["| job | howdah ÷ | median of the repeats | |", "|---|---|---|---|"]
    for job, one in goals:
        verdict = "**missed**" if one["verdict"] == "missed" else one["verdict"]
        lines.append(f"| {job} | {one['beside']} | {one['got']:.2f} | {verdict} |")
    lines += ["", "## All contestants", "", f"| {' | '.join(COLUMNS)} |", "|---" * 8 + "|"]
    for row in rows:
        lines += [line(row, name) for name in row["rows"]]
    lines += ["", "## What the link must carry, and what runs beside it", ""]
    lines += ["| job | MB | ms of the link | overlap of a step of howdah's, rank 0 |"]
    lines += ["|---|---|---|---|"]
    for row in rows:
        found = [said.partition(" ")[2].strip() for said in row["trace"] if "overlap" in said]
        cells = [f"{row['MB that must leave the busiest card']:.2f}"]
        cells += [f"{1000 * row['seconds of the link']:.0f}", *found]
        lines.append(f"| {row['job']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def line(row: dict[str, Any], name: str) -> str:
    one = row["rows"][name]
    cells = [row["job"], name, spelled(one["tokens per second"], "{:,.0f}")]
    cells += ["" if name == OURS else spelled(one["ours beside it"], "{:.2f}")]
    cells += [f"{1000 * one['seconds']['median']:.0f}", f"{one['processor milliseconds']:.0f}"]
    cells += [f"{one['card'] / 1e6:.2f}", f"{one['share of the bound']['median']:.0%}"]
    return f"| {' | '.join(cells)} |"


def spelled(found: dict[str, Any], form: str) -> str:
    middle, low, high = (form.format(x) for x in (found["median"], *found["quartiles"]))
    return f"{middle} ({low} to {high})"
