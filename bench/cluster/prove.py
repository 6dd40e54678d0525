"""Proves that a box is what its profile says, before anything is timed on it.

    links     raw sockets, as many flows as a collective has: each wire that the flows fill carries
              at least 90 % of its rate in one of three windows, and none carries more than its rate
    counters  an all-reduce of howdah, a rank on each host: its own counters say that all bytes
              went over tcp, and the cards have sent as many, and headers

    python bench/cluster/prove.py                      all profiles, four hosts each
    python bench/cluster/prove.py --profile flat-1g --write

The rates are those of one direction, and of all that a wire carries; a socket gets what the headers
leave (TCP over Ethernet: 95 %).
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from box import Box  # noqa: E402
from profiles import (  # noqa: E402
    MBIT,
    PROFILES,
    Profile,
    fair_rates,
    path,
    profile_named,
    wires,
)

from howdah.base.errors import UserError  # noqa: E402

LEAST, MOST = 0.90, 1.0  # of a wire's rate
FLOWS, COUNTED = HERE / "flows.py", HERE / "counted.py"
PORT = 29700
SECONDS, WINDOWS = 2.0, 3
HEADERS = 1.10  # bytes on the wire per byte of a message, at most
SMALL = 1 << 20  # bytes of a run that are no tensors: the store, the links' opening
Flow = tuple[int, int]
Row = dict[str, Any]


# -- links -------------------------------------------------------------------------


def patterns(hosts: int) -> dict[str, list[Flow]]:
    """Flows that fill wires: to the next host, to the other half, and all pairs."""
    ring = [(h, (h + 1) % hosts) for h in range(hosts)]
    half = [(h, (h + hosts // 2) % hosts) for h in range(hosts)]
    pairs = [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    return {"next": ring, "across": half, "all": pairs} if hosts > 1 else {}


def measured(box: Box, flows: Sequence[Flow], seconds: float = SECONDS) -> list[float]:
    """Mbit/s that each flow got when all sent at once."""
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    python = [sys.executable, "-S", FLOWS]
    takers, senders = [], []
    try:
        for n, (_, to) in enumerate(flows):
            takers.append(box.start(to, [*python, "receive", PORT + n, seconds], **pipes))
        for taker in takers:
            taker.stdout.readline()
        for n, (source, to) in enumerate(flows):
            senders.append(box.start(source, [*python, "send", f"host{to}", PORT + n]))
        for taker in takers:
            taker.stdout.readline()
        for taker in takers:
            taker.stdin.write("go\n")
            taker.stdin.flush()
        told = [taker.stdout.readline().split() for taker in takers]
        return [int(count) * 8 / float(took) / MBIT for count, took in told]
    finally:
        for taker in takers:
            taker.wait()
            taker.stdin.close()
            taker.stdout.close()
        for sender in senders:  # their receiver is gone
            sender.wait()


def links(profile: Profile, flows: Sequence[Flow], got: Sequence[float], hosts: int) -> list[Row]:
    """A row for each wire and direction that the flows fill: its rate, and what it carried."""
    fair, rows = fair_rates(profile, hosts, flows), []
    for wire in wires(profile, hosts):
        for way in (wire.ends, wire.ends[::-1]):
            users = [n for n, flow in enumerate(flows) if way in path(profile, *flow)]
            if sum(fair[n] for n in users) > 0.999 * wire.rate:
                carried = sum(got[n] for n in users)
                rows.append({"from": way[0], "to": way[1], "rate": wire.rate, "carried": carried})
    return rows


def filled(box: Box, flows: Sequence[Flow], seconds: float) -> list[Row]:
    """The rows of `links`, each the best of a few windows: a lost segment can cost a flow one."""
    best: list[Row] = []
    for _ in range(WINDOWS):
        rows = links(box.profile, flows, measured(box, flows, seconds), box.hosts)
        pairs = zip(best or rows, rows, strict=True)
        best = [max(pair, key=lambda row: row["carried"]) for pair in pairs]
        if not faults(best):
            break
    return best


def faults(rows: Iterable[Row]) -> list[str]:
    """A sentence for each wire that is not what its profile says."""
    return [
        f"{row['from']} to {row['to']} carried {row['carried']:.0f} of {row['rate']} Mbit/s"
        for row in rows
        if not LEAST <= row["carried"] / row["rate"] <= MOST
    ]


# -- counters ----------------------------------------------------------------------


def all_reduce(box: Box, elements: int, times: int) -> list[Row]:
    """Bytes of `times` all-reduces by howdah, a rank on each host: as its counters say (by link),
    and as the host's card has counted.
    """
    before = [box.sent(h) for h in range(box.hosts)]
    ranks = [
        box.start(
            h,
            [sys.executable, COUNTED, elements, times],
            env=seat(h, box.hosts),
            stdout=subprocess.PIPE,
            text=True,
        )
        for h in range(box.hosts)
    ]
    told = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise UserError("the ranks of the box have failed; their own words are above")
    return [
        {"host": h, "counted": json.loads(said), "sent": box.sent(h) - before[h]}
        for h, said in enumerate(told)
    ]


def seat(rank: int, size: int, *, port: int = PORT, head: str = "host0") -> dict[str, str]:
    """The variables by which a rank, one a host, finds the others."""
    facts = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    facts |= {"MASTER_ADDR": head, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in facts.items()}


def crossed(row: Row) -> str:
    """Why the bytes of a host did not go as they are counted; empty if they did."""
    over = {link: count for link, count in row["counted"].items() if count}
    if set(over) != {"tcp"}:
        return f"host{row['host']} counted bytes over {', '.join(over) or 'no link'}, not tcp alone"
    if not over["tcp"] <= row["sent"] <= HEADERS * over["tcp"] + SMALL:
        return f"host{row['host']} counted {over['tcp']:,} bytes, its card sent {row['sent']:,}"
    return ""


# -- all of it ---------------------------------------------------------------------


def prove(name: str, hosts: int, *, seconds: float = SECONDS, rates: bool = True) -> Row:
    """A profile's rows and faults. Without `rates` the links are not measured."""
    profile = profile_named(name, hosts)
    found: Row = {"profile": name, "hosts": hosts, "links": [], "faults": []}
    with Box(profile, hosts) as box:
        for pattern, flows in patterns(hosts).items() if rates else ():
            rows = filled(box, flows, seconds)
            found["links"] += [{"flows": pattern, **row} for row in rows]
            found["faults"] += [f"{pattern}: {told}" for told in faults(rows)] * profile.proven
        found["bytes"] = all_reduce(box, 1 << 22, 3)
        found["faults"] += filter(None, map(crossed, found["bytes"]))
    return found


def main() -> int:
    """Proves, prints, and writes results if asked to."""
    from machine import machine
    from quiet import Watch, add_option, sentence

    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--profile", choices=PROFILES, help="this one alone")
    words.add_argument("--hosts", type=int, default=4)
    words.add_argument("--write", action="store_true", help="results.json and results.md")
    add_option(words)
    asked = words.parse_args()
    try:
        watch = Watch(writes=asked.write, loaded=asked.loaded)
        found = [prove(name, asked.hosts) for name in [asked.profile] if name] or [
            prove(name, asked.hosts) for name in PROFILES
        ]
    except UserError as problem:
        print(f"cluster: {problem}", file=sys.stderr)
        return 2
    text = report(found)
    print(text)
    if asked.write:
        noise = watch.end()
        kept = {"machine": machine(), "noise": noise, "profiles": found}
        text = f"{text}\n\n{machine()} {sentence(noise)}"
        (HERE / "results.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
        (HERE / "results.md").write_text(text + "\n", "utf-8")
    return 1 if any(row["faults"] for row in found) else 0


def report(found: Sequence[Row]) -> str:
    """results.md."""
    lines = ["# Links of the cluster in a box", "", "Least and most of what filled wires carried."]
    lines += ["", "| profile | hosts | flows | wires | of their rates | |"]
    lines += ["|---|---|---|---|---|---|"]
    for row in found:
        judged = "" if PROFILES[row["profile"]].proven else "correctness only"
        for flows in dict.fromkeys(link["flows"] for link in row["links"]):
            shares = [one["carried"] / one["rate"] for one in row["links"] if one["flows"] == flows]
            cells = row["profile"], row["hosts"], flows, len(shares), span(shares, ".1%"), judged
            lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Three all-reduces of 16 MiB, a rank on each host: bytes that the cards sent,"]
    lines += ["over the bytes that howdah counted as tcp.", ""]
    lines += ["| profile | sent over counted |", "|---|---|"]
    for row in found:
        shares = [one["sent"] / one["counted"]["tcp"] for one in row["bytes"]]
        lines.append(f"| {row['profile']} | {span(shares, '.3f')} |")
    bad = [f"- {row['profile']}: {told}" for row in found for told in row["faults"]]
    return "\n".join([*lines, "", "Faults:" if bad else "No faults.", *bad])


def span(shares: Sequence[float], spelled: str) -> str:
    """The least and the most."""
    return f"{min(shares):{spelled}} to {max(shares):{spelled}}"


if __name__ == "__main__":
    sys.exit(main())
