"""Chosen algorithms in the predictions: the seconds of their rounds, with contention, and bytes."""

from collections import Counter
from dataclasses import replace

import pytest
from round_steps import plan_of, wires

from howdah.collectives.choice import everywhere
from howdah.collectives.registry import build
from howdah.plan.comm import Algorithms, Comm
from howdah.plan.exchanges import exchanges
from howdah.plan.recording import Wires
from howdah.plan.sums import sums_of
from howdah.sim.chosen import Collective
from howdah.sim.message_times import MessageTimes
from howdah.sim.programs import price
from howdah.sim.step_time import step_time
from howdah.sim.traffic import step_traffic


def chosen(layout, algorithms):
    return replace(plan_of(layout), comm=Comm(algorithms))


def test_a_sum_takes_the_rounds_of_its_program():
    """Each message of a bucket is a program of its own."""
    machine = wires(1e6, nodes=4, per_node=1, latency=0.5)
    for name in ("ring", "tree", "recursive_doubling"):
        plan = chosen("dp4 x1", Algorithms(all_reduce=name))
        row, times = sums_of(plan, 0)[0], MessageTimes(plan, machine)
        prices = [price(build(name, 4), machine, size=4 * n).overlapped for n in row.messages]
        assert times.of_sum(row) == pytest.approx(sum(prices), rel=1e-3)
        own = MessageTimes(plan_of("dp4 x1"), machine).of_sum(row)
        assert (times.of_sum(row) == pytest.approx(own)) == (name == "ring"), "whose time that is"


def test_groups_that_send_at_the_same_time_share_the_cards():
    """Two replicas' groups over two nodes of two ranks with one card: each waits for the other."""
    machine = replace(wires(1e9, 1e6, nodes=2, per_node=2), nics=1)
    plan = chosen("dp2 tp2 x1", Algorithms(all_reduce="ring"))
    (row, *_) = (row for row in sums_of(plan, 0) if row.axis == "dp")
    alone = price(build("ring", 2), machine, size=4 * sum(row.messages), places=[0, 2])
    assert MessageTimes(plan, machine).of_sum(row) == pytest.approx(2 * alone.seconds, rel=1e-3)


def test_exchanges_over_tp_are_priced_once_for_both_halves():
    machine = wires(1e6, per_node=2, latency=1.0)
    plan = chosen("tp2 x1", Algorithms(all_reduce="one_shot"))
    times = MessageTimes(plan, machine)
    for row in exchanges(plan, 0):
        size = row.whole.elements * row.whole.width
        once = price(build("all_reduce/one_shot", 2), machine, size=size).seconds
        second = row.operation == "all_gather"
        assert times.of_exchange(row, 0) == pytest.approx(0 if second else row.times * once)


def test_a_step_is_faster_by_an_algorithm_that_suits_its_machines():
    """Messages so short that rounds decide."""
    machine = wires(1e12, nodes=8, per_node=1, latency=1.0)
    seconds = {
        name: step_time(chosen("dp8 x1", everywhere(name)), machine).seconds
        for name in ("ring", "recursive_doubling")
    }
    assert seconds["recursive_doubling"] < seconds["ring"] / 3


def test_a_hierarchy_sends_between_nodes_what_the_bound_allows():
    """Two nodes of two ranks: half of the vector leaves each rank, where a ring sends 3/2 of it."""
    plan = chosen("dp4 x1", Algorithms(all_reduce="hierarchical"))
    wide = sum(sum(row.messages) for row in sums_of(plan, 0)) * 4
    nodes = Wires("shared", "tcp", nodes=(0, 0, 1, 1))
    rows = [step_traffic(plan, rank, nodes) for rank in range(4)]
    sent = Counter()
    for one in rows:
        sent.update(
            {row.link: count for row, count in one.items() if row.operation == "all_reduce"}
        )
    assert sent["tcp"] == pytest.approx(2 * wide, rel=0.01)
    assert sent["shared"] == pytest.approx(4 * wide, rel=0.01)


def test_sizes_choose():
    """The vector's bytes decide, those of the whole, in the dtype that is sent."""
    rules = Algorithms(all_gather="default to 1 kB, bruck to 4 kB, ring")
    names = []
    for elements in (250, 251, 1000, 1001):
        found = Collective("all_gather", range(4), elements, 4).program(rules, [0] * 4)
        names.append(found.name if found else "")
    assert names == ["", "bruck", "bruck", "ring"]
