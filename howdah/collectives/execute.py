"""Runs a program in one process, on numpy arrays: the reference for every run on real ranks.

    all_reduce: inputs [[1, 2], [10, 20]]  ->  outputs [[11, 22], [11, 22]]

The additions happen in the order of the steps, so float results are bit for bit those of any run
that keeps to the lists. float16 is added in float32 and rounded when a turn is done with a chunk.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from howdah.base.errors import UserError
from howdah.collectives.meaning import begins, ends
from howdah.collectives.program import ADDS, Program, Step, X, split, sums
from howdah.collectives.walk import walk

Array = NDArray[Any]
Add = Callable[[Array, Array], Array]


def sizes_of(program: Program, inputs: Sequence[Array]) -> list[int]:
    """Elements of each chunk, where a rank's input is cut evenly into the chunks it begins with.

    Raises UserError if two ranks have inputs of other sizes for one chunk.
    """
    sizes: dict[int, int] = {}
    for rank, array in enumerate(inputs):
        own = begins(program, rank)
        for chunk, size in zip(own, split(len(array), len(own) or 1), strict=False):
            if sizes.setdefault(chunk, size) != size:
                raise UserError(
                    f"rank {rank} gives {len(array)} elements, others {len(inputs[0])}; all ranks "
                    f"of {program.op} give equally many"
                )
    return [sizes[chunk] for chunk in range(program.chunks)]


def run(
    program: Program,
    inputs: Sequence[Array],
    *,
    sizes: Sequence[int] | None = None,
    add: Add = np.add,
) -> list[Array]:
    """The result of each rank: the chunks with which it ends, one behind the other.

    inputs  for each rank a 1-D array: the chunks with which it begins, one behind the other
    sizes   elements of each chunk; by default `sizes_of` the inputs
    add     np.add, np.maximum, np.minimum or np.multiply

    Raises UserError for inputs of other lengths.
    """
    if len(inputs) != program.ranks:
        raise UserError(
            f"{program.name} has {program.ranks} ranks, and {len(inputs)} inputs; give one for each"
        )
    sizes = sizes_of(program, inputs) if sizes is None else sizes
    bounds = [0, *accumulate(sizes)]
    ranks = [_Rank(program, rank, array, bounds) for rank, array in enumerate(inputs)]
    flying: defaultdict[tuple[int, int], deque[list[Array]]] = defaultdict(deque)
    for rank, turn, is_begun in walk(program).events:
        steps = program.turns[rank][turn]
        for step in steps if is_begun else ():
            if step.kind == "send":
                sent = [piece.copy() for piece in ranks[rank].pieces(step, step.buffer)]
                flying[rank, step.peer].append(sent)
        for together in () if is_begun else sums(steps):
            came = [
                ranks[rank].pieces(step, step.source)
                if step.source
                else flying[step.peer, rank].popleft()
                for step in together
            ]
            ranks[rank].write(together[0], came, add)
    return [rank.result() for rank in ranks]


class _Rank:
    """The buffers of a rank; each has room for all chunks."""

    def __init__(self, program: Program, rank: int, given: Array, bounds: Sequence[int]) -> None:
        self.bounds, self.output = bounds, program.output
        self.ends = [(chunk, chunk + 1) for chunk in ends(program, rank)]
        whole = np.zeros(bounds[-1], given.dtype)
        self.buffers: defaultdict[str, Array] = defaultdict(whole.copy)
        own = self._of(X, [(chunk, chunk + 1) for chunk in begins(program, rank)])
        if (size := sum(map(len, own))) != len(given):
            raise UserError(f"rank {rank} gives {len(given)} elements, and its chunks have {size}")
        for piece, values in zip(own, np.split(given, [*accumulate(map(len, own))]), strict=False):
            piece[:] = values

    def pieces(self, step: Step, buffer: str) -> list[Array]:
        return self._of(buffer, step.spans)

    def write(self, step: Step, came: list[list[Array]], add: Add) -> None:
        """Keeps what came, or adds it: of float16 in float32, rounded once."""
        for piece, *values in zip(self.pieces(step, step.buffer), *came, strict=True):
            own = [piece] if step.kind in ADDS else []
            half = piece.dtype == np.float16
            terms = [x.astype(np.float32) if half else x for x in (*own, *values)]
            piece[:] = reduce(add, terms)

    def result(self) -> Array:
        return np.concatenate([self.buffers[self.output][:0], *self._of(self.output, self.ends)])

    def _of(self, buffer: str, spans: Sequence[tuple[int, int]]) -> list[Array]:
        return [self.buffers[buffer][self.bounds[a] : self.bounds[b]] for a, b in spans]
