"""Recursive doubling: in round k, swap all that you have with rank r xor 2^k.

The all-gather doubles what every rank has, in lg P rounds; backwards it is recursive halving. As an
all-reduce ("butterfly") every rank swaps and adds the whole vector in each round: the fewest rounds
of all, and lg P vectors sent. Both partners add the same two numbers, so all ranks have equal bits.

    all_gather/recursive_doubling: 4 ranks, 4 chunks, 2 rounds, each rank sends 3/4 of the vector
            1       2
    rank 0  0>1 =1  0-1>2 =2-3
    rank 1  1>0 =0  0-1>3 =2-3
    rank 2  2>3 =3  2-3>0 =0-1
    rank 3  3>2 =2  2-3>1 =0-1
    0>1: chunk to rank 1, =: kept

    reduce_scatter/recursive_halving: 4 ranks, 4 chunks, 2 rounds, each rank sends 3/4 of the vector
            1           2
    rank 0  2-3>2 +0-1  1>1 +0
    rank 1  2-3>3 +0-1  0>0 +1
    rank 2  0-1>0 +2-3  3>3 +2
    rank 3  0-1>1 +2-3  2>2 +3
    2-3>2: chunks to rank 2, +: added to what is there

    all_reduce/recursive_doubling: 6 ranks, 1 chunk, 4 rounds, a rank sends 1 to 3 vectors
            1             2             3             4
    rank 0  +0            0>1 =0w +0<w  0>2 =0w +0<w  0>4
    rank 1  +0            0>0 =0w +0<w  0>3 =0w +0<w  0>5
    rank 2  0>3 =0w +0<w                0>0 =0w +0<w
    rank 3  0>2 =0w +0<w                0>1 =0w +0<w
    rank 4  0>0                                       =0
    rank 5  0>1                                       =0
    0>1: chunk to rank 1, +: added to what is there, =: kept, <: from its own buffer, w: buffer work
"""

from howdah.collectives.dims import gather_along, reduce_along
from howdah.collectives.limits import require_power_of_two
from howdah.collectives.program import WORK, Message, Part, Program, Spans, chunk, program, then
from howdah.collectives.ring import reduce_ring


def all_gather(ranks: int) -> Program:
    """lg P·α + (P-1)/P·nβ, for a power of two."""
    who, instead = "all_gather/recursive_doubling", "all_gather/bruck, which takes any number"
    require_power_of_two(ranks, who=who, instead=instead)
    part = then(*gather_along(_halvings(ranks)))
    return program("all_gather", "recursive_doubling", ranks, ranks, part)


def reduce_scatter(ranks: int) -> Program:
    """lg P·α + (P-1)/P·n(β + γ), for a power of two: the farthest partner first."""
    who, instead = "reduce_scatter/recursive_halving", "reduce_scatter/ring, which takes any number"
    require_power_of_two(ranks, who=who, instead=instead)
    return program("reduce_scatter", "recursive_halving", ranks, ranks, then(*_halvings(ranks)))


def _halvings(ranks: int) -> list[Part]:
    dims = (2,) * (ranks.bit_length() - 1)
    return reduce_along(dims, range(len(dims)), [chunk(r) for r in range(ranks)], reduce_ring)


def all_reduce(ranks: int) -> Program:
    """lg P·(α + nβ + nγ); ranks beyond a power of two fold in before and out after."""
    core = 1 << ranks.bit_length() - 1
    fold_in, fold_out = folds(ranks, chunk(0))
    part = fold_in
    for k in range(core.bit_length() - 1):
        swap = [Message(0, r, r ^ 1 << k, chunk(0), writes=WORK) for r in range(core)]
        sums = [Message(1, r, r, chunk(0), add=True, reads=WORK) for r in range(core)]
        part = then(part, swap, sums)
    return program("all_reduce", "recursive_doubling", ranks, 1, then(part, fold_out))


def folds(ranks: int, whole: Spans) -> tuple[Part, Part]:
    """Ranks beyond the largest power of two give their vector to a rank below, and get the sum.

    Two rounds more, and for these ranks the whole vector in each.
    """
    core = 1 << ranks.bit_length() - 1
    into = [Message(0, rank, rank - core, whole, add=True) for rank in range(core, ranks)]
    return into, [Message(0, rank - core, rank, whole) for rank in range(core, ranks)]
