"""`algorithm = "auto"`: the ranks measure their hosts' links, and all choose from what rank 0 has.

rank 0        finds the topology of these hosts in its cache, or
all ranks     measure it (`topology.py`), once for each set of hosts
rank 0        tells all of them
every rank    chooses by the prices on it (`sim/selector.py`); each call is compared besides
"""

import logging
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from howdah.base.atomic import write_text
from howdah.base.errors import UserError
from howdah.base.files import read_text
from howdah.comm.settings import read_settings
from howdah.comm.topology import Seen, hosts_of, measured, told_by_first
from howdah.comm.transport import Transport
from howdah.machines.cluster_file import CLUSTERS
from howdah.machines.topology import Kept, cluster_of, parse, spell
from howdah.plan.comm import Algorithms, Comm
from howdah.sim.chosen import settled_comm
from howdah.sim.selector import Shape, is_auto, settle, shapes_of

LARGEST = 4 << 20  # bytes of a topology's file


def settled(transport: Transport, algorithms: Algorithms) -> Algorithms:
    """The algorithms, with what is chosen in place of `auto`: for all ranks together, and for those
    with one place on each host. All ranks of a run call together.
    """
    if not is_auto(algorithms):
        return algorithms
    if len(set(transport.among.wires.nodes)) < 2:
        return settle(algorithms, None, ())
    try:
        kept = topology_of(transport)
    except UserError as problem:  # hosts of unequal numbers of ranks, which every rank sees
        if transport.rank == 0:
            logging.getLogger("howdah").warning(f"algorithm=auto chooses nothing: {problem}")
        return settle(algorithms, None, ())
    each = kept.topology.ranks
    return chosen_on(kept, algorithms, shapes_of(len(kept.topology.hosts), each))


def chosen_on(kept: Kept, algorithms: Algorithms, shapes: Iterable[Shape]) -> Algorithms:
    """The algorithms on measured hosts."""
    cluster = cluster_of(kept.topology)
    comm = settled_comm(Comm(algorithms), cluster, shapes, kept.corrections)
    return comm.algorithm


def topology_of(transport: Transport, *, again: bool = False) -> Kept:
    """The links between the hosts of a group, measured now or before. All ranks call together, and
    get the same.

    again  measure, even if the cache has it

    Raises UserError unless there are several hosts with equal numbers of ranks.
    """
    seen = hosts_of(transport)
    file = file_of(seen)
    found = None if again or transport.rank else read_kept(file, seen)
    told = parse(told_by_first(transport, spell(found) if found else ""))
    if told is None:
        mine = Kept(measured(transport, seen))
        if transport.rank == 0:
            keep(mine, file)
        told = parse(told_by_first(transport, spell(mine)))
    if told is None:
        raise RuntimeError("what rank 0 told of the hosts cannot be read")
    return told


def file_of(seen: Seen) -> Path:
    """Where the topology of a set of hosts is kept: others may have the same names."""
    name = crc32(f"{seen.names} {seen.at} {seen.ranks}".encode())
    return read_settings().cache / CLUSTERS / f"hosts-{name:08x}.json"


def read_kept(file: Path, seen: Seen) -> Kept | None:
    """What is kept of these hosts; None if nothing can be read."""
    try:
        kept = parse(read_text(file, LARGEST))
    except (OSError, UserError, ValueError):
        return None
    there = kept and (kept.topology.hosts, kept.topology.ranks)
    return kept if there == (seen.names, seen.ranks) else None


def keep(kept: Kept, file: Path) -> None:
    """Writes a topology; where it cannot, the next run measures again."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_text(file, spell(kept))
    except OSError as error:
        said = f"the links of the hosts are not kept: {file.parent}: {error.strerror}"
        logging.getLogger("howdah").warning(said)
