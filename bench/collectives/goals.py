"""Collectives between hosts at the bound of the link, beside gloo: writes goals.md, goals.json.

    python bench/collectives/goals.py           every case; some minutes
    python bench/collectives/goals.py --quick   one algorithm a case; less than eight minutes
    python bench/collectives/goals.py --tiny    short vectors, two blocks; writes nothing
    python bench/collectives/goals.py --only "2x2 blocks"      cases whose name holds this; the same

Ranks are on two hosts of two, in blocks (0 and 1 on the first) or dealt (0 and 2), and on four of
one; cards have 1 Gbit/s. README.md says how it is measured.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "cluster"))

import quiet
from box import Box
from clusters import rate
from host_cases import BLOCKS, GLOO, KIB, MIB
from hosts import Ranks
from machine import machine
from profiles import profile_named

from howdah.base.errors import UserError
from howdah.sim.selector import Shape

HERE = Path(__file__).resolve().parent
PROFILE = "flat-1g"
LONG, SHORT = 16 * MIB, 64 * KIB
TINY = 16  # times as short
SECONDS, MOST_CALLS = 0.5, 50  # of a block
TIMES_GLOO = 4.0
PLACES = {  # limit over the bound, and the algorithms of each operation, the likeliest first
    ("2x2 blocks", Shape(2, 2), False): 1.10,
    ("2x2 dealt", Shape(2, 2), True): 1.10,
    ("4x1", Shape(4, 1), False): 1.05,
}
HIERARCHIES = tuple(f"hierarchical pieces={k}" for k in (4, 8, 16))
SEGMENTED = ("segmented_ring pieces=4", "segmented_ring pieces=2", "ring")
CHAINS = ("ring_in_pieces pieces=128", "ring_in_pieces pieces=64", "scatter_all_gather")


@dataclass(frozen=True)
class Case:
    """An operation of one size, its algorithms, and what the best of them is held to: `limit` times
    the bound, or gloo's time over `limit`.
    """

    place: str
    shape: Shape
    dealt: bool
    op: str
    bytes: int
    texts: tuple[str, ...]
    limit: float
    against: str = "bound"

    @property
    def key(self) -> str:
        return f"{self.place} {self.op} {self.bytes}"

    @property
    def bound(self) -> float:
        """Seconds in which the busiest card can send what it must."""
        others = (self.shape.hosts - 1) / self.shape.hosts
        leaves = {"all_reduce": 2 * others, "broadcast": 1.0}.get(self.op, others) * self.bytes
        return leaves / rate(profile_named(PROFILE, self.shape.hosts).card)


def cases() -> list[Case]:
    """Long vectors by four operations, short ones by all-reduce, at each place."""
    found = []
    for (place, shape, dealt), limit in PLACES.items():
        several = shape.each > 1
        for op in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            texts = HIERARCHIES if several else CHAINS if op == "broadcast" else SEGMENTED
            found.append(Case(place, shape, dealt, op, LONG, texts, limit))
        texts = ("recursive_doubling", "default", *(("hierarchical",) if several else ("ring",)))
        found.append(Case(place, shape, dealt, "all_reduce", SHORT, texts, TIMES_GLOO, "gloo"))
    return found


def measured(case: Case, ranks: Ranks, blocks: int) -> dict[str, Any]:
    """Blocks of each contestant in turn, and the bytes that each host's card sent in one call."""
    texts = [*case.texts, GLOO]
    ranks.tell("cell", op=case.op, size=case.bytes, texts=texts)
    rows: dict[str, Any] = {}
    for text in texts:
        before = [ranks.box.sent(host) for host in range(case.shape.hosts)]
        wrong = ranks.tell("check", text=text)
        sent = [ranks.box.sent(host) - was for host, was in enumerate(before)]
        rows[text] = {"sent": sent, "wrong": wrong, "blocks": []}
        took = ranks.tell("block", text=text, calls=1)
        rows[text]["calls"] = max(1, min(MOST_CALLS, int(SECONDS / took)))
    for turn in range(blocks):
        at = turn % len(texts)
        for text in texts[at:] + texts[:at]:
            took = ranks.tell("block", text=text, calls=rows[text]["calls"])
            rows[text]["blocks"].append(took)
    for row in rows.values():
        row["seconds"] = median(row["blocks"])
    return {"case": case.key, "contestants": rows, **judged(case, rows)}


def judged(case: Case, rows: dict[str, Any]) -> dict[str, Any]:
    """What the best algorithm is held to. A tie: the limit is between the quartiles of what its
    blocks give, each beside the block of gloo in the same turn.
    """
    right = [text for text in case.texts if not rows[text]["wrong"]]
    if not right:
        raise UserError(f"{case.key}: every algorithm gave wrong elements")
    best = min(right, key=lambda text: rows[text]["seconds"])
    own, gloo = rows[best], rows[GLOO]
    if case.against == "gloo":
        found = gloo["seconds"] / own["seconds"]
        each = [b / a for a, b in zip(own["blocks"], gloo["blocks"], strict=True)]
        met = found >= case.limit
    else:
        found = own["seconds"] / case.bound
        each = [seconds / case.bound for seconds in own["blocks"]]
        met = found <= case.limit
    first, _, third = quantiles(each, n=4, method="inclusive")
    verdict = "met" if met else "tie" if first <= case.limit <= third else "missed"
    judgement = {"best": best, "against": case.against, "limit": case.limit, "found": found}
    return {**judgement, "verdict": verdict, "bound": case.bound}


def report(about: str, rows: Sequence[dict[str, Any]]) -> str:
    """The page of the results."""
    met = sum(row["verdict"] != "missed" for row in rows)
    lines = [f"# At the bound of the link: results\n\nWritten by `goals.py`. {about}", ""]
    lines += [f"## Goals: {met} of {len(rows)} met", ""]
    lines += ["| case | best | ms | bound, ms | gloo, ms | held to | found | |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for row in rows:
        own, gloo = row["contestants"][row["best"]], row["contestants"][GLOO]
        told = " | ".join(milli(s) for s in (own["seconds"], row["bound"], gloo["seconds"]))
        held = f"{row['limit']:.2f} x the bound" if row["against"] == "bound" else "4 x gloo"
        verdict = "**missed**" if row["verdict"] == "missed" else row["verdict"]
        lines.append(
            f"| {row['case']} | {row['best']} | {told} | {held} | {row['found']:.2f} | {verdict} |"
        )
    lines += ["", "## All contestants", "", "| case | by | ms: median | blocks | card, MB |"]
    lines += ["|---|---|---|---|---|"]
    for row in rows:
        for text, one in row["contestants"].items():
            spread = f"{milli(min(one['blocks']))} to {milli(max(one['blocks']))}"
            wrong = f", **{one['wrong']} wrong**" if one["wrong"] else ""
            card = f"{max(one['sent']) / 1e6:.2f}"
            took = milli(one["seconds"])
            lines.append(f"| {row['case']} | {text}{wrong} | {took} | {spread} | {card} |")
    return "\n".join(lines)


def milli(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--quick", action="store_true", help="one algorithm a case")
    words.add_argument("--tiny", action="store_true", help="to try it; writes nothing")
    words.add_argument("--only", default="", help="cases whose name holds this; writes nothing")
    words.add_argument("--wire", choices=("tcp", "gloo"), default="tcp", help="of howdah")
    quiet.add_option(words)
    asked = words.parse_args()
    alone, rows = asked.tiny or asked.only, []
    blocks = 2 if asked.tiny else BLOCKS
    try:
        watch = quiet.Watch(writes=not alone, loaded=asked.loaded)
        chosen = [case for case in cases() if asked.only in case.key]
        for _, group in groupby(chosen, key=lambda case: case.place):
            some = [*group]
            with Box(profile_named(PROFILE, some[0].shape.hosts), some[0].shape.hosts) as box:
                ranks = Ranks(box, some[0].shape, asked.wire, dealt=some[0].dealt)
                try:
                    for case in some:
                        texts = case.texts[: 1 if asked.quick and case.against == "bound" else None]
                        size = case.bytes // TINY if asked.tiny else case.bytes
                        one = replace(case, texts=texts, bytes=size)
                        rows.append(measured(one, ranks, blocks))
                        print(f"{case.key}: {rows[-1]['found']:.2f}", file=sys.stderr, flush=True)
                finally:
                    ranks.close()
    except UserError as problem:
        print(f"collectives: {problem}", file=sys.stderr)
        return 2
    noise = watch.end()
    text = report(f"{machine()} {quiet.sentence(noise)}", rows)
    print(text)
    if watch.writes:
        kept = {"machine": machine(), "noise": noise, "cases": rows}
        (HERE / "goals.md").write_text(text + "\n", "utf-8")
        (HERE / "goals.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
