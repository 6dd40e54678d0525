"""The hosts of a run, measured by the ranks that torchrun has started: `howdah doctor --hosts`, and
`comm.algorithm = "auto"`.
"""

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from howdah.base.errors import UserError, several
from howdah.base.tables import read_table
from howdah.cli.environment import launched
from howdah.cli.errors import in_words
from howdah.config.overrides import changed
from howdah.config.recipe import Machine, Run, plan_of, problems_of
from howdah.machines.topology import cluster_of
from howdah.plan.comm import DIRECT, Hosts
from howdah.plan.layout import parse_layout, resolve
from howdah.sim.chosen import settled_comm, shapes_in
from howdah.sim.selector import is_auto

WAIT = 60.0  # seconds that a measurement waits for ranks that do not come


@dataclass(frozen=True)
class _Words:
    comm: Hosts = field(default_factory=Hosts)


def hosts_in(words: Sequence[str]) -> Hosts:
    """How ranks are connected, by words such as comm.trust=network. Raises UserError for others."""
    table, problems = changed({}, words, _Words)
    read = read_table(_Words, table)
    if problems := [*problems, *read.problems]:
        keys = "--hosts takes comm.wire, comm.trust and comm.interface"
        raise UserError(f"{keys}: {several(problems)}")
    hosts: Hosts = read.value.comm
    return hosts


def doctor_hosts(words: Sequence[str], *, tune: bool) -> int:
    """Measures the links between the hosts, keeps them for `comm.algorithm=auto`, and prints what
    is wrong; the exit code is 1 if something is.

    words  how the ranks are connected
    tune   also time algorithms, and keep how far their prices are off
    """
    hosts = hosts_in(words)
    require_launcher()
    from howdah.bench.tuning import tuned
    from howdah.comm.rendezvous import join
    from howdah.comm.selection import file_of, keep, topology_of
    from howdah.comm.topology import hosts_of, processors
    from howdah.host.hosts import judge_hosts

    with in_words(), closing(join(seconds=WAIT, hosts=hosts)) as transport:
        seen = hosts_of(transport)
        products = processors(transport, seen)
        kept = topology_of(transport, again=True)
        if tune:
            kept = tuned(transport, kept)
        if transport.rank:
            return 0
        if tune:
            keep(kept, file_of(seen))
    findings = judge_hosts(kept.topology, seen.clocks, products)
    for finding in findings:
        print(f"{finding.name:16s} {finding.value}")
        if finding.lack:
            print(f"{'':16s} {finding.lack}")
    if tune:
        print(f"{'corrections':16s} {len(kept.corrections)} prices of algorithms, as measured")
    sys.stdout.flush()
    return 1 if any(finding.lack for finding in findings) else 0


def require_launcher() -> None:
    """Raises UserError unless torchrun has started this process."""
    if not launched():
        words = " ".join(word for word in ("doctor", "bench", "collectives") if word in sys.argv)
        raise UserError(
            "--hosts measures between hosts: start it on each of them by torchrun, as a run "
            f"(torchrun --nnodes N ... -m howdah {words} --hosts)"
        )


def with_algorithms(run: Run, machine: Machine) -> tuple[Run, str]:
    """The run with what is chosen between its hosts in place of `comm.algorithm = "auto"`, and a
    line that says so; empty where nothing was left open. The ranks of several hosts call together.
    """
    if not is_auto(run.comm.algorithm):
        return run, ""
    if machine.world == machine.local_world:
        return replace(
            run, comm=settled_comm(run.comm, None, ())
        ), "the transport's own, on one host"
    undecided = replace(run, comm=replace(run.comm, algorithm=DIRECT, sparse=False))
    if problems_of(undecided, machine.world):
        return run, ""  # `resolve_run` tells them
    layout = resolve(parse_layout(run.layout), machine.world)
    shapes = shapes_in(plan_of(undecided, layout), machine.local_world or layout.world)
    from howdah.comm.rendezvous import join
    from howdah.comm.selection import topology_of

    with in_words(), closing(join(hosts=run.comm.hosts)) as transport:
        try:
            kept = topology_of(transport)
        except UserError as problem:  # hosts of unequal numbers of ranks, which every rank sees
            return replace(run, comm=settled_comm(run.comm, None, ())), f"none: {problem}"
    found = kept.topology
    comm = settled_comm(run.comm, cluster_of(found), shapes, kept.corrections)
    links = f"{len(found.hosts)} hosts, measured {found.date}"
    return replace(run, comm=comm), f"{comm.algorithm or 'none'}, chosen for {links}"
