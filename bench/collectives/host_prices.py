"""Prices of what is measured between hosts: by a cell's profile, and what the probe found."""

from typing import Any

from clusters import cluster_of
from host_cases import DEFAULT, GLOO
from profiles import profile_named

from howdah.collectives.choice import chunk_sizes, program_of
from howdah.collectives.counts import leaving
from howdah.collectives.program import Program, split
from howdah.machines.cluster import Cluster
from howdah.machines.topology import Kept, Pair, Topology, spell
from howdah.machines.topology import cluster_of as cluster_of_topology
from howdah.machines.topology import parse as parse_kept
from howdah.plan.comm import Algorithms
from howdah.sim.programs import price
from howdah.sim.selector import Shape, best, direct

Row = dict[str, Any]


def shape_of(row: Row) -> Shape:
    return Shape(*map(int, row["shape"].split("x")))


def probe_of(row: Row) -> Topology:
    """What the hosts' links were found to be before the cell was measured."""
    kept = parse_kept(row["probe"])
    if kept is None:
        raise ValueError(f"the probe of {row['key']} is of another version: measure anew")
    return kept.topology


def probe_text(found: Topology) -> str:
    return spell(Kept(found))


def cluster_for(row: Row) -> Cluster:
    """The profile as a cluster; of the probe, what a message costs."""
    found, shape = probe_of(row), shape_of(row)
    return cluster_of(
        row["profile"],
        profile_named(row["profile"], shape.hosts),
        *shape,
        wire=Pair(0.0, found.latency, found.message),
        inside=found.inside or Pair(1e12, 0.0, 0.0),
    )


def priced(row: Row, text: str, cluster: Cluster) -> tuple[float, float, list[int]]:
    """Seconds, those on the busiest links, and the bytes that leave each host; of gloo's own
    collectives, whose programs are not known, none.
    """
    program, shape = program_for(row, text), shape_of(row)
    if program is None:
        return 0.0, 0.0, []
    found = price(program, cluster, size=row["bytes"])
    left = leaving(program, sizes_of(row, program), lambda rank: rank // shape.each)
    return found.overlapped, found.on_links, [left[host] for host in range(shape.hosts)]


def program_for(row: Row, text: str) -> Program | None:
    """The program of a contestant."""
    shape = shape_of(row)
    ranks = shape.hosts * shape.each
    if text in (GLOO, DEFAULT):
        return direct(row["op"], ranks) if text == DEFAULT else None
    chosen = Algorithms(**{row["op"]: text})
    found = program_of(chosen, row["op"], size=row["bytes"], ranks=ranks, per_node=shape.each)
    return found.program if found else None


def sizes_of(row: Row, program: Program) -> list[int]:
    """Bytes of each chunk, of float32."""
    ranks, elements = program.ranks, row["bytes"] // 4
    counts = [elements]
    if row["op"] not in ("all_reduce", "reduce", "broadcast"):
        counts = split(elements, ranks)
    if row["op"] == "all_to_all":
        counts = counts * ranks
    return [4 * size for size in chunk_sizes(program, counts)]


def chosen_for(row: Row) -> str:
    """What the selector takes on the topology that the probe found, and with what it measured."""
    cluster, kept = cluster_of_topology(probe_of(row)), parse_kept(row["probe"])
    assert kept is not None
    return best(cluster, row["op"], shape_of(row), row["bytes"], kept.corrections)
