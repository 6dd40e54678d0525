"""Neighbour exchange: an all-gather in P/2 rounds between neighbours only.

Even ranks take turns with the next and the one before. In the first round a rank gives its own
block; in every later one the two blocks that came in the round before (Chen et al., 2005). Half of
the rounds of a ring, for an even number of ranks.

    all_gather/neighbour_exchange: 6 ranks, 6 chunks, 3 rounds, each rank sends 5/6 of the vector
            1       2           3
    rank 0  0>1 =1  0-1>5 =4-5  4-5>1 =2-3
    rank 1  1>0 =0  0-1>2 =2-3  2-3>0 =4-5
    rank 2  2>3 =3  2-3>1 =0-1  0-1>3 =4-5
    rank 3  3>2 =2  2-3>4 =4-5  4-5>2 =0-1
    rank 4  4>5 =5  4-5>3 =2-3  2-3>5 =0-1
    rank 5  5>4 =4  4-5>0 =0-1  0-1>4 =2-3
    0>1: chunk to rank 1, =: kept
"""

from howdah.collectives.limits import require
from howdah.collectives.program import Message, Part, Program, chunk, join, program


def all_gather(ranks: int) -> Program:
    """P/2·α + (P-1)/P·nβ, for an even number of ranks."""
    require(
        ranks,
        lambda n: n == 1 or n % 2 == 0,
        who="all_gather/neighbour_exchange",
        what="an even number",
        instead="all_gather/ring, which takes any number",
    )
    part: Part = []
    came = [chunk(rank) for rank in range(ranks)]  # what each rank passes on
    for turn in range(ranks // 2):
        peers = [(rank + (1 if (rank + turn) % 2 == 0 else -1)) % ranks for rank in range(ranks)]
        part += [Message(turn, rank, peers[rank], came[rank]) for rank in range(ranks)]
        # after the first round: the own block and the partner's
        arrived = [came[peer] for peer in peers]
        came = [join((came[r], arrived[r])) for r in range(ranks)] if turn == 0 else arrived
    return program("all_gather", "neighbour_exchange", ranks, ranks, part)
