"""Programs priced on networks in round numbers: by hand, and by closed formulas."""

from dataclasses import replace

import pytest
from round_steps import wires

from howdah.base.errors import UserError
from howdah.collectives.program import Message, chunk, program
from howdah.collectives.registry import build
from howdah.machines.cluster import Grid, Level, Tree
from howdah.machines.network import axis_groups, path
from howdah.sim.programs import cheapest, price, route_of

KB = 1000  # bytes of the vector


def flat(nodes, per_node=1, *, inside=100.0, between=10.0, nics=None, levels=(), latency=0.0):
    """Nodes whose devices share a card, in bytes/s."""
    made = wires(inside, between, nodes=nodes, per_node=per_node, latency=latency)
    return replace(made, nics=nics or per_node, network=Tree(levels))


def grid(*dims, wraps=1, rate=10.0, latency=0.0):
    made = wires(rate, nodes=1, per_node=1, latency=latency)
    ranks = 1
    for size in dims:
        ranks *= size
    return replace(made, devices_per_node=1, nodes=ranks, network=Grid(dims, wraps=wraps))


def seconds(name, ranks, cluster, size=KB, *, places=None, **options):
    return price(build(name, ranks, **options), cluster, size=size, places=places).seconds


# -- closed formulas -------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_formulas_of_the_lecture(ranks):
    """On a flat network: α = 2 s per message, B = 10 bytes/s, S = 1600 bytes."""
    cluster, whole, part = flat(ranks, latency=2.0), 1600 / 10, 1600 / 10 / ranks
    lg = ranks.bit_length() - 1
    formulas = {
        "ring": 2 * (ranks - 1) * (2 + part),
        "recursive_doubling": lg * (2 + whole),
        "rabenseifner": 2 * lg * 2 + 2 * (ranks - 1) * part,
        "naive_halving_doubling": 2 * lg * (2 + whole),
        "two_shot": 2 * 2 + 2 * (ranks - 1) * part,
        "one_shot": 2 + (ranks - 1) * whole,
        "broadcast/one_to_all": (ranks - 1) * (2 + whole),
        "broadcast/binomial": lg * (2 + whole),
        "broadcast/ring": (ranks - 1) * (2 + whole),
        "all_gather/bruck": lg * 2 + (ranks - 1) * part,
        "all_to_all/pairwise": (ranks - 1) * (2 + part),
        "barrier/dissemination": lg * 2,
    }
    for name, right in formulas.items():
        assert seconds(name, ranks, cluster, size=1600) == pytest.approx(right), name


@pytest.mark.parametrize("pieces", [1, 2, 5, 10, 100])
def test_the_ring_in_pieces(pieces):
    """(N-2+K)·S/(K·B), close to S/B for many pieces."""
    got = seconds("broadcast/ring", 6, flat(6), pieces=pieces)
    assert got == pytest.approx((6 - 2 + pieces) * KB / (pieces * 10))


def test_sizes_that_cannot_be_divided():
    """10 bytes on 4 ranks: shares of 2, 3, 2 and 3; a round is as long as its longest."""
    got = price(build("ring", 4), flat(4, between=1.0), size=10)
    assert got.rounds == (3,) * 6
    assert got.seconds == 18


# -- contention ------------------------------------------------------------------------


def swap(pairs, ranks):
    """All these messages of the whole vector in one round."""
    return program("broadcast", "made up", ranks, 1, [Message(0, a, b, chunk(0)) for a, b in pairs])


def loads(found):
    """The most bytes on a link of each kind."""
    return {
        kind: max(b for (k, *_), b in found.bytes.items() if k == kind) for kind, *_ in found.bytes
    }


def test_devices_share_a_card():
    two = flat(2, 2, nics=1)
    assert price(swap([(0, 2)], 4), two, size=KB).seconds == KB / 10
    shared = price(swap([(0, 2), (1, 3)], 4), two, size=KB)
    assert shared.seconds == 2 * KB / 10
    assert shared.busiest == (("card out", 0, 0),)
    assert price(swap([(0, 2), (1, 3)], 4), flat(2, 2, nics=2), size=KB).seconds == KB / 10
    # there and back do not disturb each other
    assert price(swap([(0, 2), (3, 1)], 4), two, size=KB).seconds == KB / 10
    inside = price(swap([(0, 1), (2, 3)], 4), two, size=KB)
    assert (inside.seconds, loads(inside)) == (KB / 100, {"device out": KB, "device in": KB})


def test_a_device_with_several_cards():
    assert price(swap([(0, 1)], 2), flat(2, 1, nics=4), size=KB).seconds == KB / 40


def test_uplinks_of_a_spine_leaf_network():
    """Leaves of 4 nodes, of whose 40 bytes/s a quarter leads to the spine."""
    spine = flat(8, levels=(Level(4, 4.0),))
    near, far = [(0, 1), (2, 3)], [(i, i + 4) for i in range(4)]
    assert price(swap(near, 8), spine, size=KB).seconds == KB / 10
    crossed = price(swap(far, 8), spine, size=KB)
    assert crossed.seconds == 4 * KB / 10
    assert crossed.busiest == (("up", 4, 0),)
    assert price(swap(far, 8), flat(8, levels=(Level(4, 1.0),)), size=KB).seconds == KB / 10


def test_a_fat_tree_of_two_levels():
    """Pods of 4 nodes in leaves of 2: full bisection below, a half above."""
    tree = flat(8, levels=(Level(2, 1.0), Level(4, 2.0)))
    assert price(swap([(0, 2), (1, 3)], 8), tree, size=KB).seconds == KB / 10
    over = price(swap([(i, i + 4) for i in range(4)], 8), tree, size=KB)
    assert (over.seconds, over.busiest) == (2 * KB / 10, (("up", 4, 0),))
    links = [link[:2] for link, _ in route_of(tree, 0, 7).links]
    assert links == [
        ("card out", 0),
        ("card in", 7),
        ("up", 2),
        ("down", 2),
        ("up", 4),
        ("down", 4),
    ]


def test_a_spine_leaf_network_prefers_the_nearest_first():
    """Both halve and double; one sends halves of all vectors through the uplinks at once."""
    spine = flat(16, levels=(Level(4, 4.0),))
    near, far = seconds("halving_doubling", 16, spine), seconds("rabenseifner", 16, spine)
    assert far > 2 * near
    assert seconds("halving_doubling", 16, flat(16)) == pytest.approx(
        seconds("rabenseifner", 16, flat(16))
    )


def test_a_hierarchy_wins_where_cards_are_slow():
    """Two nodes of two: 1.0 of the vector through a card in place of 1.5, or of 3.0."""
    cluster = flat(2, 2, inside=1e9, nics=1)
    assert seconds("hierarchical", 4, cluster, per_node=2) == pytest.approx(1.0 * KB / 10)
    assert seconds("ring", 4, cluster) == pytest.approx(1.5 * KB / 10)
    assert seconds("ring", 4, cluster, places=[0, 2, 1, 3]) == pytest.approx(3.0 * KB / 10)


def test_pieces_of_a_hierarchy_overlap():
    """Where both links are as busy, stages in pieces are under way together; inside, a stage is one
    round, which no other one shares.
    """
    cluster = flat(4, 4, inside=40.0, nics=4)
    whole, cut = (seconds("hierarchical", 16, cluster, per_node=4, pieces=k) for k in (1, 16))
    assert cut < 0.75 * whole


# -- grids -----------------------------------------------------------------------------


def test_messages_that_go_over_several_wires():
    ring = grid(6, latency=2.0)
    assert [len(route_of(ring, 0, to).links) for to in range(6)] == [0, 1, 2, 3, 2, 1]
    assert price(swap([(0, 2)], 6), ring, size=KB).seconds == KB / 10 + 2 * 2
    assert price(swap([(0, 2), (1, 3)], 6), ring, size=KB).seconds == 2 * KB / 10 + 2 * 2
    line = grid(6, wraps=0)
    assert [len(route_of(line, 0, to).links) for to in range(6)] == [0, 1, 2, 3, 4, 5]
    cube = route_of(grid(3, 4, 5), 0, 59)  # (2, 3, 4): one step back in each dim
    assert [link for link, _ in cube.links] == [
        ("wire", 0, 0, -1),
        ("wire", 40, 1, -1),
        ("wire", 55, 2, -1),
    ]


def test_a_ring_needs_a_ring_of_wires():
    """On a line, the message from the last rank to the first goes back over all wires."""
    assert seconds("ring", 6, grid(6), size=1200) == pytest.approx(10 * 200 / 10)
    assert price(build("ring", 6), grid(6, wraps=0, latency=1.0), size=0).seconds == 10 * 5
    assert seconds("mesh", 6, grid(6, wraps=0), 1200, dims=(1, 6)) == pytest.approx(10 * 200 / 10)


def test_a_torus_on_a_torus():
    """2·Σ(X-1) rounds; in colours all wires work, so a third of the time with three dims."""
    cluster, free = grid(4, 4, 4), grid(4, 4, 4, rate=1e30, latency=1.0)
    whole, size = 2 * 63 / 64 * KB * 64 / 10, KB * 64
    assert seconds("torus", 64, cluster, size=size, dims=(4, 4, 4)) == pytest.approx(whole)
    split = seconds("torus_in_colours", 64, cluster, size=3 * size, dims=(4, 4, 4))
    assert split == pytest.approx(whole)
    assert seconds("torus", 64, free, dims=(4, 4, 4)) == pytest.approx(18)
    assert seconds("ring", 64, free) >= 126


def test_both_forms_on_a_mesh():
    cluster = grid(4, 4, wraps=0)
    better = seconds("mesh", 16, cluster, dims=(4, 4), size=1600)
    assert better < 0.7 * seconds("mesh_rows_then_columns", 16, cluster, dims=(4, 4), size=1600)


# -- against the other arithmetic ------------------------------------------------------


@pytest.mark.parametrize(
    "cluster",
    [
        flat(8, 2, nics=1),
        flat(4, 4, nics=1),
        flat(16, levels=(Level(4, 4.0),)),
        flat(4, 4, inside=3.0),
    ],
)
def test_rings_agree_with_the_paths_of_groups(cluster):
    """machines/network.py gives the bandwidth of a ring in closed form, without programs.

    It lets a ring leave a node by all cards at once, as NCCL's several rings do; a message of a
    program has the card of its device alone. So the cards are one, or not what is slow.
    """
    found = path(cluster, axis_groups(16, size=16, stride=1))
    right = 2 * 15 / 16 * KB * 16 / found.link.bandwidth
    assert seconds("ring", 16, cluster, size=KB * 16) == pytest.approx(right)


# -- choices ---------------------------------------------------------------------------


def test_the_cheapest_depends_on_the_size():
    cluster = flat(4, 4, inside=1e9, between=1e8, nics=1, latency=1e-5)
    small, large = (cheapest("all_reduce", cluster, size=size) for size in (8, 100_000_000))
    assert small[0][1] == "all_reduce/one_shot"
    assert large[0][1] in ("all_reduce/hierarchical", "all_reduce/halving_doubling")
    assert [one for one, _ in small] == sorted(one for one, _ in small)
    names = {name for _, name in cheapest("all_gather", flat(5), size=KB)}
    assert "all_gather/ring" in names and "all_gather/recursive_doubling" not in names
    dims = cheapest("all_reduce", grid(2, 8), size=KB)
    assert {name: one for one, name in dims}["all_reduce/torus"] == pytest.approx(
        seconds("torus", 16, grid(2, 8), dims=(2, 8))
    )


def test_ranks_need_devices():
    with pytest.raises(UserError, match="ring has 4 ranks, and cluster round has 2 devices; give"):
        seconds("ring", 4, flat(2))
    with pytest.raises(UserError, match="give each rank a device of its own"):
        seconds("ring", 2, flat(4), places=[1, 1])


# -- overlap ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "latencies"),
    [
        ("ring", {}, 6),
        ("segmented_ring", {"pieces": 5}, 6),
        ("broadcast/ring", {"pieces": 9}, 3),
        ("recursive_doubling", {}, 2),
        ("hierarchical", {"per_node": 2, "pieces": 7}, 4),
        ("reduce_scatter/hierarchical", {"per_node": 2, "pieces": 7}, 2),
        ("reduce_scatter/pairwise", {}, 1),
    ],
)
def test_pieces_that_overlap_wait_for_latencies_once(name, options, latencies):
    """Each message of the longest row in which every one needs the one before it; bytes as ever."""
    slow, quick = (flat(2, 2, inside=10.0, nics=1, latency=some) for some in (2.0, 0.0))
    program = build(name, 4, **options)
    one, bare = (price(program, cluster, size=0) for cluster in (slow, quick))
    assert one.overlapped == 2.0 * latencies
    assert one.seconds == 2.0 * len(one.rounds)
    long = price(program, slow, size=KB)
    assert long.overlapped == pytest.approx(price(program, quick, size=KB).seconds + 2 * latencies)
    assert bare.overlapped == 0
