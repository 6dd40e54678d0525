"""The parity matrix: which forms of parallelism work together, checked for every pair of them.

    form          the words of the layout that it adds          needs
    zero2         zero2                                         dp2
    tensor        tp2
    interleaved   pp2 interleaved v2                            more micro-batches

A cell is the smallest layout that has both forms. Either `verify` proves that it works, or it is
refused with a sentence before anything starts. There is no third case.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, combinations_with_replacement

from howdah.base.errors import UserError
from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.layout import SCHEDULES, parse_layout
from howdah.plan.method import Method
from howdah.plan.schedule.registry import SCHEDULES as FAMILIES
from howdah.plan.support import unsupported
from howdah.shapes.presets import preset
from howdah.verify.case import Case, small_shape

SEQUENCE = 19
# Schedules of token slices are left out: they cannot run yet.
PIPES = tuple(name for name in SCHEDULES if FAMILIES[name].takes != "slices")
FORMS = {
    "dp": "dp2",
    "zero1": "dp2 zero1",
    "zero2": "dp2 zero2",
    "zero2 whole": "dp2 zero2 accumulate=whole",
    "zero3": "dp2 zero3",
    "zero3 kept": "dp2 zero3 release=step",
    "hybrid": "dp4 zero2 shard2",
    "tensor": "tp2",
    "sequence": "tp2 sp",
    "sequence kept": "tp2 sp inputs=gathered",
    "ring": "cp2",
    "all-to-all": "cp2 context=all-to-all",
    **{name: f"pp2 {name}{' v2' * (FAMILIES[name].takes == 'virtual')}" for name in PIPES},
    "recompute": "recompute=full",
    "selective": "recompute=selective",
    "one block": "recompute=full:1",
    "accumulation": "x3",
}
STAGES = ("zero1", "zero2", "zero2 whole", "zero3", "zero3 kept", "hybrid")  # exclusive
SLICES = ("tensor", "sequence", "sequence kept")
AGAIN = ("recompute", "selective", "one block")
CONTEXTS = ("ring", "all-to-all")


@dataclass(frozen=True)
class Cell:
    """Some forms, and the words of the smallest layout that has all of them."""

    forms: tuple[str, ...]
    words: str


def pairs() -> Iterator[Cell]:
    """Yields every form alone, and every pair of forms that are not choices of the same kind."""
    for one, other in combinations_with_replacement(FORMS, 2):
        forms = (one,) if one == other else (one, other)
        if not _exclude(forms):
            yield Cell(forms, together(forms))


def triples() -> Iterator[Cell]:
    """Yields every three forms of three different kinds: ZeRO, tensor parallelism, pipeline
    schedule, recomputation.
    """
    for forms in combinations(FORMS, 3):
        kinds = [any(form in kind for form in forms) for kind in (STAGES, SLICES, PIPES, AGAIN)]
        if sum(kinds) == len(forms) and not _exclude(forms):
            yield Cell(forms, together(forms))


def _size(word: str) -> int:
    """The number in a word; 0 if there is none."""
    return int("".join(filter(str.isdigit, word)) or 0)


def _exclude(forms: tuple[str, ...]) -> bool:
    """Whether two of the forms are choices of the same kind."""
    kinds = (STAGES, SLICES, PIPES, AGAIN, CONTEXTS)
    return any(sum(form in kind for form in forms) > 1 for kind in kinds)


def together(forms: tuple[str, ...]) -> str:
    """The words of all forms; where forms name the same axis, the larger size.

    >>> together(("hybrid", "tensor"))
    'dp4 zero2 shard2 tp2 x2'
    """
    words: dict[str, str] = {}
    for form in forms:
        for word in FORMS[form].split():
            axis = word.rstrip("0123456789") if word[:2] in ("dp", "cp", "tp", "pp") else word
            words[axis] = max(words.get(axis, word), word, key=_size)
    words.setdefault("x", "x4" if "pp" in words else "x2")
    if "accumulation" in forms:
        words["x"] = words.pop("x3")
    return " ".join(words.values())


def case_of(words: str) -> Case:
    """A case on the layout `words`, in float64; its last micro-batch is one sample short.

    Raises UserError when the layout is refused.
    """
    layout = parse_layout(words)
    shape = replace(
        small_shape(preset("laptop"), context=SEQUENCE), layers=4, vocab=67, ffn_size=28
    )
    samples = max(2 * layout.readers * (layout.micros or 1) - 1, 2)
    method = Method("float64")
    batch = Batch(global_batch=samples, micro_batch=2)
    problems = check_plan(shape, layout, batch, method, sequence=SEQUENCE)
    problems += unsupported(shape, layout)
    if problems:
        raise UserError("; ".join(problems))
    return Case(
        shape=shape,
        layout=layout,
        method=method,
        samples=samples,
        micro=2,
        sequence=SEQUENCE,
        steps=2,
        seed=3,
    )
