"""From blocks to results.md: who trained the same model, tables, goals."""

from collections.abc import Sequence
from typing import Any

from entrants import entrants, tables
from layouts import Form
from measure import Blocks
from summary import AGREE, compared, disagreement
from tables import goals, table

FAR, FACTOR = 0.7, 1.3  # a peer under 70 % of the bound is to be beaten by 1.3


def summary(case: Form, blocks: Blocks) -> dict[str, Any]:
    """What results.json holds of a case. Who has other losses than howdah is in no table."""
    some = entrants(case)
    trained = [one for one in some if one.kind != "bound"]
    ours = next(one.name for one in trained if one.kind == "ours")
    worst = disagreement(blocks, trained, ours)
    apart = {name for name, most in worst.items() if not most <= AGREE[case.precision]}
    here = [one for one in some if one.name not in apart]
    stages = [
        {"table": name} | compared(case, blocks, [one for one in here if name in one.stages])
        for name in tables(case)
    ]
    return {
        "case": case.name,
        "model": case.model,
        "precision": case.precision,
        "ranks": case.ranks,
        "tokens per step": case.tokens,
        "micro-batches": case.micros,
        "steps in a block": case.steps,
        "blocks": case.blocks,
        "goals": [goal for stage in stages for goal in _goals(stage)],
        "tables": stages,
        "largest loss difference": worst,
        "refused": sorted(apart),
        "seconds of each block": {name: [t.seconds for t in ts] for name, ts in blocks.items()},
    }


def _goals(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """At least the peer, and more where the peer is far from the bound."""
    found = []
    for name, row in stage["rows"].items():
        if row["kind"] == "peer":
            aim = FACTOR if row["share of the bound"]["median"] < FAR else 1.0
            got = row["ours beside it"]["median"]
            found.append(
                {"ours": stage["ours"], "beside": name, "aim": aim, "got": got, "met": got >= aim}
            )
    return found


def problems(one: dict[str, Any]) -> list[str]:
    """Why no speed may be quoted: howdah's own ways differ, or nobody stands beside them."""
    own = [name for name in one["refused"] if name.startswith("howdah")]
    said = [f"{one['case']}: the losses of {name} are not howdah's" for name in own]
    for stage in one["tables"]:
        if all(row["kind"] != "peer" for row in stage["rows"].values()):
            said.append(f"{one['case']}, {stage['table']}: no peer trained the same model")
    return said


def markdown(header: str, summaries: Sequence[dict[str, Any]]) -> str:
    """The whole of results.md."""
    aims = (
        f"no slower than any peer, and {FACTOR} times a peer that is under {FAR:.0%} of the bound"
    )
    parts = [f"# Forms: results\n\nWritten by `run.py`. {header}\n", goals(summaries, aims)]
    return "\n".join([*parts, *map(section, summaries)])


def section(one: dict[str, Any]) -> str:
    """A case: what was trained, who did not take part, its tables."""
    worst = one["largest loss difference"]
    same = max(most for name, most in worst.items() if name not in one["refused"])
    header = (
        f"## {one['case']}\n\n"
        f"{one['ranks']} ranks, {one['tokens per step']} tokens per step over all of them, in "
        f"{one['micro-batches']} micro-batch(es) of each replica; {one['blocks']} blocks of "
        f"{one['steps in a block']} step(s). Largest relative difference of a loss: {same:.1e}.\n"
    )
    header += "".join(
        f"\n{name} is not reported: its losses differ by {worst[name]:.1e}.\n"
        for name in one["refused"]
    )
    return "\n".join([header, *map(table, one["tables"])])
