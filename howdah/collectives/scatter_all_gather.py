"""The broadcast for long vectors: scatter the blocks, then gather them on all ranks.

(⌈lg P⌉ + P - 1)·α + 2(P-1)/P·nβ: twice the bound in bytes, where a tree sends the whole vector
⌈lg P⌉ times (van de Geijn). Blocks that a rank had in the scatter are not sent to it again.

    broadcast/scatter_all_gather: 4 ranks, 4 chunks, 5 rounds, a rank sends 0 to 3/2 vectors
            1      2    3       4       5
    rank 0  2-3>2  1>1  0>1     3>1     2>1
    rank 1         =1   1>2 =0  0>2 =3  =2
    rank 2  =2-3   3>3  2>3 =1  1>3 =0  0>3
    rank 3         =3   =2      =1      =0
    2-3>2: chunks to rank 2, =: kept
"""

from howdah.collectives.binomial import tree
from howdah.collectives.limits import require_root
from howdah.collectives.program import Program, chunk, chunks_of, program, then
from howdah.collectives.ring import gather_ring


def broadcast(ranks: int, *, root: int = 0) -> Program:
    """A binomial scatter, and an all-gather by a ring."""
    require_root(ranks, root)
    shares = [chunk(rank) for rank in range(ranks)]
    scatter = tree(ranks, root, shares)
    held = {(root, rank) for rank in range(ranks)}
    held |= {(message.target, rank) for message in scatter for rank in chunks_of(message.spans)}
    ring = gather_ring(range(ranks), shares)
    rest = [message for message in ring if (message.target, message.spans[0][0]) not in held]
    return program("broadcast", "scatter_all_gather", ranks, ranks, then(scatter, rest), root=root)
