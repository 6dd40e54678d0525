"""All algorithms by name: one line for each. Proof, price and picture need nothing more.

`build("ring", 4)` and `build("all_reduce/ring", 4)` are the same program.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

from howdah.base.errors import UserError, nearest, shown
from howdah.collectives import (
    binomial,
    bruck,
    chain,
    direct,
    halving_doubling,
    hierarchical,
    mesh,
    neighbour_exchange,
    one_to_all,
    pairwise,
    recursive_doubling,
    ring,
    scatter_all_gather,
    torus,
    trees,
)
from howdah.collectives.program import Program

MOST = 512  # ranks of a program; an all-to-all of these has a quarter of a million chunks


class Algorithm(NamedTuple):
    """A generator, and how it is drawn.

    make   (ranks, **options) -> Program; raises UserError for ranks that it cannot use
    ranks  of its picture
    dims   of its picture, where it has any
    """

    make: Callable[..., Program]
    ranks: int = 4
    dims: tuple[int, ...] | None = None

    def drawn(self) -> Program:
        """The program of its picture."""
        return self.make(self.ranks, **({"dims": self.dims} if self.dims else {}))

    @property
    def options(self) -> list[str]:
        """Names of the options that it takes."""
        return [name for name in signature(self.make).parameters if name != "ranks"]


ALGORITHMS = {
    "broadcast/one_to_all": Algorithm(one_to_all.broadcast, 3),
    "broadcast/binomial": Algorithm(binomial.broadcast, 8),
    "broadcast/ring": Algorithm(chain.broadcast),
    "broadcast/ring_in_pieces": Algorithm(chain.broadcast_in_pieces),
    "broadcast/scatter_all_gather": Algorithm(scatter_all_gather.broadcast),
    "broadcast/hierarchical": Algorithm(hierarchical.broadcast),
    "reduce/all_to_one": Algorithm(one_to_all.reduce, 3),
    "reduce/binomial": Algorithm(binomial.reduce),
    "reduce/ring_in_pieces": Algorithm(chain.reduce),
    "reduce/rabenseifner": Algorithm(halving_doubling.reduce),
    "scatter/one_to_all": Algorithm(one_to_all.scatter, 3),
    "scatter/binomial": Algorithm(binomial.scatter),
    "gather/all_to_one": Algorithm(one_to_all.gather, 3),
    "gather/binomial": Algorithm(binomial.gather),
    "all_gather/ring": Algorithm(ring.all_gather),
    "all_gather/segmented_ring": Algorithm(ring.segmented_all_gather, 3),
    "all_gather/recursive_doubling": Algorithm(recursive_doubling.all_gather),
    "all_gather/bruck": Algorithm(bruck.all_gather, 5),
    "all_gather/neighbour_exchange": Algorithm(neighbour_exchange.all_gather, 6),
    "all_gather/hierarchical": Algorithm(hierarchical.all_gather),
    "reduce_scatter/ring": Algorithm(ring.reduce_scatter),
    "reduce_scatter/segmented_ring": Algorithm(ring.segmented_reduce_scatter, 3),
    "reduce_scatter/recursive_halving": Algorithm(recursive_doubling.reduce_scatter),
    "reduce_scatter/pairwise": Algorithm(pairwise.reduce_scatter),
    "reduce_scatter/hierarchical": Algorithm(hierarchical.reduce_scatter),
    "all_reduce/naive": Algorithm(one_to_all.all_reduce, 3),
    "all_reduce/naive_halving_doubling": Algorithm(binomial.all_reduce),
    "all_reduce/ring": Algorithm(ring.all_reduce),
    "all_reduce/segmented_ring": Algorithm(ring.segmented_all_reduce, 3),
    "all_reduce/recursive_doubling": Algorithm(recursive_doubling.all_reduce, 6),
    "all_reduce/halving_doubling": Algorithm(halving_doubling.all_reduce),
    "all_reduce/rabenseifner": Algorithm(halving_doubling.rabenseifner),
    "all_reduce/one_shot": Algorithm(direct.one_shot),
    "all_reduce/two_shot": Algorithm(direct.two_shot),
    "all_reduce/tree": Algorithm(trees.all_reduce, 7),
    "all_reduce/double_tree": Algorithm(trees.double_all_reduce, 7),
    "all_reduce/leader": Algorithm(hierarchical.leader),
    "all_reduce/hierarchical": Algorithm(hierarchical.all_reduce),
    "all_reduce/torus": Algorithm(torus.all_reduce, 6),
    "all_reduce/torus_in_colours": Algorithm(torus.in_colours, 4, (2, 2)),
    "all_reduce/hypercube": Algorithm(torus.hypercube),
    "all_reduce/mesh": Algorithm(mesh.all_reduce, 6),
    "all_reduce/mesh_rows_then_columns": Algorithm(mesh.rows_then_columns, 6),
    "all_to_all/pairwise": Algorithm(pairwise.all_to_all),
    "all_to_all/bruck": Algorithm(bruck.all_to_all, 5),
    "all_to_all/hierarchical": Algorithm(hierarchical.all_to_all),
    "barrier/dissemination": Algorithm(bruck.barrier, 5),
}
ALSO_CALLED = {"butterfly": "all_reduce/recursive_doubling"}


def find(name: str) -> str:
    """The full name of an algorithm, such as all_reduce/ring for ring. Raises UserError.

    A name without its operation is that of an all-reduce, if there is one.
    """
    name = ALSO_CALLED.get(name, name)
    if name in ALGORITHMS:
        return name
    full = [one for one in ALGORITHMS if one.split("/")[1] == name]
    if f"all_reduce/{name}" in full:
        return f"all_reduce/{name}"
    if len(full) > 1:
        raise UserError(f"several operations have an algorithm {name}: say {' or '.join(full)}")
    if not full:
        short = [one.split("/")[1] for one in ALGORITHMS]
        known = {*(ALGORITHMS if "/" in name else short), *ALSO_CALLED}
        raise UserError(f"no collective is called {shown(name)}{nearest(name, known)}")
    return full[0]


def build(name: str, ranks: int, **options: Any) -> Program:
    """The program of an algorithm on `ranks` ranks.

    options  those that the algorithm takes, of root, pieces, per_node, dims, near_first

    Raises UserError for unknown names and options, and for numbers of ranks that it cannot use.
    """
    full = find(name)
    algorithm = ALGORITHMS[full]
    for option in options:
        if option not in algorithm.options:
            takes = ", ".join(algorithm.options) or "none"
            raise UserError(f"{full} has no option {option}; it takes {takes}")
    if not 1 <= ranks <= MOST:
        raise UserError(f"{full} on {ranks} ranks; a program has 1 to {MOST:,} ranks")
    return algorithm.make(ranks, **options)
