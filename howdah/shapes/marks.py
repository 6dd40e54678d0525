"""Which weights are trained, and what the backward pass of a model leaves out where some are not.

    embedding  layers.0  layers.1  layers.2  head      trained: layers.1.attention.q.weight
    still ---------------  ^ the graph starts here     behind it every part has a backward pass,
                                                       but only what is trained has a gradient

A part before the lowest trained weight is *still*: it has no backward pass and keeps nothing for
one. Behind it, a matrix that is frozen keeps no input: only its own gradient would need that.

Beside a frozen matrix may be an *adapter* of low rank: y = W·x + s·B·(A·x), which trains A and B
(LoRA, https://arxiv.org/abs/2106.09685). A matrix with an adapter keeps its input, and A·x. Where
the lengths of its rows are trained too (DoRA, https://arxiv.org/abs/2402.09353), it keeps y as it
is before they are changed, and what the lengths were.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

# By what a block, head or embedding keeps, the weights for whose gradients alone it is kept.
INPUT_OF = {
    "attention input": (
        *("attention.q", "attention.k", "attention.v"),
        *("attention.q_down", "attention.kv_down"),
    ),
    "q latent": ("attention.q_up",),
    "kv latent": ("attention.kv_up",),
    "attention output": ("attention.o",),
    "cross input": ("cross.q",),
    "cross attention output": ("cross.o",),
    "feedforward input": (
        *("feedforward.gate", "feedforward.up"),
        *("router", "shared.gate", "shared.up", "shared_gate"),
    ),
    "down input": ("feedforward.down",),
    "shared down input": ("shared.down",),
    "expert input": ("experts.gate", "experts.up"),
    "expert down input": ("experts.down",),
    "transform input": ("transform",),
    "tokens": ("embedding",),
    "positions": ("positions",),
    "token types": ("token_types",),
}


@dataclass(frozen=True)
class Marks:
    """What is trained of a model.

    frozen   names of the weights that are not
    still    the parts without a backward pass
    adapted  names of the matrices with an adapter
    rank     of the adapters
    measures  whether they have lengths of rows
    """

    frozen: frozenset[str] = frozenset()
    still: frozenset[str] = frozenset()
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    measures: bool = False

    def trains(self, name: str) -> bool:
        """Whether the weight `name` is trained."""
        return name not in self.frozen

    def asks(self, part: str, matrix: str) -> bool:
        """Whether a gradient needs the input of a matrix of a part, such as "attention.q"."""
        name = f"{matrix}.weight" if matrix in BESIDE else f"{part}.{matrix}.weight"
        return name not in self.frozen or name in self.adapted

    def adapters(self, part: str) -> Iterator[str]:
        """The matrices of a part with an adapter, such as "attention.q"."""
        for name in sorted(self.adapted):
            if name.startswith(f"{part}."):
                yield name.removeprefix(f"{part}.").removesuffix(".weight")


BESIDE = ("transform", "embedding", "positions", "token_types")  # matrices outside of blocks
ALL = Marks()


def unkept(marks: Marks, part: str, matrices: Collection[str]) -> frozenset[str]:
    """What a part does not keep because no gradient needs it, by name.

    matrices  those of a block, such as "attention.q"
    """
    found = set()
    for what, users in INPUT_OF.items():
        there = [one for one in users if one in BESIDE or one in matrices]
        if not any(marks.asks(part, one) for one in there):
            found.add(what)
    return frozenset(found)
