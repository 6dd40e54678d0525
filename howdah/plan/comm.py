"""The table [comm] of a recipe: by which algorithms collectives travel.

    comm.algorithm = "ring"                       every operation that has an algorithm so called

    [comm.algorithm]                              or each by itself, and by the size of its vector
    all_reduce = "recursive_doubling to 64 KiB, ring"
    reduce_scatter = "pairwise"

It is neither layout nor method: it changes the bytes and the order of additions, and so the
rounding alone. The texts are read by `collectives/choice.py`.
"""

from dataclasses import dataclass, field, fields


@dataclass(frozen=True)
class Algorithms:
    """The algorithm of each operation; empty: the transport's own, in which every rank sends to
    every other one directly.

    all_reduce      of `howdah draw collective`: NAME [OPTION=VALUE ...] [to SIZE], one after
                    another with commas; `default` is the transport's own
    reduce_scatter  the same; sizes are those of the whole vector
    all_gather      the same
    broadcast       the same
    reduce          the same
    gather          the same
    scatter         the same
    all_to_all      the same, without sizes; in training one that forwards nothing: pairwise
    barrier         the same, without sizes
    """

    all_reduce: str = ""
    reduce_scatter: str = ""
    all_gather: str = ""
    broadcast: str = ""
    reduce: str = ""
    gather: str = ""
    scatter: str = ""
    all_to_all: str = ""
    barrier: str = ""

    def __bool__(self) -> bool:
        return any(self.by_operation.values())

    @property
    def by_operation(self) -> dict[str, str]:
        """The texts of the operations that have one."""
        texts = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: text for name, text in texts if text}

    def __str__(self) -> str:
        return "; ".join(f"{name} {text}" for name, text in self.by_operation.items())


DIRECT = Algorithms()  # none is chosen


@dataclass(frozen=True)
class Comm:
    """How messages travel, beside the layout.

    sparse  whether the gradient of an embedding is summed over replicas by its rows that are not 0
    """

    algorithm: Algorithms = field(default_factory=Algorithms)
    sparse: bool = False
