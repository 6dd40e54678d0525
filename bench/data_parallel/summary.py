"""From blocks to numbers: medians, spreads, ratios block by block, goals, and refusals."""

from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any

from cases import Case
from contestants import Contestant, contestants
from measure import WARM_UP, Block, Blocks

US = "howdah"
AGREE = {"float32": 1e-5, "bf16": 3e-2}  # relative; bf16 is rounded at other places by the peers
OF_THE_BOUND, OF_SHARING_PEERS = 0.95, 1.2


def summary(case: Case, blocks: Blocks) -> dict[str, Any]:
    """What results.json holds of a case; speeds are tokens per second over all ranks."""
    some = contestants(case)
    stages = [
        {"stage": number} | compared(case, blocks, [one for one in some if number in one.stages])
        for number in (0, 1, 2)
    ]
    return {
        "case": case.name,
        "model": case.model,
        "precision": case.precision,
        "ranks": case.ranks,
        "tokens per rank and step": case.rows * case.sequence,
        "micro-batches": case.micros,
        "steps in a block": case.steps,
        "blocks": case.blocks,
        "goals": [goal for stage in stages for goal in goals(stage)],
        "stages": stages,
        "largest loss difference": disagreement(blocks, some),
        "seconds of each block": {name: [t.seconds for t in ts] for name, ts in blocks.items()},
    }


def compared(case: Case, blocks: Blocks, here: Sequence[Contestant]) -> dict[str, Any]:
    """One table: howdah beside the others that are `here`."""
    (ours,) = (one.name for one in here if one.kind == "ours")
    (bound,) = (one.name for one in here if one.kind == "bound")
    speeds = {one.name: _speeds(case, blocks[one.name]) for one in here}
    return {
        "ours": ours,
        "rows": {
            one.name: {
                "kind": one.kind,
                "tokens per second": spread(speeds[one.name]),
                "ours beside it": spread(ratios(speeds[ours], speeds[one.name])),
                "share of the bound": spread(ratios(speeds[one.name], speeds[bound])),
                "processor milliseconds per step": spread(
                    [1000 * turn.busy / case.steps for turn in blocks[one.name][WARM_UP:]]
                ),
                **_bytes(case, blocks[one.name][WARM_UP:]),
            }
            for one in here
        },
    }


def _speeds(case: Case, turns: Sequence[Block]) -> list[float]:
    return [case.tokens * case.steps / turn.seconds for turn in turns[WARM_UP:]]


def _bytes(case: Case, turns: Sequence[Block]) -> dict[str, float | None]:
    """Per rank and step. Of the loopback the least turn: what others send only adds to it. What is
    counted is the same in all turns, except where routers choose how much is sent: then its median.
    """
    share = case.ranks * case.steps
    counts = [turn.counted for turn in turns if turn.counted is not None]
    steady = case.shape.experts is None
    assert len({*counts}) <= 1 or not steady, "howdah counted different bytes in equal turns"
    return {
        "bytes counted": median(counts) / share if counts else None,
        "bytes on the loopback": min(turn.seen for turn in turns) / share,
    }


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Block by block, so that both of a pair met the same minute of the machine."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(numbers: Sequence[float]) -> dict[str, Any]:
    """The median, the quartiles (the numbers are all there are), least and most."""
    one = len(numbers) == 1
    low, _, high = numbers * 3 if one else quantiles(numbers, n=4, method="inclusive")
    found = {"median": median(numbers), "least": min(numbers), "most": max(numbers)}
    return found | {"quartiles": [low, high]}


# -- goals --------------------------------------------------------------------------


def goals(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """What was aimed at in a stage: the least that meets, what came out, and whether it met."""
    found = []
    for name, row in stage["rows"].items():
        aim = OF_THE_BOUND
        if row["kind"] == "peer":
            aim = OF_SHARING_PEERS if stage["stage"] else 1.0
        if row["kind"] in ("bound", "peer"):
            got = row["ours beside it"]["median"]
            goal = {"ours": stage["ours"], "beside": name, "aim": aim, "got": got}
            found.append(goal | {"met": got >= aim})
    return found


# -- whether they trained the same model ---------------------------------------------


def disagreement(blocks: Blocks, some: Sequence[Contestant], ours: str = US) -> dict[str, float]:
    """The largest relative difference of each one's losses from those of `ours`, over all steps.

    In a bound nobody hears the others, so only its first step has their losses.
    """
    wanted, worst = _losses(blocks, ours), {}
    for one in some:
        bound = one.kind == "bound"
        theirs = _losses(blocks, one.name)[: 1 if bound else None]
        pairs = zip(theirs, wanted, strict=not bound)
        worst[one.name] = max(abs(a - b) / abs(b) for a, b in pairs)
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
