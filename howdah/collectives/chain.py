"""The broadcast along a ring in one direction, whole or in pieces.

Whole: (P-1)·n/B, as slow as one-to-all. In K pieces a rank sends one piece on while it receives
the next, so all wires are busy: (P-2+K)·n/(K·B), close to n/B for K far above P. Backwards it is a
reduce.

    broadcast/ring: 4 ranks, 1 chunk, 3 rounds, a rank sends 0 to 1 vectors
            1    2    3
    rank 0  0>1
    rank 1  =0   0>2
    rank 2       =0   0>3
    rank 3            =0
    0>1: chunk to rank 1, =: kept

    broadcast/ring_in_pieces: 4 ranks, 4 chunks, 6 rounds, a rank sends 0 to 1 vectors
            1    2       3       4       5       6
    rank 0  0>1  1>1     2>1     3>1
    rank 1  =0   0>2 =1  1>2 =2  2>2 =3  3>2
    rank 2       =0      0>3 =1  1>3 =2  2>3 =3  3>3
    rank 3               =0      =1      =2      =3
    0>1: chunk to rank 1, =: kept

    reduce/ring_in_pieces: 4 ranks, 4 chunks, 6 rounds, a rank sends 0 to 1 vectors
            1    2       3       4       5       6
    rank 0               +3      +2      +1      +0
    rank 1       +3      3>0 +2  2>0 +1  1>0 +0  0>0
    rank 2  +3   3>1 +2  2>1 +1  1>1 +0  0>1
    rank 3  3>2  2>2     1>2     0>2
    3>0: chunk to rank 0, +: added to what is there
"""

from howdah.collectives.limits import require_pieces, require_root
from howdah.collectives.program import Message, Part, Program, chunk, mirror, program


def chain(ranks: int, root: int, pieces: int) -> Part:
    """The vector goes from the root along all ranks, piece after piece."""
    return [
        Message(piece + hop, (root + hop) % ranks, (root + hop + 1) % ranks, chunk(piece))
        for piece in range(pieces)
        for hop in range(ranks - 1)
    ]


def broadcast(ranks: int, *, root: int = 0, pieces: int = 1) -> Program:
    """(P-2+K)·(α + nβ/K) with K pieces."""
    require_root(ranks, root)
    require_pieces(pieces)
    name = "ring" if pieces == 1 else "ring_in_pieces"
    return program("broadcast", name, ranks, pieces, chain(ranks, root, pieces), root=root)


def broadcast_in_pieces(ranks: int, *, root: int = 0, pieces: int = 4) -> Program:
    """A broadcast along the ring in pieces, four unless it is given another number."""
    return broadcast(ranks, root=root, pieces=pieces)


def reduce(ranks: int, *, root: int = 0, pieces: int = 4) -> Program:
    """The mirror of the broadcast in pieces: every rank adds its own to what it passes on."""
    require_root(ranks, root)
    require_pieces(pieces)
    part = mirror(chain(ranks, root, pieces), add=True)
    return program("reduce", "ring_in_pieces", ranks, pieces, part, root=root)
