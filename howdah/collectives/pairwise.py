"""Pairwise exchange: in round s every rank sends to r + s and receives from r - s, without detours.

P-1 rounds, and each block travels once. For an all-to-all nothing can send less; a reduce-scatter
adds each block where it belongs, in the order of the rounds.

    reduce_scatter/pairwise: 4 ranks, 4 chunks, 3 rounds, each rank sends 3/4 of the vector
            1       2       3
    rank 0  1>1 +0  2>2 +0  3>3 +0
    rank 1  2>2 +1  3>3 +1  0>0 +1
    rank 2  3>3 +2  0>0 +2  1>1 +2
    rank 3  0>0 +3  1>1 +3  2>2 +3
    1>1: chunk to rank 1, +: added to what is there

    all_to_all/pairwise: 4 ranks, 16 chunks, 3 rounds, each rank sends 3/4 of the vector
            1           2           3
    rank 0  0.1>1 =3.0  0.2>2 =2.0  0.3>3 =1.0
    rank 1  1.2>2 =0.1  1.3>3 =3.1  1.0>0 =2.1
    rank 2  2.3>3 =1.2  2.0>0 =0.2  2.1>1 =3.2
    rank 3  3.0>0 =2.3  3.1>1 =1.3  3.2>2 =0.3
    0.1>1: chunk to rank 1, =: kept
"""

from collections.abc import Sequence

from howdah.collectives.program import Message, Program, chunk, program


def exchanges(group: Sequence[int]) -> list[tuple[int, int, int]]:
    """(turn, source, target) of all messages, each member to every other."""
    size = len(group)
    return [(s - 1, group[i], group[(i + s) % size]) for s in range(1, size) for i in range(size)]


def all_to_all(ranks: int) -> Program:
    """(P-1)·α + (P-1)/P·nβ."""
    part = [Message(s, a, b, chunk(a * ranks + b)) for s, a, b in exchanges(range(ranks))]
    return program("all_to_all", "pairwise", ranks, ranks * ranks, part)


def reduce_scatter(ranks: int) -> Program:
    """(P-1)·α + (P-1)/P·n(β + γ)."""
    part = [Message(s, a, b, chunk(b), add=True) for s, a, b in exchanges(range(ranks))]
    return program("reduce_scatter", "pairwise", ranks, ranks, part)
