"""Weights that zero3 gathers in 8 bits (`method.gather_dtype`), and gradients that are reduced in 4
(`method.gradient_dtype`): the form of what is sent (https://arxiv.org/abs/2306.10209).

    weights of a unit   |block 0|block 1|…        BLOCK elements each; a weight begins a block
    share of a rank     |8-bit numbers ……|scales|  a scale for each of its blocks
    message             the shares of all ranks, one behind the other

A block is of one weight, and is cut at no share. So what a weight is rounded to does not depend on
the number of ranks. `model/blockwise.py` has the arithmetic.

Gradients are summed by all-to-all in one hop or two (section 3.3). In a hop each of k ranks sends
the others what is on the way to them, rounded, and adds what it has heard; with two, it goes to a
neighbour of the own node first, and then, as the sum of that node, to the rank that keeps it:

    4 ranks, nodes of 2    hop 1: 0 → 1 shares 1 and 3      hop 2: 1 → 3 share 3, of 0 + 1

With `method.gradient_feedback` a rank keeps what each hop has rounded away, e, and sends the terms
and e the next time (Xie et al. 2024, https://arxiv.org/abs/2407.04480): a whole gradient for the
first hop, and a node's share of it for the second.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

BLOCK = 256  # elements with one scale
FEEDBACK = "feedback"  # its kind in checkpoints
SCALE_BYTES = 4  # a float32


def message_bytes(elements: int, bits: int = 8) -> int:
    """Bytes of so many elements, a multiple of BLOCK, with their scales."""
    return elements * bits // 8 + elements // BLOCK * SCALE_BYTES


class Hop(NamedTuple):
    """One hop of the sum of a gradient: of so many elements, to a sum that has fewer, among so many
    ranks; they send messages of so many bytes, one to each.
    """

    ranks: int
    elements: int
    message: int


def hops(elements: int, sizes: Sequence[int]) -> Iterator[Hop]:
    """The hops of a gradient, over groups of these sizes."""
    for size in sizes:
        yield Hop(size, elements, message_bytes(elements // size, 4))
        elements //= size


def feedback_elements(elements: int, sizes: Sequence[int]) -> int:
    """What all hops of a gradient have rounded away."""
    return sum(hop.elements for hop in hops(elements, sizes))


def reducing_bytes(elements: int, sizes: Sequence[int], width: int) -> int:
    """Room for the messages of all hops, sent and heard, and for the sums between them, of elements
    of so many bytes.
    """
    found = [*hops(elements, sizes)]
    sums = sum(hop.elements for hop in found[1:])
    return sum(2 * hop.ranks * hop.message for hop in found) + sums * width
