"""What begins or ends at a root: four operations from one list of messages.

A tree of messages that hands out blocks is a scatter; with the whole vector in place of each block
it is a broadcast. Backwards they are a gather, and a reduce.
"""

from collections.abc import Callable, Sequence

from howdah.collectives.limits import require_root
from howdah.collectives.program import Part, Program, Spans, chunk, mirror, program

Tree = Callable[[int, int, Sequence[Spans]], Part]  # (ranks, root, what is for each rank)


def rooted(op: str, name: str, tree: Tree, ranks: int, root: int) -> Program:
    """The broadcast, reduce, scatter or gather along a tree. Raises UserError for a wrong root."""
    require_root(ranks, root)
    has_blocks = op in ("scatter", "gather")
    part = tree(ranks, root, [chunk(rank if has_blocks else 0) for rank in range(ranks)])
    if op in ("reduce", "gather"):
        part = mirror(part, add=op == "reduce")
    return program(op, name, ranks, ranks if has_blocks else 1, part, root=root)
