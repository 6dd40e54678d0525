"""Ranks on several machines: bytes predicted equal bytes counted, on whichever wire they go.

The machines are made up: each rank says that it runs on another than it does. All else is real.
Ranks that share a machine share memory where a group is theirs alone; a group that spans machines
sends messages to all of its ranks, also to those nearby.

    dp2 tp2    ranks 0 1 | 2 3      tp: shared      dp: tcp      world: tcp
"""

from contextlib import closing
from unittest.mock import patch

import pytest
import torch.distributed as dist
from small_cases import case_of

from howdah.comm.rendezvous import choose
from howdah.sim.traffic import step_traffic
from howdah.verify.compare import compare
from howdah.verify.evidence import gather
from howdah.verify.reference import reference

SECRET = b"s" * 32


def gather_on(transport, case, machines):
    """`gather`, on ranks that say they are on these machines."""
    rank, store = transport.rank, dist.PrefixStore("machines", transport.among.store)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machines[rank]),
        closing(choose(store, rank=rank, size=transport.size, seconds=600, secret=SECRET)) as wire,
    ):
        evidence = gather(wire, case)
    return evidence


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "machines", "links"),
    [
        ("dp2 tp2 x2", "aabb", {"dp": {"tcp"}, "tp": {"shared"}, "world": {"tcp"}}),
        ("dp2 tp2 x2", "abbb", {"dp": {"tcp", "shared"}, "tp": {"tcp", "shared"}}),
        ("dp2 tp2 x2", "aaaa", {"dp": {"shared"}, "tp": {"shared"}, "world": {"shared"}}),
        ("dp4 zero2 shard2 x2", "aabb", {"dp": {"tcp", "shared"}}),
        ("dp2 pp2 zero3 x2", "aabb", {"dp": {"shared"}, "pp": {"tcp"}}),
    ],
)
def test_bytes_are_predicted_on_the_wires_that_carry_them(workers, layout, machines, links):
    """All was predicted over tcp as soon as there were two machines."""
    case = case_of(layout, steps=1)
    ranks = workers.run(gather_on, case, machines, ranks=4)
    for rank, evidence in enumerate(ranks):
        predicted = step_traffic(case.plan, rank, evidence.wires)
        assert {row: count for row, count in evidence.sent.items() if count} == predicted
    rows = [row for evidence in ranks for row in evidence.sent]
    for axis, expected in links.items():
        assert {row.link for row in rows if row.axis == axis} == expected
    assert all(d.used <= 1 for d in compare(case, ranks[0], reference(case), None))
