"""Direct algorithms: every rank exchanges with all others at once.

One-shot: everyone gets every vector, and adds them in the order of ranks: one round, (P-1)·n
bytes. Two-shot: share r of all vectors goes to rank r, which adds them in the order of ranks, and
gives the sum back: two rounds, 2(P-1)/P·n bytes. Both are what one does in shared memory; on a
network they need one without a bottleneck. (Elsewhere the two-shot form is called butterfly.)

    all_reduce/one_shot: 4 ranks, 1 chunk, 1 round, each rank sends 3 vectors
            1
    rank 0  0>1,2,3 =0o<x +0o +0o +0o
    rank 1  0>0,2,3 =0o +0o<x +0o +0o
    rank 2  0>0,1,3 =0o +0o +0o<x +0o
    rank 3  0>0,1,2 =0o +0o +0o +0o<x
    0>1: chunk to rank 1, +: added to what is there, =: kept, <: from its own buffer, o: buffer out

    all_reduce/two_shot: 4 ranks, 4 chunks, 2 rounds, each rank sends 3/2 vectors
            1                              2
    rank 0  1>1 2>2 3>3 =0o<x +0o +0o +0o  0o>1,2,3 =1o =2o =3o
    rank 1  0>0 2>2 3>3 =1o +1o<x +1o +1o  1o>0,2,3 =0o =2o =3o
    rank 2  0>0 1>1 3>3 =2o +2o +2o<x +2o  2o>0,1,3 =0o =1o =3o
    rank 3  0>0 1>1 2>2 =3o +3o +3o +3o<x  3o>0,1,2 =0o =1o =2o
    1>1: chunk to rank 1, +: added to what is there, =: kept, <: from its own buffer, o: buffer out
"""

from howdah.collectives.program import OUT, Message, Program, chunk, program, then


def one_shot(ranks: int) -> Program:
    """α + (P-1)·nβ, and (P-1)·n additions on every rank."""
    part = [
        Message(0, source, target, chunk(0), add=source > 0, writes=OUT)
        for source in range(ranks)
        for target in range(ranks)
    ]
    return program("all_reduce", "one_shot", ranks, 1, part, output=OUT)


def two_shot(ranks: int) -> Program:
    """2α + 2(P-1)/P·nβ."""
    reduce = [
        Message(0, source, owner, chunk(owner), add=source > 0, writes=OUT)
        for source in range(ranks)
        for owner in range(ranks)
    ]
    gather = [
        Message(0, owner, target, chunk(owner), reads=OUT, writes=OUT)
        for owner in range(ranks)
        for target in range(ranks)
        if owner != target
    ]
    return program("all_reduce", "two_shot", ranks, ranks, then(reduce, gather), output=OUT)
