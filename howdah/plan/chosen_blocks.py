"""The blocks that a layout recomputes, where not all are: the first of each stage, or blocks by
name.

    recompute=full:2                  the first two of each stage
    recompute=full:layers.0-3,7       layers 0, 1, 2, 3 and 7
    recompute=full:encoder.0,layers.0-1

By name, the stages of a pipeline can be treated differently: under 1F1B the first stage keeps the
activations of most micro-batches, and may be the only one that lacks memory.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from howdah.shapes.part import Part

Chosen = int | tuple[Part, ...]  # number of first blocks of each stage, or names without repetition
MOST_LAYERS = 1000  # blocks of a stack
_NAMED = re.compile(r"(?:(layers|encoder)\.)?([0-9]{1,9})(?:-([0-9]{1,9}))?")


def read_chosen(text: str) -> Chosen | None:
    """The blocks that `text` spells, or None if it spells none. A number without a stack belongs to
    the stack before it. Names come back sorted, so that equal choices are equal.
    """
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)
    stack, found = "", set()
    for word in text.split(","):
        match = _NAMED.fullmatch(word)
        if match is None or not (stack := match[1] or stack):
            return None
        first, last = int(match[2]), int(match[3] or match[2])
        if not first <= last < MOST_LAYERS:
            return None
        found |= {(stack, layer) for layer in range(first, last + 1)}
    return tuple(Part(*one) for one in sorted(found))


def unread(text: str) -> str:
    """Why `read_chosen` reads nothing, to follow the word that has the text in a sentence."""
    for match in filter(None, map(_NAMED.fullmatch, text.split(","))):
        if match[3] and int(match[3]) < int(match[2]):
            stack = f"{match[1]}." * bool(match[1])
            return f"counts backwards; write {stack}{match[3]}-{match[2]}"
    return (
        "names no blocks; use the first of each stage (recompute=full:2) or names "
        "(recompute=full:layers.0-3,7)"
    )


def spell_chosen(chosen: Chosen) -> str:
    """The shortest spelling that `read_chosen` reads as `chosen`."""
    if isinstance(chosen, int):
        return str(chosen)
    stacks = groupby(chosen, key=lambda part: part.stack)
    return ",".join(
        f"{stack}." + ",".join(_ranges([part.layer for part in parts])) for stack, parts in stacks
    )


def _ranges(layers: Sequence[int]) -> Iterator[str]:
    for _, pairs in groupby(enumerate(layers), key=lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in pairs]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def chosen_problem(how: str, chosen: Chosen) -> str | None:
    """What is wrong with `chosen` for the kind of recomputation `how`, or None."""
    word = f"recompute={how}:{spell_chosen(chosen)}"
    if how == "none":
        return f"{word} recomputes nothing; use recompute=full:{spell_chosen(chosen)}"
    if isinstance(chosen, int) and not 1 <= chosen <= MOST_LAYERS:
        return f"{word} must have at least 1 and at most {MOST_LAYERS:,} blocks"
    return None


def missing_problem(how: str, chosen: Chosen, parts: Sequence[Part]) -> str | None:
    """What is wrong with `chosen` for a model of `parts`, or None."""
    blocks, word = [part for part in parts if part.is_block], f"recompute={how}"
    if isinstance(chosen, int):
        most = len(blocks)
        if chosen <= most:
            return None
        return f"{word}:{chosen} is over the {most} blocks; use {word}:{most}, or {word}"
    absent = next((part for part in chosen if part not in blocks), None)
    if absent is None:
        return None
    return f"{word} names {absent}, but the model's blocks are {spell_chosen(tuple(blocks))}"


def is_chosen(chosen: Chosen | None, part: Part, index: int) -> bool:
    """Whether the block `part` is recomputed; `index` counts the blocks of its stage from 0."""
    if chosen is None:
        return True
    return index < chosen if isinstance(chosen, int) else part in chosen
