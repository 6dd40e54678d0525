"""Draws where algorithms cross: all-reduces on four hosts at 1 Gbit/s, by size.

    python bench/collectives/crossovers.py       writes crossovers.svg

From hosts.json where it is there, as measured; else by prices, with the cost of a message that
`rack-1gbe` has. The drawing says which.
"""

import json
from pathlib import Path

from howdah.bench.plot import Point, draw_lines
from howdah.machines.cluster import attained
from howdah.machines.cluster_file import load_cluster
from howdah.sim.selector import SIZES, Shape, lines

HERE = Path(__file__).resolve().parent
SHAPE, OP, PROFILE = Shape(4, 1), "all_reduce", "flat-1g"
DRAWN = ("default", "ring", "recursive_doubling", "halving_doubling", "naive", "one_shot", "gloo")
TITLE = f"{OP} on four hosts at 1 Gbit/s: bytes over seconds"


def measured() -> dict[str, list[Point]]:
    """Points of each algorithm in hosts.json."""
    found: dict[str, list[Point]] = {}
    for row in json.loads((HERE / "hosts.json").read_text("utf-8"))["cells"]:
        if (row["profile"], row["shape"], row["op"]) == (PROFILE, str(SHAPE), OP):
            for text, one in row["contestants"].items():
                found.setdefault(text, []).append((row["bytes"], row["bytes"] / one["seconds"]))
    return {text: sorted(points) for text, points in found.items()}


def priced() -> dict[str, list[Point]]:
    """The same by prices."""
    cluster = attained(load_cluster("rack-1gbex4"))
    return {
        line.text: [(size, size / (line.fixed + line.byte * size)) for size in SIZES]
        for line in lines(cluster, OP, SHAPE)
    }


def main() -> None:
    there = (HERE / "hosts.json").is_file()
    found, told = (measured(), "measured") if there else (priced(), "by prices on rack-1gbex4")
    drawn = {text: found[text] for text in DRAWN if text in found}
    (HERE / "crossovers.svg").write_text(draw_lines(TITLE, told, drawn), "utf-8")


if __name__ == "__main__":
    main()
