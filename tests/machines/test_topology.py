"""Topologies: the cluster that measured rates mean, and their file."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from howdah.host.hosts import judge_pairs
from howdah.machines.cluster import Level
from howdah.machines.topology import (
    Kept,
    Pair,
    Topology,
    cards_of,
    cluster_of,
    levels,
    parse,
    phases,
    slow_cards,
    spell,
)

CLUSTER = Path(__file__).parents[2] / "bench" / "cluster"


@pytest.fixture
def profiles(monkeypatch):
    """The networks of the cluster in a box, as data."""
    monkeypatch.syspath_prepend(str(CLUSTER))
    yield __import__("profiles")
    sys.modules.pop("profiles", None)


def seen_on(profiles, name, hosts, *, each=1):
    """The topology of a profile whose flows get their fair rates."""
    rates = [[0.0] * hosts for _ in range(hosts)]
    for flows in phases(hosts):
        fair = profiles.fair_rates(profiles.PROFILES[name], hosts, flows)
        for (a, b), rate in zip(flows, fair, strict=True):
            rates[a][b] = rate
    names = tuple(f"host{h}" for h in range(hosts))
    return Topology(names, each, tuple(map(tuple, rates)), 1e-4, 2e-5, None, "today")


@pytest.mark.parametrize("hosts", [2, 3, 4, 5, 8, 16])
def test_in_a_phase_no_host_does_two_things(hosts):
    found = phases(hosts)
    for flows in found:
        busy = [host for flow in flows for host in flow]
        assert len(busy) == len({*busy})
    pairs = [flow for flows in found for flow in flows]
    assert len(pairs) == len({*pairs}) and all(a != b for a, b in pairs)
    assert {a for a, _ in pairs} == {b for _, b in pairs} == {*range(hosts)}
    if hosts <= 8:
        assert len(pairs) == hosts * (hosts - 1)


@pytest.mark.parametrize(
    ("name", "hosts", "slow", "switches"),
    [
        ("flat-1g", 4, {}, ()),
        ("edge-100m", 3, {}, ()),
        ("fat-tree", 4, {}, ()),
        ("slow-card", 4, {1: 250}, ()),
        ("slow-card", 3, {1: 250}, ()),
        ("spine-leaf", 4, {}, (Level(2, 4.0),)),
        ("spine-leaf", 8, {}, (Level(2, 4.0),)),
    ],
)
def test_the_networks_of_the_box_are_found(profiles, name, hosts, slow, switches):
    found = seen_on(profiles, name, hosts)
    assert slow_cards(found) == pytest.approx(slow)
    assert levels(found) == switches
    cluster = cluster_of(found)
    assert dict(cluster.slow) == pytest.approx(slow)
    assert cluster.between.bandwidth == profiles.PROFILES[name].card
    assert [cluster.card(host) for host in range(hosts)] == pytest.approx(cards_of(found))
    assert cluster.between.message == 2e-5 and cluster.nodes == hosts


def test_a_slow_link_of_four_hosts_is_no_leaf_switch(profiles):
    found = seen_on(profiles, "flat-1g", 4)
    rates = [[*row] for row in found.rates]
    rates[1][3] = 100.0
    slow = replace(found, rates=tuple(map(tuple, rates)))
    assert levels(slow) == () and slow_cards(slow) == {}
    assert judge_pairs(slow).lack.startswith("host1 to host3 0 Mbit/s: what is between them")


def test_of_two_hosts_none_is_the_slow_one(profiles):
    found = seen_on(profiles, "slow-card", 2)
    assert slow_cards(found) == {} and cluster_of(found).between.bandwidth == 250


def test_what_is_kept_is_read_again(profiles):
    one = replace(seen_on(profiles, "spine-leaf", 4, each=2), inside=Pair(6e9, 1e-5, 2e-6))
    kept = Kept(one, (("all_reduce", "ring", "4x2", 1024, 1.5),))
    assert parse(spell(kept)) == kept
    assert parse(spell(Kept(replace(one, inside=None)))) == Kept(replace(one, inside=None))


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.pop("topology"),
        lambda table: table.update(file=99),
        lambda table: table["topology"]["rates"].pop(),
        lambda table: table["topology"]["rates"][0].pop(),
        lambda table: table["topology"].update(latency="soon"),
        lambda table: table["topology"].update(latency=-1.0),
        lambda table: table["topology"].update(ranks=0),
        lambda table: table.update(corrections=[["all_reduce"]]),
    ],
)
def test_a_damaged_file_is_measured_again(profiles, damage):
    table = json.loads(spell(Kept(seen_on(profiles, "flat-1g", 4))))
    damage(table)
    assert parse(json.dumps(table)) is None
    assert parse("") is None and parse("[]") is None and parse("{" * 50_000) is None
