"""Layout: how one run is split over devices, without changing what it computes.

A layout has one short, strict spelling, on the command line, in logs and in tables:

    single                        one process
    dp2 x4                        two replicas, four micro-batches each per step
    dp* zero3 recompute=full      as many replicas as there are processes, everything sharded
    pp2 dp4 tp2 zero1 1f1b x8     16 ranks: two stages, four replicas, matrices cut in two
    pp4 dp2 interleaved v3 x8     four ranks with three stages each
    dp8 ep4 zero2 shard4 x2       experts over 4 ranks, states over 4 of 8 replicas
    dp8 zero3 hpz4                weights over 8 ranks, and a second copy over 4 neighbours
    dp4 server2                   four workers, and two parameter servers beside them
    dp4 server2 update=workers    the same, where the servers only add gradients

Parsing reverses printing. An unknown word is refused with the nearest known one, and a field that
is given twice is refused. `dp*` is open until `resolve` gets the world size, a missing `x` until
`resolve_batch` gets the batch. Defaults are not printed: equal layouts have equal spellings.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from howdah.base.errors import UserError, nearest, shown
from howdah.base.their_words import answer_layout
from howdah.plan.both import most_inside, read_inside
from howdah.plan.chosen_blocks import Chosen, read_chosen, spell_chosen, unread
from howdah.plan.layout_numbers import MEANING, MOST, NUMBERS
from howdah.plan.layout_problems import problems
from howdah.plan.schedule.registry import SCHEDULES as FAMILIES
from howdah.plan.schedule.registry import Family
from howdah.plan.stage_counts import read_counts, spell_counts
from howdah.shapes.activations import Recompute

Home = Literal["device", "host", "disk"]
Accumulate = Literal["whole", "shard"]
Context = Literal["ring", "all-to-all", "both"]
Inputs = Literal["sliced", "gathered"]
Release = Literal["use", "step"]
Gather = Literal["all-gather", "broadcast"]
Update = Literal["servers", "workers"]

# Schedules that keep the result; one without a flush changes it, and is no part of a layout.
SCHEDULES = tuple(name for name, family in FAMILIES.items() if family.keeps)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a run is split over ranks: the choices that do not change its result.

    pp, dp, cp, tp  ranks along each axis, slowest to fastest: pipeline stages, replicas, parts of
                a sequence, parts of a matrix. A dp of None is `dp*`.
    ep          ranks over which the experts are divided; they are neighbours along dp×cp
    zero        what is sharded over dp×cp: 1 optimizer state, 2 also gradients, 3 also weights
    shard       ranks of dp×cp that shard one copy of the states; None: all of them
    hpz         ranks of a node that share out a second copy of the weights of zero3, from which
                all gathers of a pass but a unit's first are made; None: there is none
    server      parameter servers: ranks behind the others, which keep the states, and update
    update      who updates beside servers: they do, or each worker all of its own, by gradients
                that the servers have only added
    sp          whether the tp ranks divide norms and residuals along the sequence
    schedule    order of the pipeline's actions
    virtual     stages on each pipeline rank
    micros      micro-batches of each replica per step (accumulation); None: follows from the batch
    slices      token slices of each micro-batch
    stages      number of blocks of each pipeline stage; None: stages of equal FLOPs
    accumulate  gradients of several micro-batches: summed whole and reduced once, or reduced after
                each micro-batch, so that a rank keeps its share (the default from zero2 on)
    recompute   activations that the backward pass computes again
    recompute_blocks  which blocks: the first of each stage, or names; None: all of them
    context     attention under cp: keys and values in a ring, all-to-all of sequence for heads, or
                both: all-to-all in groups of `inside` ranks, and a ring of the groups
    inputs      what linears save of their input under sp: the rank's slice, which is all-gathered
                again in the backward pass, or the gathered input
    release     when zero3 frees the gathered weights of a unit: after each use, or after the step
    gather      how zero3 gathers a unit: all-gather, or each share by a broadcast from its owner
    weights, gradients, optimizer, activations   the memory that holds each of them between uses
    """

    pp: int = 1
    dp: int | None = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 0
    shard: int | None = None
    hpz: int | None = None
    server: int = 0
    sp: bool = False
    schedule: str | None = None
    virtual: int = 1
    micros: int | None = None
    slices: int = 1
    stages: tuple[int, ...] | None = None
    accumulate: Accumulate | None = None
    recompute: Recompute = "none"
    recompute_blocks: Chosen | None = None
    context: Context = "ring"
    inside: int | None = None
    inputs: Inputs = "sliced"
    release: Release = "use"
    gather: Gather = "all-gather"
    update: Update = "servers"
    weights: Home = "device"
    gradients: Home = "device"
    optimizer: Home = "device"
    activations: Home = "device"

    def __post_init__(self) -> None:
        for name, value in _defaults(self).items():
            object.__setattr__(self, name, value)
        for problem in problems(self):
            raise UserError(f"layout {shown(str(self))}: {problem}")

    def __str__(self) -> str:
        return " ".join(_words(self))

    @property
    def replicas(self) -> int:
        """Number of ranks with the same dense weights, dp×cp; the layout must be resolved."""
        if self.dp is None:
            raise ValueError("dp* has no world until it is resolved")
        return self.dp * self.cp

    @property
    def readers(self) -> int:
        """Number of groups that read different samples, dp: ranks along cp, tp and pp compute on
        the same samples. The layout must be resolved.
        """
        return self.replicas // self.cp

    @property
    def workers(self) -> int:
        """Number of ranks that compute; servers are behind them. The layout must be resolved."""
        return self.pp * self.replicas * self.tp

    @property
    def world(self) -> int:
        """World size: the processes that the layout needs; the layout must be resolved."""
        return self.workers + self.server

    @property
    def servers_update(self) -> bool:
        """Whether servers keep the states and update, so that workers pull weights."""
        return self.server > 0 and self.update == "servers"

    @property
    def trading(self) -> int:
        """Number of neighbours along cp that trade parts of the sequence for heads."""
        return {"ring": 1, "all-to-all": self.cp, "both": self.inside or 1}[self.context]

    @property
    def sharers(self) -> int:
        """Number of ranks over which dense states are sharded: `shard`, or all replicas."""
        return self.shard or self.replicas


def has_whole_norm(layout: Layout) -> bool:
    """Whether each rank holds the whole gradient, and can compute its norm alone."""
    return layout.zero == 0 and layout.world == layout.replicas and layout.ep == 1


def needs_own(layout: Layout) -> bool:
    """Whether the model's operations must access weights by handle (`parallel/ops.py`)."""
    axes = layout.tp > 1 or layout.pp > 1 or layout.cp > 1
    comes = layout.zero == 3 or layout.weights != "device"
    return axes or comes or layout.recompute != "none"


def family_of(layout: Layout) -> Family:
    """The properties of the layout's schedule; without a schedule, those of `naive`."""
    return FAMILIES.get(layout.schedule or "", FAMILIES["naive"])


# -- words ---------------------------------------------------------------------

CHOICES: dict[str, tuple[str, ...]] = {
    "accumulate": get_args(Accumulate),
    "recompute": get_args(Recompute),
    "context": get_args(Context),
    "inputs": get_args(Inputs),
    "release": get_args(Release),
    "gather": get_args(Gather),
    "update": get_args(Update),
    **{name: get_args(Home) for name in ("weights", "gradients", "optimizer", "activations")},
}
LONGEST = 500  # characters of a spelling; about twice as many as one word for every field
ALONE: dict[str, dict[str, object]] = {
    "single": dict.fromkeys(("pp", "dp", "cp", "tp"), 1),
    "sp": {"sp": True},
}
KNOWN = (*ALONE, *SCHEDULES, *NUMBERS, "stages=", *(f"{name}=" for name in CHOICES))


def _words(layout: Layout) -> Iterator[str]:
    usual = {field.name: field.default for field in fields(Layout)}
    if layout.dp is not None and layout.world == 1:
        yield "single"
    for word in ("pp", "dp", "cp", "tp", "ep", "zero", "shard", "hpz", "server"):
        if (number := getattr(layout, word)) != usual[word]:
            yield f"{word}{'*' if number is None else number}"
    yield from filter(None, ("sp" * layout.sp, layout.schedule))
    if layout.virtual != family_of(layout).stages:
        yield f"v{layout.virtual}"
    if layout.micros is not None:
        yield f"x{layout.micros}"
    if layout.slices != 1:
        yield f"slices{layout.slices}"
    if layout.stages:
        yield f"stages={spell_counts(layout.stages)}"
    for word in CHOICES:
        value = getattr(layout, word)
        default = _accumulation(layout.zero) if word == "accumulate" else usual[word]
        if value != default:
            some = layout.recompute_blocks if word == "recompute" else None
            inside = layout.inside if word == "context" else None
            groups = f":{inside}" if inside and inside != most_inside(layout.cp) else ""
            yield f"{word}={value}{groups}" + (f":{spell_chosen(some)}" if some is not None else "")


def parse_layout(text: str) -> Layout:
    """The layout that `text` spells. Raises UserError, which names the wrong word."""
    if len(text) > LONGEST:
        raise UserError(
            f"layout {shown(text)} has {len(text):,} characters; {LONGEST} are the most"
        )
    values: dict[str, object] = {}
    for word in text.split():
        for name, value in _read(word, text).items():
            if name in values:
                raise UserError(
                    f"layout {shown(text)}: {word!r} says {name} a second time; say it once"
                )
            values[name] = value
    return Layout(**values)  # type: ignore[arg-type]


def _read(word: str, text: str) -> dict[str, object]:
    """The fields that one word of the spelling `text` sets."""
    name, equals, value = word.partition("=")
    says = f"layout {shown(text)}:"
    if name in ("recompute", "context") and ":" in value:
        how, _, more = value.partition(":")
        return {**_read(f"{name}={how}", text), **_read_more(word, more, says)}
    if equals and name in CHOICES:
        if value not in CHOICES[name]:
            raise UserError(f"{says} {name} is {shown(value)}{nearest(value, CHOICES[name])}")
        return {name: value}
    if name == "stages":
        if (counts := read_counts(value)) is None:
            raise UserError(f"{says} {shown(word)} is no list of blocks; write it stages=5,6,6,5")
        return {"stages": counts}
    if word in SCHEDULES or word in ALONE:
        return {"schedule": word} if word in SCHEDULES else ALONE[word]
    if word in NUMBERS:
        raise UserError(f"{says} {word!r} needs a number: {MEANING[word]}")
    match = re.fullmatch(r"([a-z]+)([0-9]+|\*)", word)
    if match and match[1] == "again":
        raise UserError(f"{says} {word} is spelled recompute=full:{match[2]} now")
    if match is None or match[1] not in NUMBERS:
        near = answer_layout(word, NUMBERS) or nearest(match[1] if match else word, KNOWN)
        raise UserError(f"{says} unknown word {shown(word)}{near}")
    if match[2] == "*" and match[1] != "dp":
        raise UserError(f"{says} only dp can be '*'; give {match[1]} a number")
    if len(match[2]) > 9:
        raise UserError(f"{says} {shown(word)} must be at most {match[1]}{MOST[match[1]]}")
    return {NUMBERS[match[1]]: None if match[2] == "*" else int(match[2])}


def _read_more(word: str, more: str, says: str) -> dict[str, object]:
    """The field that is behind the colon of a word: blocks, or ranks of a group."""
    if word.startswith("recompute"):
        if (chosen := read_chosen(more)) is None:
            raise UserError(f"{says} {shown(word)} {unread(more)}")
        return {"recompute_blocks": chosen}
    if not word.startswith("context=both:") or (inside := read_inside(more)) is None:
        raise UserError(f"{says} {shown(word)} is no word; groups of ranks are context=both:2")
    return {"inside": inside}


# -- defaults and contradictions -------------------------------------------------


def _accumulation(zero: int) -> Accumulate:
    return "shard" if zero >= 2 else "whole"


def _defaults(layout: Layout) -> dict[str, object]:
    """The fields that follow from other fields."""
    values: dict[str, object] = {}
    if layout.accumulate is None:
        values["accumulate"] = _accumulation(layout.zero)
    if layout.schedule is None and layout.pp > 1:
        follows = {(True, False): "interleaved", (False, True): "terapipe"}
        values["schedule"] = follows.get((layout.virtual > 1, layout.slices > 1), "1f1b")
    if (layout.context == "both") != (layout.inside is not None):
        values["inside"] = most_inside(layout.cp) if layout.context == "both" else None
    if layout.virtual == 1:
        values["virtual"] = family_of(layout).stages
    replicas = layout.dp * layout.cp if layout.dp else None
    if layout.zero and layout.shard == replicas:  # without zero it is refused, whatever its size
        values["shard"] = None
    if layout.hpz is not None and layout.dp is not None and layout.hpz == layout.sharers:
        values["hpz"] = None  # the first copy is inside a node
    return values


def resolve(layout: Layout, world: int | None) -> Layout:
    """`layout` with `dp*` filled in from the world size; UserError if it cannot have `world` ranks.

    If `world` is None, the layout decides how many processes are started, and `dp*` is refused.
    """
    if world is None:
        if layout.dp is None:
            raise UserError(
                f"layout '{layout}' takes the number of processes from torchrun or a cluster; "
                "without them give a number, such as dp2"
            )
        return layout
    if layout.dp is None:
        per_replica, there = layout.pp * layout.cp * layout.tp, world - layout.server
        if there % per_replica or there < 1:
            near = max(round(there / per_replica), 1) * per_replica + layout.server
            more = f" and {layout.server}" if layout.server else ""
            raise UserError(
                f"layout '{layout}' needs a multiple of {per_replica}{more} processes but there "
                f"are {world}; the nearest is {near}"
            )
        return replace(layout, dp=there // per_replica)
    if layout.world != world:
        raise UserError(_world_problem(layout, world))
    return layout


def _world_problem(layout: Layout, world: int) -> str:
    copies, rest = divmod(world - layout.server, layout.pp * layout.cp * layout.tp)
    use = f"use dp{copies} or dp*, or " if copies > 0 and not rest else ""
    there = f"needs {layout.world} processes but there are {world}"
    return f"layout '{layout}' {there}; {use}start {layout.world} processes"
