"""Hierarchies: nodes of L ranks each, with a fast link inside and a slow one between.

A flat ring sends almost twice the vector through the card of every node, L times that if its ranks
are badly ordered. Two ways to send 2(N-1)/N·n from a node, the least that is possible:

    leader        reduce to one rank of the node, ring all-reduce between these, broadcast: one flow
    hierarchical  reduce-scatter inside, so that each rank has 1/L of the node's sum; all-reduce of
                  that with the ranks of the same place in the other nodes, L at once; all-gather

Rank r is number r mod L of node r div L. In pieces the three stages of `hierarchical` overlap: one
piece is between the nodes while the next is inside.

    all_gather/hierarchical: 4 ranks, 4 chunks, 2 rounds, each rank sends 3/4 of the vector
            1       2
    rank 0  0>2 =2  0,2>1 =1,3
    rank 1  1>3 =3  1,3>0 =0,2
    rank 2  2>0 =0  0,2>3 =1,3
    rank 3  3>1 =1  1,3>2 =0,2
    0>2: chunk to rank 2, =: kept

    reduce_scatter/hierarchical: 4 ranks, 4 chunks, 2 rounds, each rank sends 3/4 of the vector
            1           2
    rank 0  1,3>1 +0,2  2>2 +0
    rank 1  0,2>0 +1,3  3>3 +1
    rank 2  1,3>3 +0,2  0>0 +2
    rank 3  0,2>2 +1,3  1>1 +3
    1,3>1: chunks to rank 1, +: added to what is there

    all_reduce/leader: 4 ranks, 2 chunks, 4 rounds, a rank sends 1 to 2 vectors
            1      2       3       4
    rank 0  +0-1   1>2 +0  0>2 =1  0-1>1
    rank 1  0-1>0                  =0-1
    rank 2  +0-1   0>0 +1  1>0 =0  0-1>3
    rank 3  0-1>2                  =0-1
    1>2: chunk to rank 2, +: added to what is there, =: kept

    all_reduce/hierarchical: 4 ranks, 4 chunks, 4 rounds, each rank sends 3/2 vectors
            1           2       3       4
    rank 0  2-3>1 +0-1  1>2 +0  0>2 =1  0-1>1 =2-3
    rank 1  0-1>0 +2-3  3>3 +2  2>3 =3  2-3>0 =0-1
    rank 2  2-3>3 +0-1  0>0 +1  1>0 =0  0-1>3 =2-3
    rank 3  0-1>2 +2-3  2>1 +3  3>1 =2  2-3>2 =0-1
    2-3>1: chunks to rank 1, +: added to what is there, =: kept

    all_to_all/hierarchical: 4 ranks, 16 chunks, 2 rounds, each rank sends 1 vector
            1                   2
    rank 0  0.1,0.3>1 =1.0,1.2  0.2,1.2>2 =2.0,3.0
    rank 1  1.0,1.2>0 =0.1,0.3  0.3,1.3>3 =2.1,3.1
    rank 2  2.1,2.3>3 =3.0,3.2  2.0,3.0>0 =0.2,1.2
    rank 3  3.0,3.2>2 =2.1,2.3  2.1,3.1>1 =0.3,1.3
    0.1,0.3>1: chunks to rank 1, =: kept
"""

from collections.abc import Sequence

from howdah.collectives.binomial import tree
from howdah.collectives.dims import gather_along, in_order, lines, reduce_along
from howdah.collectives.limits import node_size, require_pieces
from howdah.collectives.pairwise import exchanges
from howdah.collectives.program import (
    Message,
    Part,
    Program,
    chunk,
    join,
    length,
    mirror,
    program,
    shift,
    span,
    then,
)
from howdah.collectives.ring import gather_ring, reduce_ring


def leader(ranks: int, *, per_node: int | None = None) -> Program:
    """One rank of each node talks to the other nodes."""
    size = node_size(ranks, per_node, who="all_reduce/leader")
    nodes = ranks // size
    whole = span(0, nodes)
    inside = [
        Message(turn, node * size + source, node * size + target, whole)
        for node in range(nodes)
        for turn, source, target, spans, *_ in tree(size, 0, [chunk(0)] * size)
        if spans
    ]
    leaders, shares = range(0, ranks, size), [chunk(node) for node in range(nodes)]
    between = then(reduce_ring(leaders, shares), gather_ring(leaders, shares))
    part = then(mirror(inside, add=True), between, inside)
    return program("all_reduce", "leader", ranks, nodes, part)


def all_reduce(ranks: int, *, per_node: int | None = None, pieces: int = 1) -> Program:
    """Reduce-scatter inside, all-reduce between, all-gather inside; piece after piece."""
    size = node_size(ranks, per_node, who="all_reduce/hierarchical")
    require_pieces(pieces)
    dims, order = (ranks // size, size), (1, 0)
    stages = []
    for piece in range(pieces):
        owned = in_order(dims, order, piece * ranks)
        inside, between = reduce_along(dims, order, owned, reduce_ring)
        back = gather_along([inside, between])
        stages.append([inside, then(between, back[0]), back[1]])
    return program("all_reduce", "hierarchical", ranks, pieces * ranks, overlapped(stages))


def overlapped(pieces: Sequence[Sequence[Part]]) -> Part:
    """Stage s of piece p, while piece p + 1 is in stage s - 1.

    The last stage ends when the others end: a short first and last one then have the wires inside
    the nodes one after the other.
    """
    longest = max(length(stage) for stages in pieces for stage in stages)
    last = len(pieces[0]) - 1
    return [
        message
        for p, stages in enumerate(pieces)
        for s, stage in enumerate(stages)
        for message in shift(stage, (p + s) * longest + (s == last) * (longest - length(stage)))
    ]


def reduce_scatter(ranks: int, *, per_node: int | None = None) -> Program:
    """Inside the nodes first: (N-1)/N·n through the cards of a node."""
    size = node_size(ranks, per_node, who="reduce_scatter/hierarchical")
    return program("reduce_scatter", "hierarchical", ranks, ranks, then(*_two_dims(ranks, size)))


def all_gather(ranks: int, *, per_node: int | None = None) -> Program:
    """Between the nodes first: the mirror of the reduce-scatter."""
    size = node_size(ranks, per_node, who="all_gather/hierarchical")
    part = then(*gather_along(_two_dims(ranks, size)))
    return program("all_gather", "hierarchical", ranks, ranks, part)


def _two_dims(ranks: int, size: int) -> list[Part]:
    blocks = [chunk(rank) for rank in range(ranks)]
    return reduce_along((ranks // size, size), (1, 0), blocks, reduce_ring)


def all_to_all(ranks: int, *, per_node: int | None = None) -> Program:
    """First inside: rank l gives rank m of its node all that is for the ranks m of any node. Then
    the ranks m of all nodes exchange N-1 messages of L blocks each, in place of (N-1)·L.
    """
    size = node_size(ranks, per_node, who="all_to_all/hierarchical")
    dims = (ranks // size, size)
    inside = [
        Message(s, a, b, join(chunk(a * ranks + to) for to in range(b % size, ranks, size)))
        for line in lines(dims, 1)
        for s, a, b in exchanges(line)
    ]
    between = [
        Message(s, a, b, join(chunk(of * ranks + b) for of in lines(dims, 1)[a // size]))
        for line in lines(dims, 0)
        for s, a, b in exchanges(line)
    ]
    part = then(inside, between)
    return program("all_to_all", "hierarchical", ranks, ranks * ranks, part)
