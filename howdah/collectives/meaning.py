"""What each collective must do: which chunks a rank begins with, and what it must end with.

    operation        a rank begins with        and ends with
    broadcast        at the root: all          all chunks of the root
    reduce           all                       at the root: the sum over all ranks
    all_reduce       all                       the sum over all ranks
    scatter          at the root: all          its block, from the root
    gather           its block                 at the root: all blocks
    all_gather       its block                 all blocks
    reduce_scatter   all                       its block of the sum
    all_to_all       its row of blocks         its column of blocks
    barrier          its block, of no bytes    all blocks: it has heard of every rank

Block r is the r-th of as many equal ranges of chunks as there are ranks. In an all-to-all there is
a block for each pair: number s·P + d is what rank s has for rank d. A sum is a set of ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

from howdah.collectives.program import Program

Rule = Callable[[int, int, Program], int]  # (rank, block, program) -> ranks, one bit for each


class Meaning(NamedTuple):
    """How a collective is judged.

    blocks  the power of the number of ranks that is the number of blocks: 0, 1 or 2
    begins  whether a rank has a block at first
    ends    the ranks whose sum it must hold at the end; 0: anything
    """

    blocks: int
    begins: Rule
    ends: Rule


def _everyone(rank: int, block: int, program: Program) -> int:
    return (1 << program.ranks) - 1


OPERATIONS = {
    "broadcast": Meaning(0, lambda r, b, p: r == p.root, lambda r, b, p: 1 << p.root),
    "reduce": Meaning(0, _everyone, lambda r, b, p: (r == p.root) * _everyone(r, b, p)),
    "all_reduce": Meaning(0, _everyone, _everyone),
    "scatter": Meaning(1, lambda r, b, p: r == p.root, lambda r, b, p: (b == r) << p.root),
    "gather": Meaning(1, lambda r, b, p: b == r, lambda r, b, p: (r == p.root) << b),
    "all_gather": Meaning(1, lambda r, b, p: b == r, lambda r, b, p: 1 << b),
    "reduce_scatter": Meaning(1, _everyone, lambda r, b, p: (b == r) * _everyone(r, b, p)),
    "all_to_all": Meaning(
        2,
        lambda r, b, p: b // p.ranks == r,
        lambda r, b, p: (b % p.ranks == r) << b // p.ranks,
    ),
    "barrier": Meaning(1, lambda r, b, p: b == r, lambda r, b, p: 1 << b),
}


def block_of(program: Program, chunk: int) -> int:
    """The block to which a chunk belongs."""
    blocks: int = program.ranks ** OPERATIONS[program.op].blocks
    return chunk * blocks // program.chunks


def begins(program: Program, rank: int) -> list[int]:
    """The chunks that `rank` has at first."""
    rule = OPERATIONS[program.op].begins
    return [u for u in range(program.chunks) if rule(rank, block_of(program, u), program)]


def ends(program: Program, rank: int) -> dict[int, int]:
    """The chunks of which `rank` must hold a sum at the end, each with the ranks in it, as bits."""
    rule = OPERATIONS[program.op].ends
    wanted = ((u, rule(rank, block_of(program, u), program)) for u in range(program.chunks))
    return {chunk: ranks for chunk, ranks in wanted if ranks}
