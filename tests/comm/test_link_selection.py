"""Ranks of several hosts measure their links, keep them, and choose alike."""

import os
from contextlib import closing, contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from howdah.base.errors import UserError
from howdah.bench.tuning import likely, tuned
from howdah.collectives.choice import everywhere, program_of
from howdah.comm.chosen import choosing
from howdah.comm.rendezvous import choose
from howdah.comm.selection import chosen_on, file_of, keep, settled, topology_of
from howdah.comm.topology import FIRST, Seen, _Probe, hosts_of, measured, told_by_first
from howdah.machines.topology import Kept, Topology, cards_of, cluster_of, parse, spell
from howdah.plan.comm import Algorithms
from howdah.sim.selector import CLEARLY, Shape, best, lines, shapes_of


@contextmanager
def apart(transport, machines, cache):
    """A transport of ranks that say they are on these machines, with a cache of their own."""
    rank, store = transport.rank, dist.PrefixStore("machines", transport.among.store)
    with (
        patch("howdah.comm.meeting.this_machine", lambda: machines[rank]),
        patch("howdah.comm.topology.ENOUGH", 0.002),
        patch.dict(os.environ, {"HOWDAH_CACHE": str(cache / machines[rank])}),
        closing(choose(store, rank=rank, size=transport.size, secret=b"s" * 32)) as wire,
    ):
        yield wire


def measure_twice(transport, machines, cache):
    """The topology as measured, and as kept; what is chosen on it; the bits of a sum by it."""
    with apart(transport, machines, cache) as wire:
        one, other = topology_of(wire), topology_of(wire)
        anew = topology_of(wire, again=True)
        chosen = settled(wire, everywhere("auto"))
        x = torch.arange(5000.0) * (wire.rank + 1)
        choosing(wire, chosen).all_reduce(x)
        return one, other, anew, chosen, x


@pytest.mark.slow
def test_hosts_are_measured_once_and_all_choose_alike(workers, tmp_path):
    ranks = workers.run(measure_twice, "aabb", tmp_path, ranks=4)
    one, other, anew, chosen, _ = ranks[0]
    assert all(found[:4] == (one, other, anew, chosen) for found in ranks)
    assert one == other, "the second time it is read"
    assert anew.topology != one.topology
    assert (tmp_path / "a" / "howdah/clusters").is_dir(), "rank 0 keeps it"
    assert not (tmp_path / "b" / "howdah/clusters").exists()
    topology = one.topology
    assert (len(topology.hosts), topology.ranks) == (2, 2) and topology.inside
    assert min(cards_of(topology)) > 0 and topology.inside.rate > 0 and topology.latency >= 0
    assert chosen == chosen_on(anew, everywhere("auto"), (Shape(2, 1), Shape(2, 2)))
    assert all(torch.equal(x, torch.arange(5000.0) * 10) for *_, x in ranks)


def look(transport, machines, cache):
    with apart(transport, machines, cache) as wire:
        try:
            hosts_of(wire)
        except UserError as problem:
            return str(problem), settled(wire, everywhere("auto"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("machines", "told"),
    [
        ("abbb", "hosts have 1, 3 ranks, or not one after the other: start as many on each"),
        ("abab", "hosts have 2, 2 ranks, or not one after the other"),
        ("aaaa", "all ranks are on one: start more"),
    ],
)
def test_other_hosts_are_refused_and_auto_chooses_nothing(workers, tmp_path, machines, told):
    for problem, chosen in workers.run(look, machines, tmp_path, ranks=4):
        assert told in problem and chosen == Algorithms()


def speak(transport):
    return told_by_first(transport, f"word of {transport.rank}"), told_by_first(transport, "")


def test_the_first_rank_tells_all(workers):
    assert workers.run(speak, ranks=3) == [("word of 0", "")] * 3


def test_a_text_of_groups_is_that_of_its_groups_alone():
    text = Algorithms(all_reduce="4x1: ring | 2x2: hierarchical to 1 MB, ring | double_tree")
    taken = {
        (ranks, each): program_of(text, "all_reduce", size=2048, ranks=ranks, per_node=each).spelled
        for ranks, each in ((4, 1), (4, 2), (4, None), (8, 2), (4, 4))
    }
    assert taken[4, 1] == "ring" and taken[4, 2] == "hierarchical per_node=2"
    assert {taken[4, None], taken[8, 2], taken[4, 4]} == {"double_tree"}
    only = Algorithms(all_reduce="4x1: ring")
    assert program_of(only, "all_reduce", size=8, ranks=4, per_node=2) is None


def test_seen_hosts_have_their_first_ranks():
    seen = Seen((0, 0, 1, 1), ("a", "b"), ("tcp 10.0.0.1", "tcp 10.0.0.2"), (0.0, 0.0))
    assert seen.leads == [0, 2] and seen.ranks == 2


def test_hosts_of_the_same_names_behind_other_wires_and_addresses_have_files_of_their_own():
    names, clocks = ("localhost",) * 2, (0.0, 0.0)
    files = [
        file_of(Seen((0, 1), names, tuple(f"{wire} 10.0.{net}.{n}" for n in (1, 2)), clocks))
        for wire, net in product(("tcp", "gloo"), (0, 1))
    ]
    assert len({*files}) == 4


def tell_addresses(transport, machines, cache):
    with apart(transport, machines, cache) as wire:
        return hosts_of(wire).at


@pytest.mark.slow
def test_ranks_tell_each_other_their_wire_and_address(workers, tmp_path):
    told = workers.run(tell_addresses, "ab", tmp_path, ranks=2)
    assert told == [("tcp 127.0.0.1",) * 2] * 2


def test_what_is_kept_of_others_is_not_taken(workers, tmp_path):
    """The file of another set of hosts, or a damaged one, is measured again."""
    ranks = workers.run(read_after_damage, "aabb", tmp_path, ranks=4)
    assert all(found == ranks[0] for found in ranks)
    assert isinstance(ranks[0], Kept) and ranks[0].topology.hosts[0] != "elsewhere"


def read_after_damage(transport, machines, cache):
    with apart(transport, machines, cache) as wire:
        if wire.rank == 0:
            elsewhere = ("elsewhere",) * 2
            file = file_of(Seen(tuple(wire.among.wires.nodes), elsewhere, elsewhere, (0.0, 0.0)))
        seen = hosts_of(wire)
        if wire.rank == 0:
            wrong = Topology(("elsewhere",) * 2, 2, ((0.0, 1.0), (1.0, 0.0)), 1.0, 1.0)
            keep(Kept(wrong), file)
            os.replace(file, file_of(seen))
        return topology_of(wire)


def tune(transport, machines, cache):
    with (
        apart(transport, machines, cache) as wire,
        patch("howdah.bench.tuning.SIZED", ("all_reduce", "broadcast")),
        patch("howdah.bench.tuning.SIZES", (1 << 10, 1 << 40)),
    ):
        return tuned(wire, topology_of(wire))


def test_the_likeliest_are_measured_and_one_of_them_is_taken(workers, tmp_path):
    """And a vector whose price is too long is left to its price."""
    kept, *others = workers.run(tune, "aabb", tmp_path, ranks=4)
    assert all(one == kept for one in others) and parse(spell(kept)) == kept
    cluster = cluster_of(kept.topology)
    both = shapes_of(2, 2)  # and groups of one rank of each host
    for op, shape in product(("all_reduce", "broadcast"), both):
        prices = lines(cluster, op, shape)
        rows = [row for row in kept.corrections if (row[0], row[2]) == (op, str(shape))]
        found = {text: factor for _, text, *_, factor in rows}
        assert [*found] == [line.text for line in likely(prices, 1 << 10)] and "default" in found
        assert min(found.values()) > 0
        took = {
            p.text: (p.fixed + p.byte * 1024) * found[p.text] for p in prices if p.text in found
        }
        least = min(took, key=took.get)
        wanted = "default" if took["default"] <= CLEARLY * took[least] else least
        assert best(cluster, op, shape, 1 << 10, kept.corrections) == wanted
    assert {row[2:4] for row in kept.corrections} == {("2x1", 1 << 10), ("2x2", 1 << 10)}


@pytest.mark.slow
def test_measuring_needs_no_selection(workers, tmp_path):
    """The probe alone: every flow between hosts has a rate."""
    for found in workers.run(probe, "abcd", tmp_path, ranks=4):
        assert [sum(rate > 0 for rate in row) for row in found.rates] == [3, 3, 3, 3]
        assert found.inside is None


def probe(transport, machines, cache):
    with apart(transport, machines, cache) as wire:
        return measured(wire, hosts_of(wire))


@pytest.mark.parametrize(("short", "rate"), [(1.0, 3 / 4 / 1.0), (2.0, 1 / 2.0), (1.95, 1 / 2.0)])
def test_a_difference_that_is_noise_is_no_rate(monkeypatch, short, rate):
    """It was taken for 196 TB/s, where the longer of two messages came as soon as the shorter."""
    probe = _Probe.__new__(_Probe)
    monkeypatch.setattr(_Probe, "_told", lambda self, value: [value])
    monkeypatch.setattr(
        _Probe, "_seconds", lambda self, size, what: 2.0 if size == FIRST else short
    )
    assert probe._rate(lambda size: size) == pytest.approx(FIRST * rate)
