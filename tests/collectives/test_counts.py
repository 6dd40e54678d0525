"""Rounds and bytes of every algorithm by the closed formulas of the literature, exactly.

Chan et al. 2007; Patarasuk and Yuan 2009; Thakur et al. 2005; Sanders, Speck and Träff 2009. The
vector has size 1; `lg` is the logarithm to base 2, rounded up or down as the formulas say.
"""

from fractions import Fraction
from math import prod

import pytest

from howdah.collectives.check import problems
from howdah.collectives.choice import placement
from howdah.collectives.counts import even_sizes, leaving, received, rounds, sent
from howdah.collectives.dealt import dealt
from howdah.collectives.program import span
from howdah.collectives.registry import ALGORITHMS, build
from howdah.collectives.trees import in_order_tree, other_tree
from howdah.collectives.walk import walk

NUMBERS = (2, 3, 4, 5, 6, 8, 12, 16)
POWERS = (2, 4, 8, 16, 32)


def up(ranks):
    return (ranks - 1).bit_length()


def counted(name, ranks, **options):
    """The rounds, and what each rank sends."""
    program = build(name, ranks, **options)
    return rounds(program), sent(program, even_sizes(program.chunks))


def part(ranks):
    return Fraction(ranks - 1, ranks)


# Name, numbers of ranks, rounds, and the most that a rank sends.
MOST = [
    ("broadcast/one_to_all", NUMBERS, lambda p: p - 1, lambda p: p - 1),
    ("broadcast/binomial", NUMBERS, up, up),
    ("broadcast/ring", NUMBERS, lambda p: p - 1, lambda p: 1),
    ("broadcast/ring_in_pieces", NUMBERS, lambda p: p - 2 + 4, lambda p: 1),
    ("broadcast/scatter_all_gather", POWERS, lambda p: up(p) + p - 1, lambda p: 2 * part(p)),
    ("reduce/all_to_one", NUMBERS, lambda p: p - 1, lambda p: 1),
    ("reduce/binomial", NUMBERS, up, lambda p: 1),
    ("reduce/ring_in_pieces", NUMBERS, lambda p: p - 2 + 4, lambda p: 1),
    ("scatter/one_to_all", NUMBERS, lambda p: p - 1, part),
    ("scatter/binomial", NUMBERS, up, part),
    ("gather/all_to_one", NUMBERS, lambda p: p - 1, lambda p: Fraction(1, p)),
    ("gather/binomial", POWERS, up, lambda p: Fraction(1, 2)),
    ("all_reduce/naive", NUMBERS, lambda p: 2 * (p - 1), lambda p: p - 1),
    ("all_reduce/naive_halving_doubling", NUMBERS, lambda p: 2 * up(p), up),
]

# Name, numbers of ranks, rounds, and what every rank sends: the bandwidth bound.
EACH = [
    ("all_gather/ring", NUMBERS, lambda p: p - 1, part),
    ("all_gather/recursive_doubling", POWERS, up, part),
    ("all_gather/bruck", NUMBERS, up, part),
    ("all_gather/neighbour_exchange", (2, 4, 6, 12), lambda p: p // 2, part),
    ("all_gather/segmented_ring", NUMBERS, lambda p: 2 * (p - 1), part),
    ("reduce_scatter/ring", NUMBERS, lambda p: p - 1, part),
    ("reduce_scatter/segmented_ring", NUMBERS, lambda p: 2 * (p - 1), part),
    ("reduce_scatter/recursive_halving", POWERS, up, part),
    ("reduce_scatter/pairwise", NUMBERS, lambda p: p - 1, part),
    ("all_reduce/ring", NUMBERS, lambda p: 2 * (p - 1), lambda p: 2 * part(p)),
    ("all_reduce/segmented_ring", NUMBERS, lambda p: 4 * (p - 1), lambda p: 2 * part(p)),
    ("all_reduce/recursive_doubling", POWERS, up, up),
    ("all_reduce/halving_doubling", POWERS, lambda p: 2 * up(p), lambda p: 2 * part(p)),
    ("all_reduce/rabenseifner", POWERS, lambda p: 2 * up(p), lambda p: 2 * part(p)),
    ("all_reduce/hypercube", POWERS, lambda p: 2 * up(p), lambda p: 2 * part(p)),
    ("all_reduce/one_shot", NUMBERS, lambda p: 1, lambda p: p - 1),
    ("all_reduce/two_shot", NUMBERS, lambda p: 2, lambda p: 2 * part(p)),
    # of its own row of blocks, which is 1/p of them all
    ("all_to_all/pairwise", NUMBERS, lambda p: p - 1, lambda p: part(p) / p),
    ("all_to_all/bruck", POWERS, up, lambda p: Fraction(up(p), 2) / p),
    ("barrier/dissemination", NUMBERS, up, part),  # its blocks have no bytes
]


@pytest.mark.parametrize(("name", "numbers", "in_rounds", "most"), MOST)
def test_what_the_busiest_rank_sends(name, numbers, in_rounds, most):
    for ranks in numbers:
        turns, sizes = counted(name, ranks)
        assert (turns, max(sizes)) == (in_rounds(ranks), most(ranks)), ranks


@pytest.mark.parametrize(("name", "numbers", "in_rounds", "each"), EACH)
def test_what_every_rank_sends(name, numbers, in_rounds, each):
    for ranks in numbers:
        assert counted(name, ranks) == (in_rounds(ranks), [each(ranks)] * ranks), ranks


def test_all_algorithms_have_a_formula():
    here = {name for name, *_ in (*MOST, *EACH)}
    others = {name for name in ALGORITHMS if "hierarchical" in name or "torus" in name}
    others |= {"all_reduce/leader", "all_reduce/tree", "all_reduce/double_tree", "all_reduce/mesh"}
    others |= {"all_reduce/mesh_rows_then_columns", "reduce/rabenseifner"}
    assert here | others == set(ALGORITHMS)


# -- bounds ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nothing_beats_the_bounds(name):
    """What all ranks together must receive, and the rounds that news needs to reach all ranks."""
    direct = name.endswith(("one_shot", "two_shot"))  # they have more than one message at a time
    for ranks in (2, 4, 8):
        program = build(name, ranks)
        least = {
            **dict.fromkeys(("broadcast", "reduce", "all_gather", "reduce_scatter"), ranks - 1),
            **dict.fromkeys(("scatter", "gather"), part(ranks)),
            "all_reduce": 2 * (ranks - 1),
            "all_to_all": part(ranks),
            "barrier": 0,
        }[program.op]
        assert sum(received(program, even_sizes(program.chunks))) >= least
        if not (direct or name.startswith(("all_reduce/mesh", "all_reduce/torus_in"))):
            assert rounds(program) >= up(ranks)


@pytest.mark.parametrize("ranks", [3, 5, 6, 7, 12])
def test_ranks_beyond_a_power_of_two_fold(ranks):
    """Two rounds more: the extra ranks give a vector and get one, their partners the same."""
    core = 1 << ranks.bit_length() - 1
    lg = core.bit_length() - 1
    for name, size in (("recursive_doubling", lg), ("halving_doubling", 2 * part(core))):
        turns, sizes = counted(name, ranks)
        assert turns == (lg if name == "recursive_doubling" else 2 * lg) + 2
        folded = [size + (rank < ranks - core) for rank in range(core)]
        assert sizes == [*folded, *[1] * (ranks - core)]


def test_the_reduce_of_rabenseifner():
    """Halving, then a gather: 2·lg P rounds, and 2(P-1)/P through the wire of the root."""
    for ranks in POWERS:
        program = build("reduce/rabenseifner", ranks, root=1)
        assert rounds(program) == 2 * up(ranks)
        assert received(program, even_sizes(ranks))[1] == 2 * part(ranks)


def test_the_root_of_naive_halving_doubling():
    """2·S·lg N bytes, as the lecture says: rank 0 receives lg N vectors, then sends as many."""
    program = build("naive_halving_doubling", 16)
    assert sent(program, [1])[0] + received(program, [1])[0] == 2 * 4


@pytest.mark.parametrize("pieces", [1, 3, 8, 40])
def test_pieces_along_the_ring(pieces):
    """N-2+K rounds of S/K."""
    program = build("broadcast/ring", 6, pieces=pieces)
    assert rounds(program) == 6 - 2 + pieces
    assert {message.spans for message in walk(program).sent} == {
        span(k, k + 1) for k in range(pieces)
    }


# -- trees -----------------------------------------------------------------------------


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("ranks", [3, 6, 7, 8, 15, 16, 31, 33, 64])
def test_trees(ranks):
    """An inner rank of the single tree sends three vectors, and each piece costs four rounds. With
    two trees no rank sends or receives more than two vectors, and pieces are half as large; for a
    pair of them four rounds are ideal, and up to five and a quarter were found.
    """
    lg = ranks.bit_length()
    single, double = build("tree", ranks, pieces=8), build("double_tree", ranks, pieces=8)
    assert max(sent(single, even_sizes(8))) == (3 if ranks > 4 else 2)
    assert max(sent(double, even_sizes(16))) <= 2
    assert max(received(double, even_sizes(16))) <= 2
    assert rounds(build("tree", ranks, pieces=1)) <= 4 * lg
    assert rounds(single) == rounds(build("tree", ranks, pieces=4)) + (16 if ranks > 3 else 8)
    assert rounds(build("double_tree", ranks, pieces=24)) - rounds(double) <= 16 * 5.25


def test_no_rank_is_inner_in_both_trees():
    for ranks in range(1, 65):
        first, second = in_order_tree(ranks), other_tree(ranks)
        assert not (set(first) & set(second)) - {-1}
        assert max(tree.count(rank) for tree in (first, second) for rank in range(ranks)) <= 2


# -- grids -----------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(2, 3), (4, 4), (2, 3, 4), (1, 5), (2, 2, 2, 2), (3, 1, 2)])
def test_torus(dims):
    """2·Σ(X-1) rounds, and the bytes of a ring, whatever the dims."""
    ranks = prod(dims)
    turns, sizes = counted("torus", ranks, dims=dims)
    assert turns == 2 * sum(size - 1 for size in dims)
    assert sizes == [2 * part(ranks)] * ranks


@pytest.mark.parametrize("dims", [(3, 3), (2, 2, 2), (4, 4, 4)])
def test_colours_keep_all_wires_busy(dims):
    """With equal dims every colour works along another dim, in each round: a d-th of the time."""
    ranks, size = prod(dims), dims[0]
    program = build("torus_in_colours", ranks, dims=dims)
    assert rounds(program) == 2 * len(dims) * (size - 1)
    assert sent(program, even_sizes(program.chunks)) == [2 * part(ranks)] * ranks
    sends = walk(program).sent
    for number in range(1, sends[-1].round + 1):
        of_zero = [s for s in sends if (s.round, s.source) == (number, 0)]
        assert len({s.target for s in of_zero}) == len(dims)  # a neighbour in each dim


@pytest.mark.parametrize("dims", [(1, 4), (2, 3), (3, 5), (4, 4), (2, 3, 4)])
def test_mesh(dims):
    """The better form sends what a torus sends; the simple one the whole vector for each dim."""
    ranks = prod(dims)
    turns, sizes = counted("mesh", ranks, dims=dims)
    assert turns == 2 * sum(size - 1 for size in dims)
    assert sum(sizes) == 2 * (ranks - 1)
    simple, whole = counted("mesh_rows_then_columns", ranks, dims=dims)
    assert simple == turns
    assert sum(whole) == sum(2 * part(size) for size in dims) * ranks


@pytest.mark.parametrize("name", ["mesh", "mesh_rows_then_columns"])
def test_a_mesh_uses_no_wire_that_it_has_not(name):
    for _, source, target, _ in walk(build(name, 12, dims=(3, 4))).sent:
        (a, b), (c, d) = divmod(source, 4), divmod(target, 4)
        assert abs(a - c) + abs(b - d) == 1


def test_a_rank_of_a_line_sends_its_part_both_ways():
    """Reduce-scatter on a line: (X-1-i)/X to the right and i/X to the left."""
    halves = [s for s in walk(build("mesh", 5, dims=(1, 5))).sent if s.round <= 4]
    for rank in range(5):
        right = sum(s.source == rank and s.target == rank + 1 for s in halves)
        left = sum(s.source == rank and s.target == rank - 1 for s in halves)
        assert (right, left) == (5 - 1 - rank, rank)


def test_hypercube_is_halving_doubling():
    cube, halving = build("hypercube", 16), build("halving_doubling", 16)
    assert cube.steps == halving.steps


# -- network cards ---------------------------------------------------------------------


NODES = [(2, 2), (2, 4), (4, 4), (8, 8), (3, 2)]


def cards(name, nodes, local, *, cyclic=False, **options):
    """The most that leaves a node, with ranks in the order of nodes, or dealt over them."""
    program = build(name, nodes * local, **options)
    if cyclic and "per_node" in options:
        _, order = placement([rank % nodes for rank in range(program.ranks)])
        program = dealt(program, order)
        assert problems(program) == []
    place = (lambda rank: rank % nodes) if cyclic else (lambda rank: rank // local)
    size = program.ranks if program.op == "all_to_all" else 1
    return size * max(leaving(program, even_sizes(program.chunks), place).values())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_flat_rings_and_hierarchies_at_the_network_cards(nodes, per_node):
    """A flat ring leaves a node once, or, dealt over the nodes, with every rank."""
    ranks, bound = nodes * per_node, part(nodes)
    here = {"per_node": per_node}
    for op, halves in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        ring, hierarchy = f"{op}/ring", f"{op}/hierarchical"
        assert cards(ring, nodes, per_node) == halves * part(ranks)
        assert cards(ring, nodes, per_node, cyclic=True) == halves * part(ranks) * per_node
        assert cards(hierarchy, nodes, per_node, **here) == halves * bound
    for op, halves in (("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)):
        hierarchy = f"{op}/hierarchical"
        assert cards(hierarchy, nodes, per_node, pieces=4, **here) == halves * bound
        assert cards(hierarchy, nodes, per_node, cyclic=True, pieces=3, **here) == halves * bound
    for cyclic in (False, True):
        cast = cards("broadcast/hierarchical", nodes, per_node, cyclic=cyclic, pieces=4, **here)
        assert cast == 1
    assert cards("all_reduce/leader", nodes, per_node, **here) == 2 * bound
    gain = cards("ring", nodes, per_node) / cards("hierarchical", nodes, per_node, **here)
    assert gain == Fraction(ranks - 1, per_node * (nodes - 1))
    for name, options in (("pairwise", {}), ("hierarchical", here)):  # L²(N-1)·n/P: the bound
        sizes = cards(f"all_to_all/{name}", nodes, per_node, **options)
        assert sizes == Fraction(per_node**2 * (nodes - 1), ranks)


def test_the_table_of_two_nodes_with_two_ranks():
    """In vectors. gloo broadcasts by the tree that begins with the nearest rank."""
    ring = [cards(f"{op}/ring", 2, 2) for op in ("all_reduce", "reduce_scatter", "all_gather")]
    assert ring == [Fraction(3, 2), Fraction(3, 4), Fraction(3, 4)]
    assert cards("broadcast/binomial", 2, 2) == 1
    assert cards("broadcast/binomial", 2, 2, near_first=True) == 2
    assert cards("broadcast/binomial", 2, 2, cyclic=True, near_first=True) == 1
    assert cards("all_to_all/pairwise", 2, 2) == 1


@pytest.mark.parametrize(("nodes", "per_node"), NODES)
def test_rounds_and_messages_of_hierarchies(nodes, per_node):
    ranks, here = nodes * per_node, {"per_node": per_node}
    assert rounds(build("hierarchical", ranks, **here)) == 2 + 2 * (nodes - 1)
    leader = build("leader", ranks, **here)
    assert rounds(leader) == 2 * up(per_node) + 2 * (nodes - 1)
    exchange = build("all_to_all/hierarchical", ranks, **here)
    sends = [sum(step.kind == "send" for step in steps) for steps in exchange.steps]
    assert sends == [per_node - 1 + nodes - 1] * ranks
    assert rounds(exchange) == per_node - 1 + nodes - 1
    size = part(per_node) + part(nodes)
    assert sent(exchange, even_sizes(exchange.chunks)) == [size / ranks] * ranks


def test_near_first_keeps_large_messages_inside():
    """Halving-doubling on 4 nodes of 4: near first, as little leaves a node as with a hierarchy."""
    assert cards("halving_doubling", 4, 4) == 2 * part(4)
    assert cards("rabenseifner", 4, 4) == 2 * part(4) * 4
