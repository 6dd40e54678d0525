"""Hierarchies: nodes of L ranks each, with a fast link inside and a slow one between.

A flat ring sends almost twice the vector through the card of every node, L times that if its ranks
are badly ordered. Two ways to send 2(N-1)/N·n from a node, the least that is possible:

    leader        reduce to one rank of the node, ring all-reduce between these, broadcast: one flow
    hierarchical  reduce-scatter inside, so that each rank has 1/L of the node's sum; all-reduce of
                  that with the ranks of the same place in the other nodes, L at once; all-gather

Rank r is number r mod L of node r div L; ranks that are dealt over the nodes: `dealt.py`. Inside,
every rank gives each other one its share in one round, and a sum is rounded once. In pieces the
stages overlap: one piece is between the nodes while the next is inside. A broadcast goes from node
to node by one rank of each, and is passed on inside.

    broadcast/hierarchical: 4 ranks, 1 chunk, 2 rounds, a rank sends 0 to 2 vectors
            1      2
    rank 0  0>2,1
    rank 1  =0
    rank 2  =0     0>3
    rank 3         =0
    0>2: chunk to rank 2, =: kept

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
from itertools import product

from howdah.collectives.binomial import tree
from howdah.collectives.dims import gather_along, in_order, lines, reduce_along
from howdah.collectives.limits import node_size, require_pieces, require_root
from howdah.collectives.pairwise import exchanges
from howdah.collectives.program import (
    Message,
    Part,
    Program,
    Spans,
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
    """Reduce-scatter inside, then between, all-gather between, then inside; piece after piece."""
    size = node_size(ranks, per_node, who="all_reduce/hierarchical")
    require_pieces(pieces)
    dims, order = (ranks // size, size), (1, 0)
    stages = []
    for piece in range(pieces):
        halves = _two_dims(dims, in_order(dims, order, piece * ranks))
        stages.append([*halves, *gather_along(halves)])
    return program("all_reduce", "hierarchical", ranks, pieces * ranks, overlapped(stages))


def overlapped(pieces: Sequence[Sequence[Part]]) -> Part:
    """Stage s of piece p, while piece p + 1 is in stage s - 1.

    The last stage ends when the others end: a short first and last one then have the wires inside
    the nodes one after the other. In a turn the later pieces go first: what a piece sends in its
    next stage is still to be added, while what the next piece sends has been there.
    """
    longest = max(length(stage) for stages in pieces for stage in stages)
    last = len(pieces[0]) - 1
    return [
        message
        for p, stages in reversed([*enumerate(pieces)])
        for s, stage in enumerate(stages)
        for message in shift(stage, (p + s) * longest + (s == last) * (longest - length(stage)))
    ]


def reduce_scatter(ranks: int, *, per_node: int | None = None, pieces: int = 1) -> Program:
    """Inside the nodes first: (N-1)/N·n through the cards of a node."""
    size = node_size(ranks, per_node, who="reduce_scatter/hierarchical")
    stages = _by_blocks(ranks, size, pieces)
    return program("reduce_scatter", "hierarchical", ranks, pieces * ranks, overlapped(stages))


def all_gather(ranks: int, *, per_node: int | None = None, pieces: int = 1) -> Program:
    """Between the nodes first: the mirror of the reduce-scatter."""
    size = node_size(ranks, per_node, who="all_gather/hierarchical")
    stages = [gather_along(halves) for halves in _by_blocks(ranks, size, pieces)]
    return program("all_gather", "hierarchical", ranks, pieces * ranks, overlapped(stages))


def _by_blocks(ranks: int, size: int, pieces: int) -> list[list[Part]]:
    """The two stages of a reduce-scatter for each piece of every rank's block."""
    require_pieces(pieces)
    dims = (ranks // size, size)
    return [
        _two_dims(dims, [chunk(rank * pieces + piece) for rank in range(ranks)])
        for piece in range(pieces)
    ]


def _two_dims(dims: tuple[int, int], owned: Sequence[Spans]) -> list[Part]:
    """A reduce-scatter inside the nodes, and then between them."""
    inside, _ = reduce_along(dims, (1, 0), owned, reduce_at_once)
    _, between = reduce_along(dims, (1, 0), owned, reduce_ring)
    return [inside, between]


def reduce_at_once(group: Sequence[int], shares: Sequence[Spans]) -> Part:
    """Rank group[i] ends with the sum of shares[i]: one round."""
    return [
        Message(0, source, target, share, add=True)
        for target, share in zip(group, shares, strict=True)
        for source in group
        if source != target
    ]


def broadcast(
    ranks: int, *, root: int = 0, per_node: int | None = None, pieces: int = 1
) -> Program:
    """Along the nodes, piece after piece; n through a card. Who has a piece gives it to the other
    ranks of its node while it goes on.
    """
    size = node_size(ranks, per_node, who="broadcast/hierarchical")
    require_root(ranks, root)
    require_pieces(pieces)
    nodes = ranks // size
    leads = [(root + hop * size) % ranks for hop in range(nodes)]
    part = []
    for piece, (hop, lead) in product(range(pieces), enumerate(leads)):
        to = [leads[hop + 1]] if hop + 1 < nodes else []
        first = lead - lead % size
        to += [rank for rank in range(first, first + size) if rank != lead]
        part += [Message(piece + hop, lead, rank, chunk(piece)) for rank in to]
    return program("broadcast", "hierarchical", ranks, pieces, part, root=root)


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
