"""What contradicts itself in a layout, whatever the model and the batch."""

from collections.abc import Iterator
from math import gcd
from typing import TYPE_CHECKING

from howdah.base.errors import nearest
from howdah.machines.cluster import WORLD
from howdah.plan.both import inside_problem
from howdah.plan.chosen_blocks import chosen_problem
from howdah.plan.layout_numbers import MOST, NUMBERS
from howdah.plan.schedule.registry import SCHEDULES
from howdah.plan.stage_counts import counts_problem

if TYPE_CHECKING:
    from howdah.plan.layout import Layout

KEEPING = tuple(name for name, family in SCHEDULES.items() if family.keeps)


def problems(layout: "Layout") -> Iterator[str]:
    """Yields one sentence for each contradiction."""
    for word, name in NUMBERS.items():
        number, least = getattr(layout, name), int(word not in ("zero", "server"))
        if number is not None and number < least:
            yield f"{word}{number} must be at least {word}{least}"
        elif number is not None and number > MOST[word]:
            yield f"{word}{number} must be at most {word}{MOST[word]}"
    ranks = layout.pp * layout.cp * layout.tp * (layout.dp or 1) + layout.server
    if ranks > WORLD:
        yield f"it makes {ranks:,} ranks; at most {WORLD:,} are planned for"
    yield from _pipeline_problems(layout)
    if layout.sp and layout.tp == 1:
        yield "sp cuts the sequence between the parts of tp; add tp2 or more, or drop sp"
    if layout.accumulate == "shard" and layout.zero < 2:
        yield "accumulate=shard keeps shares of gradients, which begins with zero2"
    if layout.shard is not None and not layout.zero:
        yield f"shard{layout.shard} shares out nothing; add zero1, zero2 or zero3"
    yield from _copy_problems(layout)
    chosen = layout.recompute_blocks
    if chosen is not None and (problem := chosen_problem(layout.recompute, chosen)):
        yield problem
    inside = layout.inside
    if inside and (problem := inside_problem(layout.cp, inside)):
        yield problem
    of_zero3 = "what zero3 gathers; add zero3, or drop it"
    for word, usual, there, problem in (
        ("inputs", "sliced", layout.sp, "keeps what sp gathers; add sp, or drop it"),
        ("release", "use", layout.zero == 3, f"keeps {of_zero3}"),
        ("gather", "all-gather", layout.zero == 3, f"sends {of_zero3}"),
        ("update", "servers", layout.server > 0, "is for parameter servers; add server1"),
        ("context", "ring", layout.cp > 1, "needs parts of sequences; add cp2 or more"),
    ):
        if getattr(layout, word) != usual and not there:
            yield f"{word}={getattr(layout, word)} {problem}"
    if layout.dp is not None:
        yield from _division_problems(layout)


def _copy_problems(layout: "Layout") -> Iterator[str]:
    """What a second copy of the weights cannot be combined with."""
    if layout.hpz is None:
        return
    word, why = f"hpz{layout.hpz}", "keeps a second copy of the weights that zero3 gathers"
    if layout.zero != 3:
        yield f"{word} {why}; add zero3, or drop it"
    elif layout.hpz == 1:
        yield f"{word} {why}, whole on every rank; use release=step, or hpz2 or more"
    if layout.release == "step":
        yield f"{word} is for units that come again, and release=step keeps them; drop one of both"
    if layout.ep > 1:
        yield f"{word} with ep{layout.ep} is not built: experts have other sharers; drop {word}"
    if layout.weights != "device":
        yield f"{word} is on the device, and weights={layout.weights} are not; drop one of both"


def _pipeline_problems(layout: "Layout") -> Iterator[str]:
    schedule, virtual = layout.schedule, layout.virtual
    if layout.stages and (problem := counts_problem(layout.stages, layout.pp, virtual)):
        yield problem
    if layout.pp == 1:
        for word, given in ((schedule, schedule), (f"v{virtual}", virtual > 1)):
            if given:
                yield f"{word} needs pipeline stages; add pp2 or more, or drop it"
        if layout.slices > 1:
            yield f"slices{layout.slices} needs pipeline stages; add pp2 or more, or drop it"
        return
    if schedule is None or schedule not in KEEPING:
        yield f"schedule {schedule!r} is unknown{nearest(str(schedule), KEEPING)}"
        return
    family = SCHEDULES[schedule]
    if family.takes == "virtual" and virtual == 1:
        yield f"{schedule} needs two or more stages on each rank; add v2"
    elif family.takes != "virtual" and virtual != family.stages:
        yield (
            f"{schedule} has one stage on each rank, not v{virtual}; use interleaved v{virtual}"
            if family.stages == 1
            else f"{schedule} has {family.stages} stages on each rank, not v{virtual}; drop "
            f"v{virtual}"
        )
    if (family.takes == "slices") != (layout.slices > 1):
        yield (
            f"{schedule} needs token slices; add slices2 or more"
            if family.takes == "slices"
            else f"{schedule} does not cut tokens; use terapipe slices{layout.slices}"
        )


def _division_problems(layout: "Layout") -> Iterator[str]:
    for word, parts in (("ep", layout.ep), ("shard", layout.shard or 1)):
        if layout.replicas < parts:
            there = f"{word}{parts} takes {parts} ranks of dp×cp, and the layout has"
            yield f"{there} {layout.replicas}; use dp{parts // gcd(parts, layout.cp)}"
        elif layout.replicas % parts:
            fits = (n for n in range(2, layout.replicas + 1) if layout.replicas % n == 0)
            near = min(fits, key=lambda n: abs(n - parts))
            there = f"does not divide the {layout.replicas} ranks of dp×cp"
            yield f"{word}{parts} {there}; use {word}{near}"
    if layout.hpz and (layout.hpz > layout.sharers or layout.sharers % layout.hpz):
        there = f"hpz{layout.hpz} does not divide the {layout.sharers} ranks that share out weights"
        cuts = [n for n in range(2, layout.sharers) if layout.sharers % n == 0]
        near = min(cuts, key=lambda n: abs(n - (layout.hpz or 0)), default=0)
        yield f"{there}; {f'use hpz{near}' if near else 'drop it'}"
