"""What is kept off the device, priced: by hand in round seconds, and against the list of moves.

A block's forward takes 1 s and its backward 2 s, as in test_rank_clock.py; embedding and head take
no time and next to no bytes. So the picture of each test has whole or half seconds.
"""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_steps import SHAPE, block_bytes, clock_of, plan_of, wires

from howdah.machines.cluster import Host, Link
from howdah.machines.cluster_file import load_cluster
from howdah.plan.batch import Batch
from howdah.plan.homes import moves
from howdah.plan.layout import parse_layout, resolve
from howdah.plan.method import Adapter, Method
from howdah.plan.plan import make_plan
from howdah.plan.sharding import local_buffers
from howdah.plan.storage import Storage
from howdah.plan.sums import sums_of
from howdah.shapes.presets import preset
from howdah.sim import home_times
from howdah.sim.home_times import LANES, _in_turns, _Turn, lane_of, lane_speeds
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import kept_elsewhere, moved_activations
from howdah.sim.step_time import step_time

ALL = "weights={0} gradients={0} optimizer={0}"


def near(*seconds):
    return pytest.approx(seconds, abs=0.05)


def ran(words, link, disk=0.0, window=2, shape=SHAPE):
    """The ends of the forward and the backward pass of one micro-batch, and that of the moves of
    its gradients, with links of so many bytes/s.
    """
    plan, machine = plan_of(words, shape), wires(1e30, per_node=1)
    plan = replace(plan, storage=Storage(window=window))
    host = Host(1.0, Link("pcie", link, 0.0), disk=1.0, disk_bandwidth=disk)
    clock, _, program = clock_of(plan, replace(machine, host=host))
    ahead = clock.end(program[0], 0.0)
    back = clock.end(program[1], ahead)
    return ahead, back, clock.summed(program[1])


BLOCK = block_bytes(plan_of("single x1"))


def test_weights_come_during_the_unit_before():
    """fetch    |0|  |1|  |2|       |2|     |1|       |0|        half a second each
    compute    | |  0  |  1  |  2  | |   layers.2   |   layers.1   |   layers.0   |
    """
    words = "single x1 weights=host optimizer=host"
    assert ran(words, 2 * BLOCK)[:2] == near(3.5, 10)


def test_weights_that_come_slowly_are_waited_for():
    """fetch    |  0  |  1  |  2  |   |  2  |  1  | |  0  |      one and a half seconds each
    compute    |     | 0 | | 1 | | 2 |    |   layers.2   |...
    """
    assert ran("single x1 weights=host optimizer=host", BLOCK / 1.5)[:2] == near(5.5, 13)


def test_rows_of_the_embedding_are_read_before_it():
    """On a link that is never idle, all that follows is later by the rows: 8 of 1024 columns.
    fetch    |layers.0 |rows|layers.1 |layers.2 |
    compute                 |embedding, 0 |    |1 |     |2 |
    """
    words, link = "single x1 weights=host optimizer=host", 16 * 1024
    table = replace(SHAPE, vocab=9, tie_embeddings=False)
    none = property(lambda _: [], lambda *_: None)
    with patch.object(home_times.HomeMoves, "rows", none, create=True):
        without = ran(words, link, shape=table)
    assert ran(words, link, shape=table)[0] - without[0] == pytest.approx(8 * 1024 * 4 / link)


def test_what_is_frozen_comes_in_its_time_and_is_not_updated():
    """Every byte of weights that moves in the passes is in the time of its unit."""
    words = f"single x1 {ALL.format('host')}"
    adapter = Adapter(rank=2, targets=("q", "down"))
    layout = resolve(parse_layout(words), None)
    method = Method("float32", adapter=adapter)
    plan = make_plan(SHAPE, layout, Batch(micro_batch=1), sequence=8, method=method)
    cluster = load_cluster("h100x8")
    found = home_times.HomeMoves(plan, cluster, 0, sums_of(plan, 0), first=0)
    speed = home_times.lane_speeds(plan, cluster)["fetch"]
    wanted = Counter()
    for move in moves(plan, 0):
        if move.what == "weights" and not move.update:
            wanted[move.unit.removeprefix("frozen.")] += move.bytes / speed
    assert {unit: seconds for unit, (_, seconds) in found.fetches.items()} == pytest.approx(wanted)
    held = local_buffers(plan, 0)
    trained = sum(buffer.length for buffer in held if buffer.trains)
    assert trained < sum(buffer.length for buffer in held) / 10
    took = [home_times.update_seconds(plan, cluster, 0, held, element=e) for e in (1.0, 2.0)]
    assert took[1] - took[0] == pytest.approx(trained)


def test_a_wider_window_lets_the_link_work_ahead_and_keeps_the_last_blocks():
    """With three units, the head among them, and then with all:

    fetch    |  0  |  1  |  2  |    |  0  |
    compute        | 0 | | 1 | | 2 |   layers.2   |   layers.1   |   layers.0   |
    """
    words = "single x1 weights=host optimizer=host"
    assert ran(words, BLOCK / 1.5, window=3)[:2] == near(5.5, 11.5)
    assert ran(words, BLOCK / 8, window=3)[:2] == near(25, 35)
    assert ran(words, BLOCK / 8, window=5)[:2] == near(25, 31), "nothing comes again"
    assert ran("single x1 weights=disk optimizer=disk", 1e30, BLOCK / 1.5, 3)[:2] == near(5.5, 11.5)


def test_gradients_go_behind_their_block_in_the_other_direction():
    """evict     backward layers.2 |  layers.1 |  layers.0 |
    evict                        |g2  |      |g1  |      |g0  |     3 + 2 4 6 s, and 1.5 s behind
    """
    assert ran("single x1 gradients=host optimizer=host", BLOCK / 1.5) == near(3, 9, 10.5)
    with_weights = ran(f"single x1 {ALL.format('host')}", 2 * BLOCK)
    assert with_weights == near(3.5, 10, 10.5), "both directions at once"


def test_all_moves_of_a_disk_take_turns():
    """On a link the two directions do not."""
    link = ran(f"single x1 {ALL.format('host')}", BLOCK / 1.5)
    disk = ran(f"single x1 {ALL.format('disk')}", 1e30, BLOCK / 1.5)
    assert link[1] == pytest.approx(13, abs=0.05) and disk[1] > link[1] + 1


def test_activations_go_during_the_next_block_and_come_back_during_the_one_behind():
    plan = plan_of("single x1 activations=host")
    kept = kept_elsewhere(plan, 0, kernels_of(plan))
    assert sum(kept.values()) == moved_activations(plan, 0, kernels_of(plan)) and len(kept) == 3
    size = kept["layers.0"]
    assert ran("single x1 activations=host", 2 * size)[:2] == near(3.5, 10)
    assert ran("single x1 activations=host", size / 1.5)[:2] == near(5.5, 13)
    assert ran("single x1 activations=disk", 1e30, size / 1.5)[1] == pytest.approx(13, abs=0.05)


def test_a_storage_that_asks_for_a_slower_link_is_priced_so():
    plan, cluster = plan_of("single x1"), load_cluster("rtx-3090", devices=1)
    fast = lane_speeds(plan, cluster)
    storage = Storage(host_bandwidth=1e6, disk_bandwidth=2e6)
    assert lane_speeds(replace(plan, storage=storage), cluster) == {
        "fetch": 1e6,
        "evict": 1e6,
        "disk": 2e6,
    }
    assert fast["disk"] < fast["fetch"] == fast["evict"] == cluster.host.link.bandwidth


@pytest.mark.parametrize(
    ("comes", "goes", "sets", "seconds"),
    [
        ({"evict": 1.0}, {"fetch": 0.5}, 3, 4.0),  # 3 come, then half a second each way
        ({"evict": 1.0}, {"fetch": 0.5}, 1, 6.0),  # nothing beside anything
        ({"disk": 1.0}, {"disk": 1.0}, 3, 6.0),  # the disk is never idle
        ({}, {}, 3, 1.5),
    ],
)
def test_an_update_takes_units_in_turn_through_its_sets(comes, goes, sets, seconds):
    assert _in_turns([_Turn(0.5, comes, goes)] * 3, sets) == pytest.approx(seconds)


def seconds_by_lane(every, speed):
    """Seconds of moves on each lane, if it never waits."""
    found = dict.fromkeys(LANES, 0.0)
    for move in every:
        found[lane_of(move)] += move.bytes * move.times / speed[lane_of(move)]
    return found


def of_13b(words):
    plan = make_plan(
        preset("llama2-13b"), parse_layout(words), Batch(micro_batch=1), sequence=4096, method=BF16
    )
    return plan, load_cluster("rtx-3090", devices=1)


BF16 = Method("bf16")


def test_a_step_is_no_shorter_than_the_moves_of_a_direction():
    """13B on one card of 24 GB, 64 micro-batches: the update was said to take 15 s, and the moves
    of the list, which the passes make, were not in the time.
    """
    plan, cluster = of_13b(f"single x64 recompute=full {ALL.format('host')}")
    lanes = seconds_by_lane(moves(plan, 0), lane_speeds(plan, cluster))
    found = step_time(plan, cluster)
    assert min(lanes["fetch"], lanes["evict"]) > 90 and lanes["disk"] == 0
    assert max(lanes.values()) <= found.seconds
    plain = step_time(of_13b("single x64 recompute=full")[0], cluster)
    assert found.seconds <= plain.seconds + sum(lanes.values()) + found.breakdown["update"]
    assert found.breakdown["homes"] > 0 and "homes" not in plain.breakdown
    assert sum(found.breakdown.values()) == pytest.approx(found.seconds)


def test_an_update_on_the_host_has_the_bandwidth_of_its_memory():
    plan, cluster = of_13b("single x1 optimizer=host")
    elements = sum(weight.elements for weight in plan.weights)
    update = step_time(plan, cluster).breakdown["update"]
    assert update == pytest.approx(elements * (7 * 4 + 2) / Host.memory_bandwidth, rel=0.02)
    shared = replace(cluster, host=replace(cluster.host, link=Link("shared", 1e10, 0.0)))
    assert step_time(plan, shared).breakdown["update"] < update


HOMES = [
    *(ALL.format(home) for home in ("host", "disk")),
    "optimizer=host",
    "optimizer=disk gradients=host",
    "weights=disk optimizer=host",
    "activations=host",
    "activations=disk recompute=full",
]


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(HOMES),
    st.sampled_from(["single x1", "single x3", "dp2 zero3 x2", "dp4 zero2 x1", "pp2 1f1b x4"]),
    st.sampled_from([1e6, 1e8, 1e12]),
    st.sampled_from([2, 3, 5, 99]),
)
def test_a_step_is_no_shorter_than_a_lane_and_no_longer_than_all_moves(words, layout, link, window):
    """Every move of the list is in the time of a step, whatever it hides behind."""
    plan = plan_of(f"{layout} {words}", replace(SHAPE, vocab=4096))
    plan = replace(plan, storage=Storage(window=window))
    machine = load_cluster("h100", devices=plan.layout.world)
    host = Host(1e12, Link("pcie", link, 0.0), disk=1e12, disk_bandwidth=link / 2)
    machine = replace(machine, host=host)
    again = " recompute=full" if "recompute" in words else ""
    plain = replace(plan, layout=parse_layout(f"{layout}{again}"))
    found, without = step_time(plan, machine), step_time(plain, machine)
    speed, most = lane_speeds(plan, machine), Counter()
    for rank in range(plan.layout.pp):
        at = rank * plan.layout.world // plan.layout.pp
        lanes = Counter(seconds_by_lane(moves(plan, at), speed))
        there = moved_activations(plan, at, kernels_of(plan)) * plan.micros
        names = ("disk", "disk") if plan.layout.activations == "disk" else ("fetch", "evict")
        for name in names:
            lanes[name] += there / speed[name]
        most |= lanes
    assert found.seconds >= max(most.values()) * (1 - 1e-9)
    update = found.breakdown["update"]
    slack = 1.001 * (sum(most.values()) * plan.layout.pp + update)
    assert found.seconds <= without.seconds + slack


def test_a_move_that_is_left_out_is_noticed(monkeypatch):
    """The check above fails without the gradients, on a link that is slower than computation."""
    every = home_times.moves
    plan, cluster = of_13b("single x64 recompute=full gradients=host optimizer=host")
    plan = replace(plan, storage=Storage(host_bandwidth=3e9))
    lane = seconds_by_lane(moves(plan, 0), lane_speeds(plan, cluster))["evict"]
    assert step_time(plan, cluster).seconds >= lane
    monkeypatch.setattr(
        home_times, "moves", lambda *of: (one for one in every(*of) if one.what != "gradients")
    )
    assert step_time(plan, cluster).seconds < 0.7 * lane


def test_a_wider_window_is_no_part_of_what_moves_take():
    """It saves gathers with and without moves; so the rest of a step is told alike."""
    plan = plan_of("dp4 zero3 x2 weights=host optimizer=host", replace(SHAPE, vocab=4096))
    machine = load_cluster("h100", devices=4)
    narrow, wide = (
        step_time(replace(plan, storage=Storage(window=units)), machine).breakdown
        for units in (2, 99)
    )
    assert all(wide[part] == pytest.approx(narrow[part]) for part in ("compute", "update"))
    limited = replace(plan, storage=Storage(window=5, host_bandwidth=1e3, disk_bandwidth=1e3))
    assert home_times.without_moves(limited, machine)[0].storage == Storage(window=5)
