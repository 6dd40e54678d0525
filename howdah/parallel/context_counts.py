"""What routers count of sequences that the ranks of cp share.

Balance and capacity of experts are of whole sequences (`model/moe.py`), and a rank has two chunks
of each (`plan/sharding.py`, `chunks`). So each rank tells the others how often each expert was
chosen in its two chunks, row by row. With cp2, of one row and expert:

    chunk            0       1       2       3
    rank             0       1       1       0
    chosen           4       1       3       2        in all 10
    before           0       4       5       8        the place in the expert's queue
"""

import torch
from torch import Tensor

from howdah.model.sequences import WHOLE_SEQUENCES, Sequences
from howdah.parallel.mesh import Mesh
from howdah.plan.plan import Plan
from howdah.plan.sharding import chunks


class SharedSequences(Sequences):
    """Sequences of which this rank of cp has two chunks."""

    shared = True

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        ways, index = mesh.cp.size, mesh.cp.rank
        own = chunks(plan.layout, plan.sequence, mesh.rank)
        self._group, self._waited = mesh.cp, mesh.waited
        self._length = plan.sequence
        self._lengths = tuple(stop - start for start, stop in own)
        self._mine = [index, 2 * ways - 1 - index]
        self._order = [2 * i if i < ways else 2 * (2 * ways - 1 - i) + 1 for i in range(2 * ways)]

    def length(self, here: int) -> int:
        """Tokens of a whole sequence."""
        return self._length

    def runs(self, here: int) -> tuple[int, ...]:
        """The lengths of the rank's two chunks."""
        return self._lengths

    def hear(self, runs: Tensor) -> tuple[Tensor, Tensor]:
        """The counts [2, b, E] of this rank's chunks: before each, and in whole sequences. All
        ranks of cp call together.
        """
        every = runs.new_empty(len(self._order), *runs.shape[1:])
        with self._waited:
            self._group.all_gather(every, runs.contiguous())
        chunk_by_chunk = every[self._order]
        before = chunk_by_chunk.cumsum(0, dtype=torch.int32) - chunk_by_chunk
        return before[self._mine], chunk_by_chunk.sum(0, dtype=torch.int32)


def sequences_of(plan: Plan, mesh: Mesh) -> Sequences:
    """How the tokens of this rank lie in their sequences."""
    return SharedSequences(plan, mesh) if plan.layout.cp > 1 else WHOLE_SEQUENCES
