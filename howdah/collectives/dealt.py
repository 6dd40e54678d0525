"""Ranks that do not fill their nodes one after the other: the same programs, by other numbers.

    node of each rank   0 1 0 1     dealt over the nodes in turn, as some launchers do
    order               0 2 1 3     ranks, node after node
    program for blocks  rank 1 of it is run by rank 2: what is "inside" stays inside

Blocks of the vector belong to ranks, and go along: block 1 of the program is block 2 of the vector.
A vector without blocks stays as it is.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from howdah.collectives.meaning import OPERATIONS
from howdah.collectives.program import Program, Spans, chunk, chunks_of, join


def dealt(program: Program, order: Sequence[int]) -> Program:
    """The program in which rank order[i] does what rank i did."""
    number = dict(enumerate(order))
    power = OPERATIONS[program.op].blocks
    places = [*product(range(program.ranks), repeat=power)]  # of blocks: by rank, or by pair
    at = {place: block for block, place in enumerate(places)}
    each = program.chunks // len(places)
    to = [at[tuple(number[rank] for rank in place)] for place in places]
    moved = [block * each + k for block in to for k in range(each)]

    def spans(old: Spans) -> Spans:
        return join(chunk(moved[one]) for one in chunks_of(old))

    steps = {
        number[rank]: tuple(
            step._replace(peer=number[step.peer], spans=spans(step.spans)) for step in mine
        )
        for rank, mine in enumerate(program.steps)
    }
    ordered = tuple(steps[rank] for rank in range(program.ranks))
    return replace(program, steps=ordered, root=number[program.root])
