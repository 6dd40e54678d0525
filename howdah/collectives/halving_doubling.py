"""Recursive halving-doubling: a reduce-scatter by halving, then an all-gather by doubling.

Every round swaps half of what the round before did, so the bytes are those of a ring and the rounds
those of a tree: 2·lg P·α + 2(P-1)/P·nβ. In which order the partners are taken matters to the wires:

    rabenseifner      the farthest partner first: the large messages cross the whole machine
    halving_doubling  the nearest first (distance doubling): with ranks in the order of nodes, the
                      large messages stay inside

    reduce/rabenseifner: 4 ranks, 4 chunks, 4 rounds, a rank sends 3/4 to 5/4 vectors
            1           2       3    4
    rank 0  2-3>2 +0-1  1>1 +0  =1   =2-3
    rank 1  2-3>3 +0-1  0>0 +1  1>0
    rank 2  0-1>0 +2-3  3>3 +2  =3   2-3>0
    rank 3  0-1>1 +2-3  2>2 +3  3>2
    2-3>2: chunks to rank 2, +: added to what is there, =: kept

    all_reduce/halving_doubling: 4 ranks, 4 chunks, 4 rounds, each rank sends 3/2 vectors
            1           2       3       4
    rank 0  2-3>1 +0-1  1>2 +0  0>2 =1  0-1>1 =2-3
    rank 1  0-1>0 +2-3  3>3 +2  2>3 =3  2-3>0 =0-1
    rank 2  2-3>3 +0-1  0>0 +1  1>0 =0  0-1>3 =2-3
    rank 3  0-1>2 +2-3  2>1 +3  3>1 =2  2-3>2 =0-1
    2-3>1: chunks to rank 1, +: added to what is there, =: kept

    all_reduce/rabenseifner: 4 ranks, 4 chunks, 4 rounds, each rank sends 3/2 vectors
            1           2       3       4
    rank 0  2-3>2 +0-1  1>1 +0  0>1 =1  0-1>2 =2-3
    rank 1  2-3>3 +0-1  0>0 +1  1>0 =0  0-1>3 =2-3
    rank 2  0-1>0 +2-3  3>3 +2  2>3 =3  2-3>0 =0-1
    rank 3  0-1>1 +2-3  2>2 +3  3>2 =2  2-3>1 =0-1
    2-3>2: chunks to rank 2, +: added to what is there, =: kept
"""

from howdah.collectives.binomial import tree
from howdah.collectives.dims import gather_along, in_order, reduce_along
from howdah.collectives.limits import require_root
from howdah.collectives.program import Message, Part, Program, mirror, program, span, then
from howdah.collectives.recursive_doubling import folds
from howdah.collectives.ring import reduce_ring


def halvings(core: int, *, near_first: bool) -> list[Part]:
    """The rounds of the reduce-scatter among the ranks below `core`, a power of two."""
    dims = (2,) * (core.bit_length() - 1)
    order = range(len(dims))[::-1] if near_first else range(len(dims))
    return reduce_along(dims, order, in_order(dims, order), reduce_ring)


def _all_reduce(ranks: int, name: str, *, near_first: bool) -> Program:
    core = 1 << ranks.bit_length() - 1
    fold_in, fold_out = folds(ranks, span(0, core))
    down = halvings(core, near_first=near_first)
    part = then(fold_in, *down, *gather_along(down), fold_out)
    return program("all_reduce", name, ranks, core, part)


def all_reduce(ranks: int) -> Program:
    """The nearest partner first; ranks beyond a power of two fold in before and out after."""
    return _all_reduce(ranks, "halving_doubling", near_first=True)


def rabenseifner(ranks: int) -> Program:
    """The farthest partner first, so that rank r owns the r-th share in between."""
    return _all_reduce(ranks, "rabenseifner", near_first=False)


def reduce(ranks: int, *, root: int = 0) -> Program:
    """Rabenseifner's reduce: the same halving, then a binomial gather: 2(P-1)/P·nβ at the root."""
    require_root(ranks, root)
    core = 1 << ranks.bit_length() - 1
    shares = in_order((core,), (0,))
    gather = mirror(tree(core, 0, shares), add=False)
    part = then(folds(ranks, span(0, core))[0], *halvings(core, near_first=False), gather)
    turned = [_turn(message, ranks, root) for message in part]
    return program("reduce", "rabenseifner", ranks, core, turned, root=root)


def _turn(message: Message, ranks: int, root: int) -> Message:
    """The same message, where number 0 is the root."""
    source, target = ((end + root) % ranks for end in (message.source, message.target))
    return message._replace(source=source, target=target)
