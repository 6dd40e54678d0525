"""What is measured, and what howdah means to reach: plain data.

A case is one operation of one size on 2 or 4 ranks, with all contestants in it. Sizes are bytes
of the whole vector, of which every rank gives or gets a share in reduce-scatter, all-gather and
all-to-all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from howdah.bench.plot import binary

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Contestant:
    """A way to do a case's operation.

    carrier  group (what connect() returns), engine (the transport below it), gloo, or bound
    arena    whether its tensors lie in the engine's memory
    peer     the contestant that it is held against
    """

    name: str
    carrier: str
    dtype: str = "float32"
    arena: bool = False
    peer: str = "gloo"


CONTESTANTS = (
    Contestant("Group", "group"),
    Contestant("engine", "engine"),
    Contestant("engine, arena", "engine", arena=True),
    Contestant("gloo", "gloo"),
    Contestant("bound", "bound"),
)
BF16 = (
    Contestant("Group, bf16", "group", "bfloat16", peer="gloo, bf16"),
    Contestant("engine, bf16", "engine", "bfloat16", peer="gloo, bf16"),
    Contestant("gloo, bf16", "gloo", "bfloat16", peer="gloo, bf16"),
)


@dataclass(frozen=True)
class Case:
    """blocks: the most that count, of each contestant; block: the seconds that one should take;
    algorithm: the chosen one, if any.
    """

    op: str
    bytes: int
    ranks: int
    contestants: tuple[Contestant, ...] = CONTESTANTS
    blocks: int = 9
    block: float = 0.12
    algorithm: str = ""

    @property
    def name(self) -> str:
        return f"{self.op}, {binary(self.bytes)}, {self.ranks} ranks"


def with_algorithm(case: Case, text: str) -> Case:
    """The case with a chosen algorithm beside howdah's own way and gloo's, over both transports."""
    chosen = (
        Contestant("Group", "group"),
        Contestant(f"Group, {text}", "group chosen"),
        Contestant("messages", "messages"),
        Contestant(f"messages, {text}", "messages chosen"),
        Contestant("gloo", "gloo"),
        Contestant("bound", "bound"),
    )
    return replace(case, contestants=chosen, algorithm=text)


OTHERS = ("reduce_scatter", "all_gather", "broadcast", "all_to_all")


def cases(*, tiny: bool) -> Iterator[Case]:
    for ranks in (2, 4):
        if tiny:
            yield Case("all_reduce", 8, ranks, blocks=1, block=0.01)
            yield Case("all_reduce", 4 * KIB, ranks, (*CONTESTANTS, *BF16), blocks=1, block=0.01)
            for op in OTHERS:
                yield Case(op, 4 * KIB, ranks, blocks=1, block=0.01)
            continue
        for size in (8, 64 * KIB, MIB, 16 * MIB, 64 * MIB):
            also = BF16 if size == 16 * MIB else ()
            yield Case("all_reduce", size, ranks, (*CONTESTANTS, *also))
        for op in OTHERS:
            yield Case(op, 16 * MIB, ranks)


# -- goals --------------------------------------------------------------------------


@dataclass(frozen=True)
class Goal:
    """`contestant` must be `factor` times as fast as `peer`, best block against best block."""

    op: str
    bytes: int
    ranks: int
    contestant: str
    peer: str
    factor: float

    @property
    def case(self) -> str:
        return Case(self.op, self.bytes, self.ranks).name


TWO_RANKS = {
    ("all_reduce", 8): 50.0,
    ("all_reduce", 64 * KIB): 20.0,
    ("all_reduce", MIB): 8.0,
    ("all_reduce", 16 * MIB): 5.0,
    ("all_reduce", 64 * MIB): 5.0,
    ("reduce_scatter", 16 * MIB): 10.0,
    ("all_gather", 16 * MIB): 4.0,
    ("broadcast", 16 * MIB): 3.0,
    ("all_to_all", 16 * MIB): 3.0,
}
FOUR_RANKS, BF16_PER_BYTE = 4.0, 1.0


def goals() -> list[Goal]:
    """In the order in which they are told. Judged is what a program gets from `connect()`."""
    two = [Goal(*key, 2, "Group", "gloo", factor) for key, factor in TWO_RANKS.items()]
    four = [Goal(*key, 4, "Group", "gloo", FOUR_RANKS) for key in TWO_RANKS]
    half = [
        Goal("all_reduce", 16 * MIB, ranks, "Group, bf16", "Group", BF16_PER_BYTE)
        for ranks in (2, 4)
    ]
    return [*two, *four, *half]
