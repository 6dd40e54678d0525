"""What the seconds and losses of bench/own_model say: who is no slower than whom, and equal."""

from math import isnan, nan
from statistics import median, quantiles
from typing import Any

Turns = dict[str, list[list[float]]]  # by contestant, of each repeat: seconds, and the losses
GOALS = {  # who is no slower than whom
    "howdah dp2": "DDP",
    "howdah dp2 zero1": "DDP",
    "howdah dp2 zero2": "FSDP2, gathered once",
    "howdah dp2 zero3": "FSDP2",
}
LEAST = 1.0  # the peer's seconds over howdah's
NEAR = 1e-3  # of a loss: what other orders of addition leave after the steps of a run


def judged(ranks: list[Turns], pictures: int, *, warm_up: int) -> dict[str, dict[str, Any]]:
    """By contestant: pictures per second, its share of the bound, the largest difference of a loss
    from DDP's, and the verdict on its goal. Of a repeat, a contestant takes as long as its slower
    process.

    ranks     of each process
    pictures  of a repeat, on all processes
    warm_up   the first repeats, of which losses count and seconds do not
    """
    seconds = {
        name: [
            max(turn[0] for turn in turns) for turns in zip(*(r[name] for r in ranks), strict=True)
        ][warm_up:]
        for name in ranks[0]
    }
    found = dict[str, dict[str, Any]]()
    for name, took in seconds.items():
        share = median(b / t for b, t in zip(seconds["bound"], took, strict=True))
        pairs = zip(ranks[0][name], ranks[0]["DDP"], strict=True)
        apart = [abs(a - b) / b for x, y in pairs for a, b in zip(x[1:], y[1:], strict=True)]
        worst = nan if any(map(isnan, apart)) else max(apart)
        speed = pictures / median(took)
        found[name] = {"pictures/s": speed, "of the bound": share, "loss": worst}
    for name, peer in GOALS.items():
        found[name] |= verdict(seconds[name], seconds[peer]) | {"beside": peer}
    return found


def verdict(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """The ratio of the seconds of the same repeats: its median, its quartiles, and whether it is at
    least 1. A tie: 1 is between the quartiles.
    """
    each = [b / a for a, b in zip(ours, theirs, strict=True)]
    first, middle, third = quantiles(each, n=4, method="inclusive") if each[1:] else each * 3
    said = "met" if middle >= LEAST else "tie" if third >= LEAST else "missed"
    return {"times": middle, "quartiles": [first, third], "verdict": said}


def problems(found: dict[str, dict[str, Any]]) -> list[str]:
    """Contestants whose losses are others; the bound exchanges nothing, and is one of them."""
    return [
        f"{name}: a loss differs from DDP's by {one['loss']:.1e} of its value (at most {NEAR:.0e})"
        for name, one in found.items()
        if name != "bound" and not one["loss"] <= NEAR
    ]


def report(about: str, found: dict[str, dict[str, Any]]) -> str:
    """The page of the results."""
    goals = [one["verdict"] for one in found.values() if "verdict" in one]
    counts = ", ".join(f"{goals.count(said)} {said}" for said in ("met", "tie", "missed"))
    lines = ["# resnet18 on two processes", "", about, "", f"Goals: {counts}.", ""]
    lines += ["| who | pictures/s | of the bound | loss apart from DDP's | times the peer | |"]
    lines += ["|---|---|---|---|---|---|"]
    for name, one in found.items():
        loss = "nothing is exchanged" if name == "bound" else f"{one['loss']:.1e}"
        beside = "| "
        if "verdict" in one:
            said = "**missed**" if one["verdict"] == "missed" else one["verdict"]
            low, high = one["quartiles"]
            beside = f"{one['times']:.2f} ({low:.2f} to {high:.2f}) {one['beside']} | {said}"
        cells = f"{one['pictures/s']:.1f} | {one['of the bound']:.0%} | {loss} | {beside}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"
