"""Bruck's algorithms: ⌈lg P⌉ rounds for any number of ranks.

All-gather: in round k a rank sends all that it has, at most 2^k blocks, to rank r - 2^k; in the
last round only what is missing. All-to-all: block j is what has j ranks to go; in round k all
blocks whose j has bit k go 2^k ranks on. lg P messages in place of P-1, but a block travels once
for each bit of j: n/2·lg P bytes. The barrier is the all-gather of blocks without bytes
(dissemination). Chunks keep their places, so nothing is rotated at the end.

    all_gather/bruck: 5 ranks, 5 chunks, 3 rounds, each rank sends 4/5 of the vector
            1       2           3
    rank 0  0>4 =1  0-1>3 =2-3  0>1 =4
    rank 1  1>0 =2  1-2>4 =3-4  1>2 =0
    rank 2  2>1 =3  2-3>0 =0,4  2>3 =1
    rank 3  3>2 =4  3-4>1 =0-1  3>4 =2
    rank 4  4>3 =0  0,4>2 =1-2  4>0 =3
    0>4: chunk to rank 4, =: kept

    all_to_all/bruck: 5 ranks, 25 chunks, 3 rounds, each rank sends 1 vector
            1                   2                   3
    rank 0  0.1,0.3>1 =4.0,4.2  0.2,4.2>2 =2.0,3.0  0.4>4 =1.0
    rank 1  1.2,1.4>2 =0.1,0.3  0.3,1.3>3 =3.1,4.1  1.0>0 =2.1
    rank 2  2.0,2.3>3 =1.2,1.4  1.4,2.4>4 =0.2,4.2  2.1>1 =3.2
    rank 3  3.1,3.4>4 =2.0,2.3  2.0,3.0>0 =0.3,1.3  3.2>2 =4.3
    rank 4  4.0,4.2>0 =3.1,3.4  3.1,4.1>1 =1.4,2.4  4.3>3 =0.4
    0.1,0.3>1: chunks to rank 1, =: kept

    barrier/dissemination: 5 ranks, 5 chunks, 3 rounds
            1       2           3
    rank 0  0>4 =1  0-1>3 =2-3  0>1 =4
    rank 1  1>0 =2  1-2>4 =3-4  1>2 =0
    rank 2  2>1 =3  2-3>0 =0,4  2>3 =1
    rank 3  3>2 =4  3-4>1 =0-1  3>4 =2
    rank 4  4>3 =0  0,4>2 =1-2  4>0 =3
    0>4: chunk to rank 4, =: kept
"""

from howdah.collectives.program import Message, Part, Program, chunk, join, program


def gather_bruck(ranks: int) -> Part:
    """In round k, rank r sends its blocks r to r + 2^k - 1 to rank r - 2^k."""
    part: Part = []
    for turn in range((ranks - 1).bit_length()):
        step = 1 << turn
        for rank in range(ranks):
            blocks = range(rank, rank + min(step, ranks - step))
            spans = join(chunk(block % ranks) for block in blocks)
            part.append(Message(turn, rank, (rank - step) % ranks, spans))
    return part


def all_gather(ranks: int) -> Program:
    """⌈lg P⌉·α + (P-1)/P·nβ."""
    return program("all_gather", "bruck", ranks, ranks, gather_bruck(ranks))


def barrier(ranks: int) -> Program:
    """⌈lg P⌉ rounds of messages without bytes, after which each rank has heard of all."""
    return program("barrier", "dissemination", ranks, ranks, gather_bruck(ranks))


def all_to_all(ranks: int) -> Program:
    """⌈lg P⌉·α + n/2·lg P·β."""
    part: Part = []
    for turn in range((ranks - 1).bit_length()):
        step = 1 << turn
        for rank in range(ranks):
            # block j is at rank `source + (j without its bits from k on)`
            pairs = (
                ((rank - j % step) % ranks, (rank - j % step + j) % ranks)
                for j in range(ranks)
                if j & step
            )
            spans = join(chunk(source * ranks + target) for source, target in pairs)
            part.append(Message(turn, rank, (rank + step) % ranks, spans))
    return program("all_to_all", "bruck", ranks, ranks * ranks, part)
