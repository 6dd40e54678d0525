"""From blocks to tables: medians, spreads, ratios block by block, and whether losses agree."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from cases import Case
from measure import WARM_UP, Blocks

US, BOUND = "howdah", "bound"
AGREE = {"float32": 1e-5, "bf16": 3e-2}  # relative; bf16 is rounded at other places by the peers


def summary(case: Case, blocks: Blocks) -> dict[str, Any]:
    """What results.json holds of a case: speeds in tokens per second over both ranks."""
    speeds = {
        name: [case.tokens / turn.seconds for turn in turns[WARM_UP:]]
        for name, turns in blocks.items()
    }
    return {
        "case": case.name,
        "precision": case.precision,
        "tokens per rank and step": case.rows * case.sequence,
        "micro-batches": case.micros,
        "steps in a block": case.steps,
        "blocks": case.blocks,
        "tokens per second": {name: spread(each) for name, each in speeds.items()},
        "howdah beside it": {
            name: spread(ratios(speeds[US], each)) for name, each in speeds.items()
        },
        "share of the bound": {
            name: spread(ratios(each, speeds[BOUND])) for name, each in speeds.items()
        },
        "processor milliseconds per step": {
            name: spread([1000 * turn.busy / case.steps for turn in turns[WARM_UP:]])
            for name, turns in blocks.items()
        },
        "largest loss difference": disagreement(blocks),
        "seconds of each block": {
            name: [t.seconds for t in turns] for name, turns in blocks.items()
        },
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Block by block, so that both of a pair met the same minute of the machine."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(numbers: Sequence[float]) -> dict[str, float]:
    return {"median": median(numbers), "least": min(numbers), "most": max(numbers)}


def disagreement(blocks: Blocks) -> dict[str, float]:
    """The largest relative difference of each peer's losses from howdah's, over all steps.

    The bound trains each rank for itself, so only its first step has the losses of the others.
    """
    ours = _losses(blocks, US)
    worst = {}
    for name in blocks:
        theirs = _losses(blocks, name)[: 1 if name == BOUND else None]
        pairs = zip(theirs, ours, strict=name != BOUND)
        worst[name] = max(abs(a - b) / abs(b) for a, b in pairs)
    return worst


def _losses(blocks: Blocks, name: str) -> list[float]:
    return [loss for turn in blocks[name] for loss in turn.losses]


def refusals(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Sentences on contestants that did not train the same model; then no speed may be quoted."""
    return [
        f"{one['case']}: the losses of {name} differ by {worst:.1e} from howdah's"
        for one in summaries
        for name, worst in one["largest loss difference"].items()
        if not worst <= AGREE[one["precision"]]
    ]


# -- markdown -----------------------------------------------------------------------


def markdown(machine: str, summaries: Sequence[dict[str, Any]]) -> str:
    """The whole of results.md."""
    parts = [f"# Data parallelism: results\n\nWritten by `run.py`. {machine}\n"]
    for precision, note in NOTES.items():
        chosen = [one for one in summaries if one["precision"] == precision]
        if chosen:
            parts += [f"## {precision}\n\n{note}\n", *map(_table, chosen)]
    return "\n".join(parts)


NOTES = {
    "float32": "The same mathematics everywhere.",
    "bf16": "Not the same arithmetic: howdah computes in bf16 weights and keeps float32 masters; "
    "the peers keep float32 weights and compute in torch.autocast. Gradients travel in float32.",
}


def _table(one: dict[str, Any]) -> str:
    header = (
        f"### {one['case']}\n\n"
        f"{one['tokens per rank and step']} tokens per rank and step in {one['micro-batches']} "
        f"micro-batch(es); {one['blocks']} blocks of {one['steps in a block']} step(s). "
        f"{_agreement(one)}\n\n"
        "| | tokens/s, median (least to most) | howdah ÷ it, median (least to most) "
        "| share of the bound | processor ms per step and rank |\n|---|---|---|---|---|\n"
    )
    return header + "".join(_row(one, name) for name in one["tokens per second"])


def _agreement(one: dict[str, Any]) -> str:
    worst = max(one["largest loss difference"].values())
    return f"Largest relative difference of a loss: {worst:.1e}."


def _row(one: dict[str, Any], name: str) -> str:
    speed, share = one["tokens per second"][name], one["share of the bound"][name]
    beside = "" if name == US else _numbers(one["howdah beside it"][name], "{:.3f}")
    busy = one["processor milliseconds per step"][name]["median"]
    left = f"| {name} | {_numbers(speed, '{:,.0f}')} | {beside} |"
    return f"{left} {share['median']:.1%} | {busy:,.0f} |\n"


def _numbers(numbers: dict[str, float], form: str) -> str:
    middle, least, most = (form.format(numbers[key]) for key in ("median", "least", "most"))
    return f"{middle} ({least} to {most})"
