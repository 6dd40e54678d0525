"""Rings: every rank sends to the next one only, all at the same time.

A reduce-scatter of P-1 rounds, in which sums go round, then an all-gather of P-1 rounds, in which
the finished shares go round. Each rank sends (P-1)/P of the vector in each half, which no algorithm
can beat, and every message goes to a neighbour; but the number of rounds grows with P.

    all_gather/ring: 4 ranks, 4 chunks, 3 rounds, each rank sends 3/4 of the vector
            1       2       3
    rank 0  0>1 =3  3>1 =2  2>1 =1
    rank 1  1>2 =0  0>2 =3  3>2 =2
    rank 2  2>3 =1  1>3 =0  0>3 =3
    rank 3  3>0 =2  2>0 =1  1>0 =0
    0>1: chunk to rank 1, =: kept

    reduce_scatter/ring: 4 ranks, 4 chunks, 3 rounds, each rank sends 3/4 of the vector
            1       2       3
    rank 0  3>1 +2  2>1 +1  1>1 +0
    rank 1  0>2 +3  3>2 +2  2>2 +1
    rank 2  1>3 +0  0>3 +3  3>3 +2
    rank 3  2>0 +1  1>0 +0  0>0 +3
    3>1: chunk to rank 1, +: added to what is there

    all_reduce/ring: 4 ranks, 4 chunks, 6 rounds, each rank sends 3/2 vectors
            1       2       3       4       5       6
    rank 0  3>1 +2  2>1 +1  1>1 +0  0>1 =3  3>1 =2  2>1 =1
    rank 1  0>2 +3  3>2 +2  2>2 +1  1>2 =0  0>2 =3  3>2 =2
    rank 2  1>3 +0  0>3 +3  3>3 +2  2>3 =1  1>3 =0  0>3 =3
    rank 3  2>0 +1  1>0 +0  0>0 +3  3>0 =2  2>0 =1  1>0 =0
    3>1: chunk to rank 1, +: added to what is there, =: kept

    all_gather/segmented_ring: 3 ranks, 6 chunks, 4 rounds, each rank sends 2/3 of the vector
            1       2       3       4
    rank 0  0>1 =4  1>1 =5  4>1 =2  5>1 =3
    rank 1  2>2 =0  3>2 =1  0>2 =4  1>2 =5
    rank 2  4>0 =2  5>0 =3  2>0 =0  3>0 =1
    0>1: chunk to rank 1, =: kept

    reduce_scatter/segmented_ring: 3 ranks, 6 chunks, 4 rounds, each rank sends 2/3 of the vector
            1       2       3       4
    rank 0  4>1 +2  5>1 +3  2>1 +0  3>1 +1
    rank 1  0>2 +4  1>2 +5  4>2 +2  5>2 +3
    rank 2  2>0 +0  3>0 +1  0>0 +4  1>0 +5
    4>1: chunk to rank 1, +: added to what is there

    all_reduce/segmented_ring: 3 ranks, 6 chunks, 8 rounds, each rank sends 4/3 vectors
            1       2       3       4       5       6       7       8
    rank 0  4>1 +2  5>1 +3  2>1 +0  3>1 +1  0>1 =4  1>1 =5  4>1 =2  5>1 =3
    rank 1  0>2 +4  1>2 +5  4>2 +2  5>2 +3  2>2 =0  3>2 =1  0>2 =4  1>2 =5
    rank 2  2>0 +0  3>0 +1  0>0 +4  1>0 +5  4>0 =2  5>0 =3  2>0 =0  3>0 =1
    4>1: chunk to rank 1, +: added to what is there, =: kept
"""

from collections.abc import Sequence

from howdah.collectives.dims import Along
from howdah.collectives.limits import require_pieces
from howdah.collectives.program import (
    Message,
    Part,
    Program,
    Spans,
    chunk,
    cut,
    program,
    span,
    then,
)


def gather_ring(group: Sequence[int], shares: Sequence[Spans]) -> Part:
    """Rank group[i] begins with shares[i], and all end with all: P-1 rounds.

    In round s, number i sends share i-s to the next, and receives share i-s-1.
    """
    size = len(group)
    return [
        Message(s, group[i], group[(i + 1) % size], shares[(i - s) % size])
        for s in range(size - 1)
        for i in range(size)
    ]


def reduce_ring(group: Sequence[int], shares: Sequence[Spans]) -> Part:
    """Rank group[i] ends with the sum of shares[i]: in round s, number i sends share i-1-s."""
    size = len(group)
    return [
        Message(s, group[i], group[(i + 1) % size], shares[(i - 1 - s) % size], add=True)
        for s in range(size - 1)
        for i in range(size)
    ]


def all_gather(ranks: int) -> Program:
    """(P-1)·α + (P-1)/P·nβ."""
    part = gather_ring(range(ranks), [chunk(rank) for rank in range(ranks)])
    return program("all_gather", "ring", ranks, ranks, part)


def reduce_scatter(ranks: int) -> Program:
    """(P-1)·α + (P-1)/P·n(β + γ)."""
    part = reduce_ring(range(ranks), [chunk(rank) for rank in range(ranks)])
    return program("reduce_scatter", "ring", ranks, ranks, part)


def all_reduce(ranks: int) -> Program:
    """2(P-1)·α + 2(P-1)/P·nβ."""
    shares = [chunk(rank) for rank in range(ranks)]
    part = then(reduce_ring(range(ranks), shares), gather_ring(range(ranks), shares))
    return program("all_reduce", "ring", ranks, ranks, part)


def segmented_all_reduce(ranks: int, *, pieces: int = 2) -> Program:
    """Each share in `pieces` segments, sent one after the other.

    A segment is sent on `pieces` rounds after the sum that it belongs to has arrived, so there is
    time to add it while the next one is under way: bytes as before, and a round for each segment.
    """
    both = lambda *of: then(reduce_ring(*of), gather_ring(*of))  # noqa: E731
    return _segmented("all_reduce", both, ranks, pieces)


def segmented_reduce_scatter(ranks: int, *, pieces: int = 2) -> Program:
    """The first half of it."""
    return _segmented("reduce_scatter", reduce_ring, ranks, pieces)


def segmented_all_gather(ranks: int, *, pieces: int = 2) -> Program:
    """The second half of it."""
    return _segmented("all_gather", gather_ring, ranks, pieces)


def _segmented(op: str, along: Along, ranks: int, pieces: int) -> Program:
    require_pieces(pieces)
    part: Part = []
    whole = cut(span(0, ranks * pieces), ranks)
    for piece in range(pieces):
        shares = [cut(share, pieces)[piece] for share in whole]
        one = along(range(ranks), shares)
        part += [message._replace(turn=message.turn * pieces + piece) for message in one]
    return program(op, "segmented_ring", ranks, ranks * pieces, part)
