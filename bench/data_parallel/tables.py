"""results.md: goals first, then a table for every case and stage."""

from collections.abc import Sequence
from typing import Any

NOTES = {
    "float32": "The same mathematics everywhere.",
    "bf16": "Not the same arithmetic. howdah, FSDP2 and DeepSpeed multiply bf16 weights and keep "
    "float32 masters; DDP and Accelerate keep float32 weights and compute in torch.autocast. "
    "Gradients travel in float32.",
}
COLUMNS = (
    "",
    "tokens/s, median (least to most)",
    "{ours} ÷ it, median (least to most)",
    "share of the bound",
    "processor ms per step and rank",
    "MB sent per step and rank",
)


def markdown(header: str, summaries: Sequence[dict[str, Any]]) -> str:
    """The whole of results.md."""
    aims = "95 % of the bound; no slower than DDP and Accelerate; 1.2 times FSDP2 and DeepSpeed"
    parts = [f"# Data parallelism: results\n\nWritten by `run.py`. {header}\n"]
    parts.append(goals(summaries, aims))
    for precision, note in NOTES.items():
        chosen = [one for one in summaries if one["precision"] == precision]
        if chosen:
            parts += [f"## {precision}\n\n{note}\n", *map(_case, chosen)]
    return "\n".join(parts)


def goals(summaries: Sequence[dict[str, Any]], aims: str) -> str:
    """Every goal of every case; `aims` says them in words."""
    found = [(one["case"], goal) for one in summaries for goal in one["goals"]]
    met = sum(goal["met"] for _, goal in found)
    rows = "".join(
        f"| {case} | {goal['ours']} ÷ {goal['beside']} | {goal['aim']:.2f} "
        f"| {goal['got']:.3f} | {'met' if goal['met'] else '**not met**'} |\n"
        for case, goal in found
    )
    return (
        f"## Goals\n\n{met} of {len(found)} are met: {aims}.\n\n"
        f"| case | quotient, median | goal | measured | |\n|---|---|---|---|---|\n{rows}"
    )


def _case(one: dict[str, Any]) -> str:
    header = (
        f"### {one['case']}\n\n"
        f"{one['ranks']} ranks, {one['tokens per rank and step']} tokens per rank and step in "
        f"{one['micro-batches']} micro-batch(es); {one['blocks']} blocks of "
        f"{one['steps in a block']} step(s). {_agreement(one)}\n"
    )
    return "\n".join([header, *map(table, one["stages"])])


def _agreement(one: dict[str, Any]) -> str:
    worst = max(one["largest loss difference"].values())
    return f"Largest relative difference of a loss: {worst:.1e}."


def table(stage: dict[str, Any]) -> str:
    """The contestants of a table, ours first."""
    titles = [title.format(ours=stage["ours"]) for title in COLUMNS]
    lines = [titles, ["---"] * len(titles)]
    lines += [_row(name, row, name == stage["ours"]) for name, row in stage["rows"].items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _row(name: str, row: dict[str, Any], ours: bool) -> list[str]:
    return [
        name,
        _numbers(row["tokens per second"], "{:,.0f}"),
        "" if ours else _numbers(row["ours beside it"], "{:.3f}"),
        f"{row['share of the bound']['median']:.1%}",
        f"{row['processor milliseconds per step']['median']:,.0f}",
        _sent(row),
    ]


def _sent(row: dict[str, Any]) -> str:
    """Counted by howdah where it counts, and what the loopback saw where it saw anything."""
    counted, seen = row["bytes counted"], row["bytes on the loopback"]
    if row["kind"] == "bound":
        return "0"
    if counted is None:
        return f"{seen / 1e6:.2f} seen"
    return f"{counted / 1e6:.2f} counted" + (
        f", {seen / 1e6:.2f} seen" if seen > counted / 2 else ""
    )


def _numbers(numbers: dict[str, float], form: str) -> str:
    middle, least, most = (form.format(numbers[key]) for key in ("median", "least", "most"))
    return f"{middle} ({least} to {most})"
