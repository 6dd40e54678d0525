"""From cells to goals and tables: measured times beside prices, gloo, and the ring's formula."""

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from clusters import rate
from host_cases import (
    GLOO,
    GOOD,
    LINK_BOUND,
    LONG_ENOUGH,
    MIB,
    NEAR,
    NEAR_MEDIAN,
    SHARE,
    formula,
)
from host_prices import Row, chosen_for, cluster_for, priced, probe_of, shape_of
from profiles import PROFILES

from howdah.bench.plot import binary
from howdah.machines.topology import cards_of

CARDS = (0.99, 1.10)  # bytes that a card sent over those of its program: headers, acknowledgements


def judged(rows: Sequence[Row]) -> list[Row]:
    """Each contestant of each cell with its price, and whether its links decide it."""
    found = []
    for row in rows:
        cluster = cluster_for(row)
        for text, one in row["contestants"].items():
            seconds, on_links, leaves = priced(row, text, cluster)
            bound = on_links >= max(LINK_BOUND * seconds, LONG_ENOUGH)
            found.append(
                {
                    **{name: row[name] for name in ("key", "grid", "profile", "shape", "op")},
                    "bytes": row["bytes"],
                    "text": text,
                    "price": seconds,
                    "seconds": one["seconds"],
                    "off": one["seconds"] / seconds - 1 if seconds else None,
                    "link bound": bound and text != GLOO,
                    "cards": cards(row, one, leaves),
                }
            )
    return found


def cards(row: Row, one: Row, leaves: Sequence[int]) -> float | None:
    """Bytes that the busiest card sent over those predicted; None where there are few, or none."""
    most = max(leaves, default=0)
    if most < MIB:
        return None
    return float(one["sent"][leaves.index(most)]) / most


def verdicts(rows: Sequence[Row], *, of: int) -> list[Row]:
    """The goals that these cells can judge, which are some `of` so many."""
    each = [one for one in judged(rows) if one["grid"] != "selector"]
    off = [abs(one["off"]) for one in each if one["link bound"]]
    told = []
    if off:
        near = sum(one <= NEAR for one in off)
        what = f"price against measurement, {len(off)} link-bound"
        told += [
            goal(f"{what}: the farthest", max(off), NEAR, near == len(off)),
            goal(f"{what}: the median", median(off), NEAR_MEDIAN, median(off) <= NEAR_MEDIAN),
        ]
    sent = [one["cards"] for one in each if one["cards"]]
    for name, value in (("least", min(sent)), ("most", max(sent))) if sent else ():
        met = CARDS[0] <= value <= CARDS[1]
        limit = CARDS[name == "most"]
        told.append(goal(f"bytes of the cards over those predicted: the {name}", value, limit, met))
    share = selected(rows)
    if share is not None:
        what = f"the selector is near the best: share of {len(rows)} cells, of {of}"
        told.append(goal(what, share, SHARE, share >= SHARE))
    return told


def goal(what: str, found: float, limit: float, met: bool) -> Row:
    return {"goal": what, "found": found, "limit": limit, "met": met}


def selected(rows: Sequence[Row]) -> float | None:
    """The share of the selector's cells in which what it takes is near the best; None without."""
    near = [is_near(row) for row in rows if row["grid"] == "selector"]
    return sum(near) / len(near) if near else None


def is_near(row: Row) -> bool:
    """Whether what the selector takes is near the best, or within the spread of its blocks: the
    middle three of the five of both overlap.
    """
    took, least = against_best(row)
    if took <= GOOD * least:
        return True
    every = row["contestants"]
    if (taken := every.get(chosen_for(row))) is None:
        return False
    first = min(every.values(), key=lambda one: one["seconds"])
    return bool(sorted(taken["blocks"])[1] <= sorted(first["blocks"])[-2])


def against_best(row: Row) -> tuple[float, float]:
    """Seconds of what the selector takes, and of the best. What was too dear to be measured is as
    slow as the slowest.
    """
    times = {text: one["seconds"] for text, one in row["contestants"].items()}
    return times.get(chosen_for(row), max(times.values())), min(times.values())


# -- markdown -------------------------------------------------------------------------


def report(machine: str, rows: Sequence[Row], told: Sequence[Row]) -> str:
    """The whole of the results' page."""
    parts = [
        f"# Collectives between hosts: results\n\nWritten by `hosts.py`. {machine}",
        goals(told),
    ]
    parts += [wrong(rows)]
    each = judged(rows)
    plain = [one for one in each if one["grid"] in ("link", "tiny")]
    if plain:
        parts += [probes(rows), against_gloo(plain)]
    for (profile, shape, op), group in groupby(
        plain, key=lambda o: (o["profile"], o["shape"], o["op"])
    ):
        parts.append(f"### {profile}, {shape}: {op}\n\n{times([*group])}")
    for (profile, size), group in groupby(
        [one for one in each if one["grid"] == "sweep"], key=lambda o: (o["profile"], o["bytes"])
    ):
        parts.append(f"## Ring in K pieces, {profile}, {binary(size)}\n\n{sweep([*group])}")
    if any(row["grid"] == "selector" for row in rows):
        parts.append(misses(rows))
    return "\n\n".join(part for part in parts if part)


def goals(told: Sequence[Row]) -> str:
    met = sum(one["met"] for one in told)
    lines = [
        f"## Goals: {met} of {len(told)} met",
        "",
        "| goal | limit | found | |",
        "|---|---|---|---|",
    ]
    for one in told:
        verdict = "met" if one["met"] else "**missed**"
        lines.append(f"| {one['goal']} | {one['limit']:.2f} | {one['found']:.3f} | {verdict} |")
    return "\n".join(lines)


def wrong_here(row: Row) -> bool:
    """Whether a contestant of howdah's has given wrong elements."""
    return any(one["wrong"] for text, one in row["contestants"].items() if text != GLOO)


def wrong(rows: Sequence[Row]) -> str:
    """Contestants with wrong elements."""
    lines = [
        f"- {row['key']}: {text} gave {one['wrong']} wrong elements"
        for row in rows
        for text, one in row["contestants"].items()
        if one["wrong"]
    ]
    return "\n".join(["Wrong results:", "", *lines]) if lines else ""


def probes(rows: Sequence[Row]) -> str:
    """What was found of the links before the cells were measured."""
    lines = [
        "## The probe",
        "",
        "Slowest and fastest card, over what the profile says, and messages.",
    ]
    lines += ["", "| profile | hosts | card | a message's way, µs | a rank's work on it, µs |"]
    lines += ["|---|---|---|---|---|"]
    seen = {(row["profile"], row["shape"]): row for row in rows}
    for (profile, shape), row in seen.items():
        found = probe_of(row)
        nominal = [
            rate(PROFILES[profile].slow.get(host, PROFILES[profile].card))
            for host in range(len(found.hosts))
        ]
        shares = [card / of for card, of in zip(cards_of(found), nominal, strict=True)]
        cost = f"{found.latency * 1e6:.0f} | {found.message * 1e6:.0f}"
        lines.append(f"| {profile} | {shape} | {min(shares):.2f} to {max(shares):.2f} | {cost} |")
    return "\n".join(lines)


def against_gloo(each: Sequence[Row]) -> str:
    """The best of howdah beside gloo's own; the better one is named."""
    lines = [
        "## Beside gloo",
        "",
        "| cell | best of howdah | ms | gloo, ms | better |",
        "|---|---|---|---|---|",
    ]
    for key, group in groupby(each, key=lambda one: one["key"]):
        times = {one["text"]: one["seconds"] for one in group}
        peer = times.pop(GLOO, None)
        if peer is None or not times:
            continue
        text = min(times, key=lambda name: times[name])
        better = (
            f"howdah {peer / times[text]:.2f}"
            if times[text] <= peer
            else f"**gloo** {times[text] / peer:.2f}"
        )
        cell = key.split(" ", 1)[1]
        lines.append(f"| {cell} | {text} | {milli(times[text])} | {milli(peer)} | {better} |")
    return "\n".join(lines)


def times(each: Sequence[Row]) -> str:
    """Measured, and the price in brackets; with * where links decide it."""
    sizes = sorted({one["bytes"] for one in each})
    lines = [f"| ms (price) | {' | '.join(map(binary, sizes))} |", f"|---|{'---|' * len(sizes)}"]
    for text in dict.fromkeys(one["text"] for one in each):
        cells = [cell(each, text, size) for size in sizes]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(each: Sequence[Row], text: str, size: int) -> str:
    for one in each:
        if (one["text"], one["bytes"]) == (text, size):
            price = f" ({milli(one['price'])})" if one["price"] else ""
            return f"{milli(one['seconds'])}{price}{'*' * one['link bound']}"
    return ""


def sweep(each: Sequence[Row]) -> str:
    """Pieces, measured, price, and the formula of the lecture."""
    lines = [
        "| K | measured, ms | price, ms | (N-2+K)·S/(K·B), ms | off |",
        "|---|---|---|---|---|",
    ]
    for one in each:
        pieces = int(one["text"].partition("pieces=")[2] or 1)
        hosts = shape_of(one).hosts
        whole = formula(hosts, pieces, one["bytes"], rate(PROFILES[one["profile"]].card))
        told = " | ".join(map(milli, (one["seconds"], one["price"], whole)))
        lines.append(f"| {pieces} | {told} | {one['seconds'] / whole - 1:+.1%} |")
    return "\n".join(lines)


def misses(rows: Sequence[Row]) -> str:
    """Cells in which another algorithm was better by more than a tenth."""
    lines = [
        "## Where another algorithm was better",
        "",
        "| cell | taken | over the best | best |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if row["grid"] != "selector":
            continue
        took, least = against_best(row)
        if took > GOOD * least:
            best = min(row["contestants"], key=lambda text: row["contestants"][text]["seconds"])
            name = row["key"].split(" ", 1)[1]
            lines.append(f"| {name} | {chosen_for(row)} | {took / least:.2f} | {best} |")
    return "\n".join(lines)


def milli(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}"
