"""`comm.algorithm = "auto"`: a step sends the bytes of what was chosen, and equals one device."""

from contextlib import closing
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch.distributed as dist
from small_cases import case_of

from howdah.collectives.choice import everywhere
from howdah.comm.rendezvous import choose
from howdah.machines.topology import Pair, Topology, cluster_of
from howdah.plan.comm import Comm
from howdah.sim.chosen import collectives_of, settled_comm, shapes_in
from howdah.sim.traffic import step_traffic
from howdah.verify.compare import compare
from howdah.verify.evidence import gather
from howdah.verify.reference import reference

SLOW = 1e5  # bytes/s of the cards: links decide, and hierarchies win


def gather_on(transport, case, machines):
    """The evidence of ranks that say they are on these machines."""
    rank, store = transport.rank, dist.PrefixStore("machines", transport.among.store)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machines[rank]),
        closing(choose(store, rank=rank, size=transport.size, secret=b"s" * 32)) as wire,
    ):
        return gather(wire, case)


@pytest.mark.parametrize(
    ("layout", "machines"),
    [
        ("dp4 zero1 x2", "aabb"),
        pytest.param("dp4 zero3 x2", "aabb", marks=pytest.mark.slow),
        pytest.param("dp4 zero3 gather=broadcast x2", "abcd", marks=pytest.mark.slow),
    ],
)
def test_bytes_of_what_is_chosen_are_predicted(workers, layout, machines):
    hosts, case = len({*machines}), case_of(layout, steps=1)
    rates = tuple(tuple(SLOW * (a != b) for b in range(hosts)) for a in range(hosts))
    names, inside = tuple(machines[:: 4 // hosts]), Pair(1e9, 1e-6, 1e-7)
    found = Topology(names, 4 // hosts, rates, 1e-4, 1e-5, inside if hosts < 4 else None)
    shapes = shapes_in(case.plan, 4 // hosts)
    comm = settled_comm(Comm(everywhere("auto")), cluster_of(found), shapes)
    case, on = replace(case, comm=comm), [machines.index(name) for name in machines]
    calls = [*collectives_of(case.plan, 0)]
    assert any(call.program(comm.algorithm, [on[r] for r in call.ranks]) for call in calls)
    ranks = workers.run(gather_on, case, machines, ranks=4)
    for rank, evidence in enumerate(ranks):
        predicted = step_traffic(case.plan, rank, evidence.wires)
        assert {row: count for row, count in evidence.sent.items() if count} == predicted
    assert all(d.used <= 1 for d in compare(case, ranks[0], reference(case), None))
