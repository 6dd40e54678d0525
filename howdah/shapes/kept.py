"""Tensors that are kept for the backward pass, and what says which: the kernels of a framework."""

from dataclasses import dataclass
from typing import Literal

from howdah.shapes.dims import Dim, Per
from howdah.shapes.marks import ALL, Marks

# The format of the computation; it or float32, whichever has more digits; and fixed ones.
Kind = Literal["compute", "wide", "float32", "int64", "byte"]


@dataclass(frozen=True)
class Saved:
    """A tensor that is kept: one number for each `per` and place of `dims`.

    core   made between the queries and the output of attention; selective recomputation drops it
    copy   one that is made only where a rank has several of this dim: of one, it is a view
    again  the output of attention in the layout that the projection takes: kept, and yet made
           once more by selective recomputation
    """

    name: str
    per: Per
    dims: tuple[Dim, ...] = ()
    kind: Kind = "compute"
    core: bool = False
    again: bool = False
    copy: Dim | None = None


@dataclass(frozen=True)
class Kernels:
    """What the operations of a framework keep.

    logits      the tensors of V numbers for each token in the head; none where it works in chunks
    flash       attention keeps a number for each query, instead of its probabilities
    dropout     masks of a byte behind embedding, attention, feed-forward and probabilities
    activated   the gated feed-forward keeps act(gate) beside gate and up
    small       also what is small: norms' statistics, rotary angles, token numbers
    repeats     keys and values are repeated for each query head of their group
    by_head     rotated or packed queries lie head by head, and so does attention's output
    packed      a row of tokens holds several documents, each attended to by itself
    gathered    linears keep all of an input that sp has gathered, instead of its slice; latent
                attention and experts always do
    balanced    the routers add to the loss
    context     how attention spans ranks that share the tokens of a sample; "": they do not. In a
                ring it keeps keys and values packed, as they are sent, and its output token after
                token. After an all-to-all it keeps what it has of all tokens, for fewer heads; with
                both, of the tokens of those with which it traded, packed
    marks       what is trained
    """

    logits: tuple[tuple[str, Kind], ...] = ()
    flash: bool = True
    dropout: bool = False
    activated: bool = False
    small: bool = False
    repeats: bool = False
    by_head: bool = False
    packed: bool = False
    gathered: bool = False
    balanced: bool = False
    context: Literal["", "ring", "all-to-all", "both"] = ""
    marks: Marks = ALL

    @property
    def rings(self) -> bool:
        """Whether keys and values go round."""
        return self.context in ("ring", "both")

    @property
    def core(self) -> tuple[Per, str]:
        """What attention has one of something for, and how the dims of its heads are called."""
        return ("token", "") if self.context in ("", "ring") else ("traded", "traded ")
