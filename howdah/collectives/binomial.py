"""Binomial trees: everyone who has something passes it on, so the number doubles each round.

The farthest rank is reached first. With ranks in the order of their nodes, one message then enters
each node, where the tree that begins with the nearest (`near_first`, the one of gloo) sends P - P/N
messages between N nodes.

    broadcast/binomial: 8 ranks, 1 chunk, 3 rounds, a rank sends 0 to 3 vectors
            1    2    3
    rank 0  0>4  0>2  0>1
    rank 1            =0
    rank 2       =0   0>3
    rank 3            =0
    rank 4  =0   0>6  0>5
    rank 5            =0
    rank 6       =0   0>7
    rank 7            =0
    0>4: chunk to rank 4, =: kept

    reduce/binomial: 4 ranks, 1 chunk, 2 rounds, a rank sends 0 to 1 vectors
            1    2
    rank 0  +0   +0
    rank 1  0>0
    rank 2  +0   0>0
    rank 3  0>2
    0>0: chunk to rank 0, +: added to what is there

    scatter/binomial: 4 ranks, 4 chunks, 2 rounds, a rank sends 0 to 3/4 of the vector
            1      2
    rank 0  2-3>2  1>1
    rank 1         =1
    rank 2  =2-3   3>3
    rank 3         =3
    2-3>2: chunks to rank 2, =: kept

    gather/binomial: 4 ranks, 4 chunks, 2 rounds, a rank sends 0 to 1/2 of the vector
            1    2
    rank 0  =1   =2-3
    rank 1  1>0
    rank 2  =3   2-3>0
    rank 3  3>2
    1>0: chunk to rank 0, =: kept

    all_reduce/naive_halving_doubling: 4 ranks, 1 chunk, 4 rounds, a rank sends 1 to 2 vectors
            1    2    3    4
    rank 0  +0   +0   0>2  0>1
    rank 1  0>0            =0
    rank 2  +0   0>0  =0   0>3
    rank 3  0>2            =0
    0>2: chunk to rank 2, +: added to what is there, =: kept
"""

from collections.abc import Sequence
from functools import partial

from howdah.collectives.program import (
    Message,
    Part,
    Program,
    Spans,
    chunk,
    join,
    mirror,
    program,
    then,
)
from howdah.collectives.rooted import rooted


def tree(ranks: int, root: int, shares: Sequence[Spans], *, near_first: bool = False) -> Part:
    """Messages that bring shares[r] to rank r from the root.

    Rank `root + i` has number i. Number i, a multiple of 2h, sends to number i + h what is for the
    numbers i + h to i + 2h - 1; equal shares are sent once. `near_first` needs equal shares.
    """
    part: Part = []
    levels = (ranks - 1).bit_length()
    for turn in range(levels):
        half = 1 << (turn if near_first else levels - 1 - turn)
        for i in range(half) if near_first else range(0, ranks, 2 * half):
            below = range(i + half, min(i + 2 * half, ranks))
            spans = join(shares[(root + j) % ranks] for j in below)
            part.append(Message(turn, (root + i) % ranks, (root + i + half) % ranks, spans))
    return part


def broadcast(ranks: int, *, root: int = 0, near_first: bool = False) -> Program:
    """⌈lg P⌉·(α + nβ)."""
    return rooted("broadcast", "binomial", partial(tree, near_first=near_first), ranks, root)


def reduce(ranks: int, *, root: int = 0) -> Program:
    """The mirror of the broadcast, with an addition for each message."""
    return rooted("reduce", "binomial", tree, ranks, root)


def scatter(ranks: int, *, root: int = 0) -> Program:
    """Each message has the blocks of all ranks below its target: ⌈lg P⌉·α + (P-1)/P·nβ."""
    return rooted("scatter", "binomial", tree, ranks, root)


def gather(ranks: int, *, root: int = 0) -> Program:
    """The mirror of the scatter."""
    return rooted("gather", "binomial", tree, ranks, root)


def all_reduce(ranks: int) -> Program:
    """The naive halving-doubling: the whole vector in each of 2·⌈lg P⌉ rounds, half of the ranks
    idle in the first, three quarters in the second: rank 0 moves 2·n·⌈lg P⌉ bytes.
    """
    down = tree(ranks, 0, [chunk(0)] * ranks)
    part = then(mirror(down, add=True), down)
    return program("all_reduce", "naive_halving_doubling", ranks, 1, part)
