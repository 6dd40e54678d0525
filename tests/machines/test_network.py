"""What groups get of a network, against edges counted one by one and the papers' formulas."""

from dataclasses import replace
from itertools import product
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.machines.cluster import (
    Cluster,
    Device,
    Flops,
    Grid,
    Host,
    Level,
    Link,
    Tree,
)
from howdah.machines.cluster_file import load_cluster
from howdah.machines.network import Path, axis_groups, bisection, collective_path, distance, path


def cluster(network, *, nodes=8, per_node=4, nics=4):
    """Inside 100 bytes/s and 1 s, a card 10 bytes/s and 5 s."""
    return Cluster(
        name="test",
        device=Device("chip", 1.0, 1.0, Flops(bf16=1.0)),
        devices_per_node=per_node,
        nodes=nodes,
        inside=Link("inside", 100.0, 1.0),
        between=Link("between", 10.0, 5.0),
        network=network,
        host=Host(1.0, Link("pcie", 1.0, 1.0)),
        nics=nics,
    )


def grid(dims, wraps=1):
    return cluster(Grid(dims, wraps), nodes=prod(dims), per_node=1)


# -- groups --------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_the_groups_of_an_axis_are_those_of_a_mesh(outer, size, stride):
    mesh = list(product(range(outer), range(size), range(stride)))
    ranks = {place: rank for rank, place in enumerate(mesh)}
    expected = [[ranks[o, i, s] for i in range(size)] for o in range(outer) for s in range(stride)]
    assert axis_groups(outer * size * stride, size=size, stride=stride).tolist() == expected


def test_ranks_that_make_no_axis_and_ranks_that_are_not_there():
    with pytest.raises(ValueError, match="12 ranks have no axis of 8"):
        axis_groups(12, size=8, stride=1)
    with pytest.raises(ValueError, match="a rank that the cluster has not"):
        path(cluster(Tree()), axis_groups(64, size=2, stride=1))
    with pytest.raises(ValueError, match="one rank twice"):
        path(cluster(Tree()), np.array([[0, 1], [1, 2]]))


# -- trees ---------------------------------------------------------------------


def counted(machine, groups, pattern):
    """Bytes/s per rank, by listing everything that is sent: the slow and simple truth.

    Each rank sends one unit: to its neighbour, or a part of it to each other member. A unit is
    sent in 1 / bandwidth; so every mouth must pass its sum in that time.
    """
    size, per_node = len(groups[0]), machine.devices_per_node
    card = machine.between.bandwidth
    sent = []  # group, from, to, units
    for number, group in enumerate(groups):
        for index, rank in enumerate(group):
            if pattern == "ring":
                sent.append((number, rank, group[(index + 1) % size], 1.0))
            else:
                sent += [(number, rank, other, 1 / (size - 1)) for other in group if other != rank]
    bounds = [inf]
    for rank in range(machine.devices):
        units = sum(u for _, a, b, u in sent if a == rank and a // per_node == b // per_node)
        bounds.append(machine.inside.bandwidth / units if units else inf)
    for number, group in enumerate(groups):
        for node in range(machine.nodes):
            members = sum(rank // per_node == node for rank in group)
            cards = max(1, members * machine.nics // per_node)
            units = sum(
                u
                for n, a, b, u in sent
                if n == number and a // per_node == node and b // per_node != node
            )
            bounds.append(cards * card / units if units else inf)
    capacity, below = machine.nics * card, 1
    for nodes, over in (
        (1, 1),
        *((at.nodes, at.oversubscription) for at in machine.network.levels),
    ):
        capacity, below = capacity * nodes / below / over, nodes
        ranks = nodes * per_node
        for domain in range(-(-machine.devices // ranks)):
            units = sum(u for _, a, b, u in sent if a // ranks == domain != b // ranks)
            bounds.append(capacity / units if units else inf)
    return min(bounds)


TREES = [Tree(), Tree((Level(2, 4.0),)), Tree((Level(2, 1.0), Level(4, 3.0)))]


@given(
    st.sampled_from(TREES),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([2, 4, 8, 16, 32]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.sampled_from(["ring", "all"]),
)
def test_bandwidth_is_what_counting_every_message_gives(tree, nics, size, stride, pattern):
    if size * stride > 32:
        return
    machine = cluster(tree, nics=nics)
    groups = axis_groups(32, size=size, stride=stride)
    expected = counted(machine, groups.tolist(), pattern)
    assert path(machine, groups, pattern=pattern).link.bandwidth == pytest.approx(expected)


@given(st.permutations(range(24)), st.sampled_from([1, 4]), st.sampled_from(["ring", "all"]))
def test_groups_in_any_order_on_a_machine_that_ends_inside_a_switch(ranks, nics, pattern):
    machine = cluster(Tree((Level(4, 2.0),)), nodes=6, nics=nics)
    groups = np.array(ranks).reshape(6, 4)
    if pattern == "ring":  # a ring takes its members node by node
        groups = np.sort(groups, axis=1)
    expected = counted(machine, groups.tolist(), pattern)
    assert path(machine, groups, pattern=pattern).link.bandwidth == pytest.approx(expected)


def test_a_group_inside_a_node_has_the_link_inside():
    got = path(cluster(Tree()), axis_groups(32, size=4, stride=1))
    assert got == Path(Link("inside", 100.0, 1.0), messages=3, nodes=1, members=4)


def test_without_a_switch_members_have_the_wires_between_them():
    """Of eight V100, two all-reduce at 23 GB/s, four at 88 and all at 136."""
    one = replace(cluster(Tree(), nodes=1, per_node=8), inside=Link("nvlink2", 140.0, 1.0))
    found = [path(one, axis_groups(8, size=n, stride=1)).link.bandwidth for n in (2, 4, 8)]
    assert found == pytest.approx([20, 60, 140])
    for switched in (replace(one, inside=Link("nvlink3", 140.0, 1.0)), load_cluster("v100-32")):
        pair = path(switched, axis_groups(8, size=2, stride=1)).link.bandwidth
        assert pair == switched.inside.bandwidth


def test_a_flat_ring_has_as_many_cards_as_members_in_a_node():
    """planner.md: min(inside bandwidth, members in the node x bandwidth of a card)."""
    machine = cluster(Tree())
    whole = path(machine, axis_groups(32, size=32, stride=1))
    # of 31 hops 8 leave a node
    latency = pytest.approx((8 * 5.0 + 23 * 1.0) / 31)
    assert whole == Path(Link("between", 40.0, latency), messages=31, nodes=8, members=4)
    half = path(machine, axis_groups(32, size=16, stride=2))
    assert (half.link.bandwidth, half.members) == (20.0, 2)
    rails = path(machine, axis_groups(32, size=8, stride=4))
    assert (rails.link.bandwidth, rails.members) == (10.0, 1)
    slow_inside = replace(machine, inside=Link("inside", 30.0, 1.0))
    assert path(slow_inside, axis_groups(32, size=32, stride=1)).link.bandwidth == 30.0


@given(st.sampled_from([2, 4, 8, 16, 32]), st.sampled_from([1, 2, 4, 8, 16]))
def test_latency_is_that_of_the_longest_way_around_a_ring(size, stride):
    """What a rank has reaches the last one over all edges of the ring but one."""
    if size * stride > 32:
        return
    groups = axis_groups(32, size=size, stride=stride)
    longest = 0.0
    for group in groups.tolist():
        hops = [
            1.0 if rank // 4 == group[(index + 1) % size] // 4 else 5.0
            for index, rank in enumerate(group)
        ]
        longest = max(longest, sum(hops) - min(hops))
    got = path(cluster(Tree()), groups)
    assert got.messages * got.link.latency == pytest.approx(longest)


def test_members_that_send_to_all_wait_for_one_message():
    machine = cluster(Tree())
    far, near = axis_groups(32, size=32, stride=1), axis_groups(32, size=4, stride=1)
    found = [path(machine, groups, pattern="all") for groups in (far, near)]
    assert [(one.messages, one.link.latency) for one in found] == [(1, 5.0), (1, 1.0)]


def test_h100_over_two_nodes_and_over_64():
    for text in ("h100x16", "h100x512"):
        machine = load_cluster(text)
        everyone = path(machine, axis_groups(machine.devices, size=machine.devices, stride=1))
        assert everyone.link.bandwidth == 8 * 50e9
        one_rail = path(machine, axis_groups(machine.devices, size=2, stride=8))
        assert one_rail.link.bandwidth == 50e9


def test_devices_that_share_a_card_share_its_bandwidth():
    """Four GPUs behind one card: four groups across the nodes get a quarter each, one gets all."""
    machine = cluster(Tree(), nics=1)
    assert path(machine, axis_groups(32, size=8, stride=4)).link.bandwidth == 2.5
    assert path(machine, np.arange(0, 32, 4)[None]).link.bandwidth == 10.0
    assert path(machine, axis_groups(32, size=32, stride=1)).link.bandwidth == 10.0


def test_a_group_alone_has_no_more_cards_than_members():
    assert path(cluster(Tree()), np.array([[0, 4]])).link.bandwidth == 10.0
    assert path(cluster(Tree()), np.array([[0, 1, 4, 5]])).link.bandwidth == 20.0


def test_oversubscription_divides_what_leaves_the_switch():
    """Pairs across the spine leave with every byte; a ring of neighbours leaves once a switch."""
    machine = cluster(Tree((Level(4, 4.0),)))
    assert path(machine, axis_groups(32, size=2, stride=16)).link.bandwidth == 10.0 / 4
    assert path(machine, axis_groups(32, size=2, stride=4)).link.bandwidth == 10.0
    assert path(machine, axis_groups(32, size=8, stride=4)).link.bandwidth == 10.0
    steep = cluster(Tree((Level(4, 8.0),)))
    assert path(steep, axis_groups(32, size=8, stride=4)).link.bandwidth == 10.0 * 4 / 8


def test_oversubscription_of_a_fat_tree_multiplies():
    tree = Tree((Level(2, 2.0), Level(4, 3.0)))
    machine = cluster(tree)
    assert path(machine, axis_groups(32, size=2, stride=8)).link.bandwidth == 10.0 / 2
    assert path(machine, axis_groups(32, size=2, stride=16)).link.bandwidth == pytest.approx(10 / 6)


def test_full_bandwidth_throughout_is_flat():
    full = cluster(Tree((Level(2, 1.0), Level(4, 1.0))))
    for size, stride in ((32, 1), (8, 4), (2, 16), (4, 8)):
        groups = axis_groups(32, size=size, stride=stride)
        for pattern in ("ring", "all"):
            flat = path(cluster(Tree()), groups, pattern=pattern)
            assert path(full, groups, pattern=pattern) == flat


def test_all_to_all_pays_for_the_share_that_leaves_the_node():
    """32 ranks, four to a node: of the 31 parts of a unit 28 leave, through a card each."""
    got = path(cluster(Tree()), axis_groups(32, size=32, stride=1), pattern="all")
    assert got.link.bandwidth == pytest.approx(10.0 * 31 / 28)


def test_collectives_of_processors_on_several_nodes_send_to_all():
    """Two nodes of two: a ring leaves each once, and each of two ranks sends to two others."""
    chips = cluster(Tree(), nodes=2, per_node=2, nics=1)
    cores = replace(chips, device=replace(chips.device, name="CPU core"))
    all_four, near = axis_groups(4, size=4, stride=1), axis_groups(4, size=2, stride=1)
    ring, direct = collective_path(chips, all_four), collective_path(cores, all_four)
    assert (ring.link.bandwidth, ring.messages) == (10.0, 3)
    assert (direct.link.bandwidth, direct.messages) == (pytest.approx(10.0 / (2 * 2 / 3)), 1)
    assert collective_path(cores, near) == collective_path(chips, near)


def test_a_rank_alone_sends_nothing():
    for network in (Tree(), Grid((4, 8))):
        got = path(cluster(network), axis_groups(32, size=1, stride=1))
        assert (got.messages, got.link.bandwidth, got.link.latency) == (0, inf, 0.0)


# -- grids ---------------------------------------------------------------------


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_distance_is_the_shortest_way_found_by_walking(dims, closed):
    network = Grid(tuple(dims), 1 if closed else 0)
    places = list(product(*map(range, dims)))
    far = {0: 0}
    frontier = [0]
    for rank in frontier:
        for dim, step in product(range(len(dims)), (-1, 1)):
            place = list(places[rank])
            place[dim] += step
            if closed:
                place[dim] %= dims[dim]
            if tuple(place) in places and places.index(tuple(place)) not in far:
                frontier.append(places.index(tuple(place)))
                far[frontier[-1]] = far[rank] + 1
    assert {rank: distance(network, 0, rank) for rank in range(len(places))} == far


@pytest.mark.parametrize("dims", [(8,), (4, 8), (4, 4, 4)])
def test_a_whole_torus_gathers_over_all_its_wires(dims):
    """planner.md: (n-1)/n S / (2DB) + latency · sum of d // 2; without wrap-around B and d - 1."""
    n = prod(dims)
    everyone = axis_groups(n, size=n, stride=1)
    torus, mesh = path(grid(dims), everyone), path(grid(dims, 0), everyone)
    assert torus.link == Link("between", 2 * len(dims) * 10.0, 5.0)
    assert torus.messages == sum(d // 2 for d in dims)
    assert mesh.link == Link("between", len(dims) * 10.0, 5.0)
    assert mesh.messages == sum(d - 1 for d in dims)


def test_the_dims_of_a_torus_as_groups():
    """Rows of a 4 x 8 torus are rings, half rows are lines, columns are rings."""
    machine = grid((4, 8))
    row = path(machine, axis_groups(32, size=8, stride=1))
    half = path(machine, axis_groups(32, size=4, stride=1))
    column = path(machine, axis_groups(32, size=4, stride=8))
    rows = path(machine, axis_groups(32, size=16, stride=1))
    assert (row.link.bandwidth, row.messages) == (20.0, 4)
    assert (half.link.bandwidth, half.messages) == (10.0, 3)
    assert (column.link.bandwidth, column.messages) == (20.0, 2)
    assert (rows.link.bandwidth, rows.messages) == (10.0 + 20.0, 1 + 4)


def test_groups_that_lie_between_each_other_share_the_wires():
    """Every second device of a ring of 8: two groups on the same wires, two wires per message."""
    groups = axis_groups(8, size=4, stride=2)
    got = path(grid((8,)), groups)
    assert (got.link.bandwidth, got.messages) == (20.0 / 2, 2 * 2)
    near = path(grid((4,)), axis_groups(4, size=4, stride=1), pattern="all")
    far = path(grid((8,)), groups, pattern="all")
    assert far.link.bandwidth == near.link.bandwidth / 2


def test_the_group_that_has_it_worst_counts():
    """Pairs of a 2 x 3 torus: (2, 3) sits across a row's end, two wires apart."""
    got = path(grid((2, 3)), axis_groups(6, size=2, stride=1))
    assert (got.link.bandwidth, got.messages) == (10.0 / 2, 2)


@pytest.mark.parametrize("n", range(2, 12))
@pytest.mark.parametrize("closed", [True, False])
def test_all_to_all_along_a_ring_or_a_line_by_routing_every_message(n, closed):
    """Each rank sends 1/n of its S bytes to each other, the shortest way, ties half and half."""
    wires = np.zeros((2, n))  # direction, wire to the right of each rank
    for a, b in product(range(n), repeat=2):
        right, left = (b - a) % n, (a - b) % n
        if not closed:
            right, left = (right, n) if b >= a else (n, left)
        ways = [way for way in (0, 1) if (right, left)[way] == min(right, left)]
        for way in ways:
            for step in range((right, left)[way]):
                wire = (a + step) % n if way == 0 else (a - step - 1) % n
                wires[way, wire] += 1 / n / len(ways)
    seconds = wires.max() / 10.0  # for S = 1 byte over 10 bytes/s
    machine = grid((n,), 1 if closed else 0)
    got = path(machine, axis_groups(n, size=n, stride=1), pattern="all")
    assert (n - 1) / n / got.link.bandwidth == pytest.approx(seconds)


def test_all_to_all_on_a_ring_of_even_size_takes_n_s_over_8b():
    got = path(grid((16,)), axis_groups(16, size=16, stride=1), pattern="all")
    assert 15 / 16 / got.link.bandwidth == pytest.approx(16 / (8 * 10.0))


def test_a_group_that_is_no_box_is_a_ring_over_its_longest_step():
    machine = grid((4, 4), wraps=0)
    got = path(machine, np.array([[0, 1, 2, 15]]))
    assert got.link.bandwidth == pytest.approx(10 / 6)
    assert got.messages == 3 * 6


def test_published_bisections_of_tpu_pods():
    """docs.cloud.google.com/tpu/docs: v5e 1.6 TB/s; v4 24 TB/s, where 512 wires of 50 give 25.6."""
    assert bisection(load_cluster("tpu-v5e")) == 1.6e12
    assert bisection(load_cluster("tpu-v4x4096")) == pytest.approx(24e12, rel=0.07)


def test_bisections_of_trees():
    assert bisection(cluster(Tree())) == 4 * 4 * 10.0
    assert bisection(cluster(Tree((Level(4, 2.0),)))) == 4 * 4 * 10.0 / 2
    assert bisection(cluster(Tree((Level(8, 2.0),)))) == 4 * 4 * 10.0  # all under one switch
    assert bisection(cluster(Tree(), nodes=1)) == 2 * 100.0


def test_eight_desktops_on_two_switches_share_one_cable():
    machine = load_cluster("rack-1gbe")
    assert bisection(machine) == 1e9 / 8
    across = path(machine, axis_groups(8, size=2, stride=4))
    assert across.link.bandwidth == 1e9 / 8 / 4
