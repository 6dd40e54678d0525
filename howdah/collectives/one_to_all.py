"""Linear algorithms: the root exchanges with one rank after the other.

P-1 rounds, in each of which the root's wire is busy and all others are idle. They need nothing but
sends and receives, and are what every other algorithm is measured against.

    broadcast/one_to_all: 3 ranks, 1 chunk, 2 rounds, a rank sends 0 to 2 vectors
            1    2
    rank 0  0>1  0>2
    rank 1  =0
    rank 2       =0
    0>1: chunk to rank 1, =: kept

    reduce/all_to_one: 3 ranks, 1 chunk, 2 rounds, a rank sends 0 to 1 vectors
            1    2
    rank 0  +0   +0
    rank 1       0>0
    rank 2  0>0
    0>0: chunk to rank 0, +: added to what is there

    scatter/one_to_all: 3 ranks, 3 chunks, 2 rounds, a rank sends 0 to 2/3 of the vector
            1    2
    rank 0  1>1  2>2
    rank 1  =1
    rank 2       =2
    1>1: chunk to rank 1, =: kept

    gather/all_to_one: 3 ranks, 3 chunks, 2 rounds, a rank sends 0 to 1/3 of the vector
            1    2
    rank 0  =2   =1
    rank 1       1>0
    rank 2  2>0
    1>0: chunk to rank 0, =: kept

    all_reduce/naive: 3 ranks, 1 chunk, 4 rounds, a rank sends 1 to 2 vectors
            1    2    3    4
    rank 0  +0   +0   0>1  0>2
    rank 1       0>0  =0
    rank 2  0>0            =0
    0>1: chunk to rank 1, +: added to what is there, =: kept
"""

from collections.abc import Sequence

from howdah.collectives.program import Message, Part, Program, Spans, chunk, mirror, program, then
from howdah.collectives.rooted import rooted


def linear(ranks: int, root: int, shares: Sequence[Spans]) -> Part:
    """Share r goes from the root to rank r, one after the other."""
    others = [rank for rank in range(ranks) if rank != root]
    return [Message(turn, root, rank, shares[rank]) for turn, rank in enumerate(others)]


def broadcast(ranks: int, *, root: int = 0) -> Program:
    """Everything to each rank in turn: (P-1)·(α + nβ)."""
    return rooted("broadcast", "one_to_all", linear, ranks, root)


def reduce(ranks: int, *, root: int = 0) -> Program:
    """The mirror of the broadcast."""
    return rooted("reduce", "all_to_one", linear, ranks, root)


def scatter(ranks: int, *, root: int = 0) -> Program:
    """Block r to rank r: (P-1)·α + (P-1)/P·nβ at the root."""
    return rooted("scatter", "one_to_all", linear, ranks, root)


def gather(ranks: int, *, root: int = 0) -> Program:
    """The mirror of the scatter."""
    return rooted("gather", "all_to_one", linear, ranks, root)


def all_reduce(ranks: int) -> Program:
    """The naive all-reduce: reduce to rank 0, then broadcast: 2(P-1)·(α + nβ)."""
    down = linear(ranks, 0, [chunk(0)] * ranks)
    return program("all_reduce", "naive", ranks, 1, then(mirror(down, add=True), down))
