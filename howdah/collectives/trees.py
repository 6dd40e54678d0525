"""Trees: sums go up to a root and come down again, in pieces that follow each other.

    a tree of 7 ranks:     3          the other tree:     4
                        1     5                        2     6
                       0 2   4 6                      1 3   5 0

A binary tree has about 2·lg P rounds for a piece, where a ring has 2(P-1). But an inner rank of a
single tree receives two vectors and its leaves none. Of two trees of which every rank is inner in
at most one, each carries half of the vector, and all wires are busy: no rank sends more than 2n
bytes (Sanders, Speck and Träff, 2009; NCCL).

    all_reduce/tree: 7 ranks, 2 chunks, 10 rounds, a rank sends 1 to 3 vectors
            1    2    3       4       5       6       7       8       9    10
    rank 0  0>1       1>1                     =0              =1
    rank 1  +0   +0   0>3 +1  +1      1>3 =0  0>0     0>2 =1  1>0     1>2
    rank 2       0>1          1>1                     =0              =1
    rank 3            +0      +0      0>1 +1  0>5 +1  1>1     1>5
    rank 4  0>5       1>5                             =0              =1
    rank 5  +0   +0   +1      0>3 +1          1>3 =0  0>4     0>6 =1  1>4  1>6
    rank 6       0>5          1>5                             =0           =1
    0>1: chunk to rank 1, +: added to what is there, =: kept

    all_reduce/double_tree: 7 ranks, 4 chunks, 11 rounds, a rank sends 1 to 2 vectors
            1       2       3       4       5       6       7       8       9       10      11
    rank 0  0>1     2>6     1>1     3>6             =0      =2      =1      =3
    rank 1  2>2 +0  +0      0>3 +1  3>2 +1  1>3 =0  0>0 =2  0>2 =1  1>0     1>2 =3
    rank 2  +2      0>1 +2  2>4 +3  1>1 +3  3>4 =2  2>1     2>3 =0  =3      3>1 =1  3>3
    rank 3          2>2     3>2 +0  +0      0>1 +1  0>5 +1  1>1 =2          1>5     =3
    rank 4  0>5             1>5 +2  +2      2>2 +3  2>6 +3  3>6 =0  3>2             =1
    rank 5  2>6 +0  +0      3>6 +1  0>3     +1      1>3 =0  0>4     0>6 =2  =1      1>4 =3  1>6
    rank 6  +2      0>5 +2  +3      2>4 +3  1>5     3>4 =2  2>0 =3  2>5 =0  3>0     3>5     =1
    0>1: chunk to rank 1, +: added to what is there, =: kept
"""

from collections.abc import Sequence

from howdah.collectives.limits import require_pieces
from howdah.collectives.program import Message, Part, Program, chunk, program

Parents = list[int]  # of each rank; -1 is the root's


def in_order_tree(ranks: int) -> Parents:
    """A binary tree whose inner ranks are odd; its root is a power of two, less one."""
    parents = [-1] * ranks

    def build(first: int, count: int, parent: int) -> None:
        if count:
            left = (1 << count.bit_length() - 1) - 1
            root = first + left
            parents[root] = parent
            build(first, left, root)
            build(root + 1, count - left - 1, root)

    build(0, ranks, -1)
    return parents


def other_tree(ranks: int) -> Parents:
    """The same tree with even inner ranks: shifted by one (P odd), or mirrored (P even)."""
    tree, parents = in_order_tree(ranks), [-1] * ranks
    place = [(r + 1) % ranks if ranks % 2 else ranks - 1 - r for r in range(ranks)]
    for rank, parent in enumerate(tree):
        parents[place[rank]] = place[parent] if parent >= 0 else -1
    return parents


def all_reduce(ranks: int, *, pieces: int = 2) -> Program:
    """The single tree."""
    require_pieces(pieces)
    part = pipelined([in_order_tree(ranks)], pieces)
    return program("all_reduce", "tree", ranks, pieces, part)


def double_all_reduce(ranks: int, *, pieces: int = 2) -> Program:
    """Two trees, each with half of the vector in `pieces` pieces."""
    require_pieces(pieces)
    part = pipelined([in_order_tree(ranks), other_tree(ranks)], pieces)
    return program("all_reduce", "double_tree", ranks, 2 * pieces, part)


def pipelined(trees: Sequence[Parents], pieces: int) -> Part:
    """Every piece goes up and down its tree as early as one send and one receive at a time allow.

    Piece p of tree t is chunk t·pieces + p.
    """
    number_of = [(t * pieces + p, tree) for p in range(pieces) for t, tree in enumerate(trees)]
    edges = [(n, r, up) for n, tree in number_of for r, up in enumerate(tree) if up >= 0]
    missing = {(n, r): tree.count(r) for n, tree in number_of for r in range(len(tree))}
    summed = {(n, tree.index(-1)) for n, tree in number_of}  # who passes down, once none is missing
    part: Part = []
    ups, downs, turn = edges, edges, 0
    while ups or downs:
        busy: set[tuple[str, int]] = set()
        rise = [e for e in ups if not missing[e[:2]] and _take(busy, e[1], e[2])]
        fall = [
            (n, rank, up)
            for n, rank, up in downs
            if (n, up) in summed and not missing[n, up] and _take(busy, up, rank)
        ]
        part += [Message(turn, rank, up, chunk(n), add=True) for n, rank, up in rise]
        part += [Message(turn, up, rank, chunk(n)) for n, rank, up in fall]
        for n, _, up in rise:
            missing[n, up] -= 1
        summed.update((n, rank) for n, rank, _ in fall)
        gone, gone_down = set(rise), set(fall)
        ups, downs = [e for e in ups if e not in gone], [e for e in downs if e not in gone_down]
        turn += 1
    return part


def _take(busy: set[tuple[str, int]], source: int, target: int) -> bool:
    """Whether the wires out of the source and into the target are free; then they are busy."""
    wires = {("out", source), ("in", target)}
    is_free = not busy & wires
    if is_free:
        busy |= wires
    return is_free
