"""What the doctor says of the hosts of a run."""

import pytest

from howdah.host.hosts import judge_clocks, judge_hosts
from howdah.machines.topology import Topology

GBIT = 1.2e8


def of(rates, each=1):
    hosts = tuple(f"host{h}" for h in range(len(rates)))
    return Topology(hosts, each, tuple(map(tuple, rates)), 1e-4, 2e-5)


def flat(hosts, slow=()):
    """Rates of one switch; cards in `slow` have a fourth."""
    rate = lambda a, b: 0.0 if a == b else GBIT / (4 if {a, b} & {*slow} else 1)  # noqa: E731
    return of([[rate(a, b) for b in range(hosts)] for a in range(hosts)])


def lacks(found):
    return {finding.name: finding.lack for finding in found if finding.lack}


def test_equal_hosts_lack_nothing():
    found = judge_hosts(flat(4), [0.0, 0.1, -0.1, 0.2], [1e-3, 1.4e-3, 1e-3, 9e-4])
    assert lacks(found) == {}
    values = {finding.name: finding.value for finding in found}
    assert values["hosts"] == "4: host0 host1 host2 host3; 1 rank each"
    assert values["card of host2"] == "960 Mbit/s"
    assert values["messages"] == "100 us on the way, 20 us of a rank's work"


def test_a_slow_card_is_named():
    found = lacks(judge_hosts(flat(4, slow=[2]), [0.0] * 4, [1e-3] * 4))
    assert found.keys() == {"card of host2"}
    assert "4.0 times as slow as the others" in found["card of host2"]


def test_a_slow_processor_is_named():
    found = lacks(judge_hosts(flat(4), [0.0] * 4, [1e-3, 1.1e-3, 4e-3, 9e-4]))
    assert found.keys() == {"processors"}
    assert found["processors"].startswith("host2 takes 3.8 times as long as the others, and all")


def test_a_slow_link_is_named():
    """One direction between two hosts, with cards that others reach at their rate."""
    rates = [[0.0 if a == b else GBIT for b in range(5)] for a in range(5)]
    rates[1][3] = GBIT / 10
    found = lacks(judge_hosts(of(rates), [0.0] * 5, [1e-3] * 5))
    assert found.keys() == {"links"}
    assert found["links"].startswith("host1 to host3 96 Mbit/s: ")


def test_leaf_switches_are_told_and_nothing_is_lacking():
    rates = [[0.0 if a == b else GBIT for b in range(4)] for a in range(4)]
    for a, b in ((a, b) for a in range(4) for b in range(4) if a // 2 != b // 2):
        rates[a][b] = GBIT / 4
    found = judge_hosts(of(rates), [0.0] * 4, [1e-3] * 4)
    assert lacks(found) == {}
    (told,) = [finding.value for finding in found if finding.name == "switches"]
    assert told == "leaves of 2 hosts, whose cards carry 4.0 times what leads up"


@pytest.mark.parametrize(
    ("clocks", "told"),
    [
        ([0.0, 0.5, -0.5], None),
        ([0.0, 18_000.0, 0.2], "host1 is 18,000 s ahead: "),
        ([0.0, -7200.0, -7200.0], "host0 is 7,200 s ahead: "),
        ([0.0, 0.0, -60.0], "host2 is 60 s behind: "),
    ],
)
def test_a_clock_that_differs_is_named(clocks, told):
    finding = judge_clocks(["host0", "host1", "host2"], clocks)
    assert bool(finding.lack) == bool(told)
    assert not told or finding.lack.startswith(told)
