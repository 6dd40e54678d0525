"""Tori of any number of dims: each dim is a ring of neighbours.

Reduce-scatter along the rows, on less along the columns, and so on; then all-gathers back:
2·Σ(X-1) rounds in place of 2(P-1), and the bytes of a ring. While one dim works, the wires of the
others are idle. So the vector can be cut into as many parts ("colours") as there are dims, and each
begins with another dim: with equal dims all wires of a device work all the time.
A torus of twos is the hypercube, and its all-reduce is halving-doubling.

    all_reduce/torus: 6 ranks, 6 chunks, 6 rounds, each rank sends 5/3 vectors
            1           2       3       4       5       6
    rank 0  3-5>1 +0-2  2>2 +1  1>2 +0  0>4 =1  1>4 =2  0-2>1 =3-5
    rank 1  0-2>0 +3-5  5>3 +4  4>3 +3  3>5 =4  4>5 =5  3-5>0 =0-2
    rank 2  3-5>3 +0-2  0>4 +2  2>4 +1  1>0 =2  2>0 =0  0-2>3 =3-5
    rank 3  0-2>2 +3-5  3>5 +5  5>5 +4  4>1 =5  5>1 =3  3-5>2 =0-2
    rank 4  3-5>5 +0-2  1>0 +0  0>0 +2  2>2 =0  0>2 =1  0-2>5 =3-5
    rank 5  0-2>4 +3-5  4>1 +3  3>1 +5  5>3 =3  3>3 =4  3-5>4 =0-2
    3-5>1: chunks to rank 1, +: added to what is there, =: kept

    all_reduce/torus_in_colours: 4 ranks, 8 chunks, 4 rounds, each rank sends 3/2 vectors
            1                      2              3              4
    rank 0  2-3>1 6-7>2 +0-1 +4-5  1>2 5>1 +0 +4  0>2 4>1 =1 =5  0-1>1 4-5>2 =2-3 =6-7
    rank 1  0-1>0 6-7>3 +2-3 +4-5  3>3 4>0 +2 +5  2>3 5>0 =3 =4  2-3>0 4-5>3 =0-1 =6-7
    rank 2  2-3>3 4-5>0 +0-1 +6-7  0>0 7>3 +1 +6  1>0 6>3 =0 =7  0-1>3 6-7>0 =2-3 =4-5
    rank 3  0-1>2 4-5>1 +2-3 +6-7  2>1 6>2 +3 +7  3>1 7>2 =2 =6  2-3>2 6-7>1 =0-1 =4-5
    2-3>1: chunks to rank 1, +: added to what is there, =: kept

    all_reduce/hypercube: 4 ranks, 4 chunks, 4 rounds, each rank sends 3/2 vectors
            1           2       3       4
    rank 0  2-3>1 +0-1  1>2 +0  0>2 =1  0-1>1 =2-3
    rank 1  0-1>0 +2-3  3>3 +2  2>3 =3  2-3>0 =0-1
    rank 2  2-3>3 +0-1  0>0 +1  1>0 =0  0-1>3 =2-3
    rank 3  0-1>2 +2-3  2>1 +3  3>1 =2  2-3>2 =0-1
    2-3>1: chunks to rank 1, +: added to what is there, =: kept
"""

from howdah.collectives.dims import gather_along, in_order, reduce_along
from howdah.collectives.limits import grid_dims, require_power_of_two
from howdah.collectives.program import Part, Program, program, then
from howdah.collectives.ring import reduce_ring


def all_reduce(ranks: int, *, dims: tuple[int, ...] | None = None) -> Program:
    """Of two dims where nothing else is said: rows, then columns, then rows."""
    sizes = grid_dims(ranks, dims, 2, who="all_reduce/torus")
    return program("all_reduce", "torus", ranks, ranks, _colour(sizes, 0, 0))


def in_colours(ranks: int, *, dims: tuple[int, ...] | None = None) -> Program:
    """Of three dims where nothing else is said, in a colour for each dim."""
    sizes = grid_dims(ranks, dims, 3, who="all_reduce/torus_in_colours")
    count = len(sizes)
    part = [m for c in range(count) for m in _colour(sizes, c, c * ranks)]
    return program("all_reduce", "torus_in_colours", ranks, count * ranks, part)


def hypercube(ranks: int) -> Program:
    """Every dim has two ranks."""
    instead = "all_reduce/halving_doubling, which takes any number"
    require_power_of_two(ranks, who="all_reduce/hypercube", instead=instead)
    part = _colour((2,) * (ranks.bit_length() - 1), 0, 0)
    return program("all_reduce", "hypercube", ranks, ranks, part)


def _colour(dims: tuple[int, ...], colour: int, first: int) -> Part:
    """An all-reduce of the chunks from `first` on, whose order of dims is rotated by `colour`."""
    count = len(dims)
    order = [(count - 1 - i - colour) % count for i in range(count)]
    down = reduce_along(dims, order, in_order(dims, order, first), reduce_ring)
    return then(*down, *gather_along(down))
