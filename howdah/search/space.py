"""The layouts of a search: all that a model, a batch and a number of devices allow.

    axes          tp, pp, cp, ep: divisors of the number of devices; dp is what is left. cp leaves a
                  rank 512 tokens at least, in a ring or from all to all
    schedule      1f1b, interleaved with v stages a rank, zb-h1, zb-h2, zb-v
    states        zero0 to zero3, over all replicas or over groups that fill one, two, four … nodes
    micro-batch   powers of two up to a replica's part of the batch
    recompute     none, selective, full;  sp with and without, where there is tp
    homes         of optimizer, gradients, weights and activations: the device, the host, the disk;
                  those of states with zero over all replicas; on GPUs where nothing fits without
                  them, or with --all

Bounds cut a choice before its combinations with others are listed: a tp that does not divide the
heads rules out all of its layouts at once. Every layout that is ruled out is counted by the reason.
Recompute of the first blocks of each stage is listed later, where memory asks for it (`blocks`).
Left out of a search: gpipe and naive (as fast as 1f1b at best, and more memory), and cuts of
gradients other than the default of zero.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.base.errors import UserError
from howdah.machines.cluster import Cluster, usable_memory
from howdah.plan.batch import Batch, micro_steps
from howdah.plan.check import check_plan
from howdah.plan.comm import Comm
from howdah.plan.layout import Context, Home, Layout
from howdah.plan.layout_numbers import MOST
from howdah.plan.method import Method
from howdah.plan.plan import Plan, for_gpus, make_plan
from howdah.plan.schedule.registry import MOST as FORWARDS
from howdah.plan.schedule.registry import SCHEDULES
from howdah.plan.support import unsupported
from howdah.shapes.activations import Recompute
from howdah.shapes.parameters import parameters
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import parts
from howdah.sim.chosen import choice_misfits
from howdah.sim.memory import width_of

VIRTUAL = 8  # most stages on a rank
MICRO_BATCH = 64  # largest micro-batch, in samples
PLANNED = "can be planned, but not run yet (--all has them)"
WRONG_COMM = "what [comm] says cannot be with so many ranks, or with this zero"
NODES = (1, 2, 4, 8)  # nodes that a group of shard fills
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
NAMES = (None, "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")  # schedules, by number
CONTEXTS: tuple[Context, ...] = ("ring", "all-to-all")  # by number; both, by ranks of a group
TOKENS = 512  # of a sequence that a rank has at least, where cp cuts it
FIELDS = ("tp", "pp", "dp", "cp", "context", "ep", "zero", "shard", "sp", "schedule", "virtual")
COLUMNS = (*FIELDS, "home", "micro_batch", "recompute", "blocks", "micros")
KINDS = np.dtype([(name, np.int32) for name in COLUMNS])
CARRIED = ("tp", "dp", "cp", "context", "ep", "zero", "shard", "sp")  # who sends what to whom
HOMES: tuple[dict[str, Home], ...] = (  # of what is not on the device between uses, by number
    {},
    {"optimizer": "host"},
    {"activations": "host"},
    {"optimizer": "host", "activations": "host"},
    {"optimizer": "host", "gradients": "host"},
    {"optimizer": "host", "gradients": "host", "weights": "host"},
    dict.fromkeys(("optimizer", "gradients", "weights", "activations"), "host"),
    {"optimizer": "disk"},
    {"activations": "disk"},
    {"optimizer": "disk", "gradients": "disk", "weights": "disk"},
    dict.fromkeys(("optimizer", "gradients", "weights", "activations"), "disk"),
)
Rows = NDArray[np.void]  # layouts: a record of COLUMNS each


@dataclass(frozen=True)
class Question:
    """What a layout is searched for.

    global_batch  samples of a step
    micro_batch   samples of a micro-batch; None: it is searched, too
    planned       also layouts that can be planned, but not run; on GPUs also homes
    comm          by which algorithms messages travel
    short         of memory: homes on GPUs are searched, too
    away          where homes may be
    """

    shape: ModelShape
    cluster: Cluster
    method: Method
    sequence: int
    global_batch: int
    micro_batch: int | None = None
    planned: bool = False
    comm: Comm = field(default_factory=Comm)
    short: bool = False
    away: tuple[Home, ...] = ("host", "disk")

    @property
    def devices(self) -> int:
        return self.cluster.devices

    @cached_property
    def homes(self) -> list[int]:
        """The numbers of the homes to search, besides the device."""
        cards = bool(self.cluster.device.cuda_names)
        if not self.planned and (
            self.only_planned(Layout(optimizer="host")) or (cards and not self.short)
        ):
            return []
        host, apart = self.cluster.host, self.planned or cards
        # the host of a CPU is the device itself, and has no memory besides
        there = {"host": host.memory * apart, "disk": host.disk if host.disk_bandwidth else 0.0}
        every = {home: most * self.cluster.nodes for home, most in there.items()}
        every["device"] = usable_memory(self.cluster) * self.devices
        return [
            number
            for number, one in enumerate(HOMES)
            if one
            and all(home in self.away and there[home] for home in one.values())
            and all(held <= every[home] for home, held in states(self, number).items())
        ]

    def only_planned(self, layout: Layout) -> bool:
        """Whether a layout can only be planned, where the model's other layouts can be run."""
        ask = partial(unsupported, self.shape, precision=self.method.precision)
        return len(ask(layout)) > len(ask(Layout()))

    def plan(self, layout: Layout, micro_batch: int) -> Plan:
        """The plan of one layout. Raises UserError if it is not valid."""
        batch = Batch(global_batch=self.global_batch, micro_batch=micro_batch)
        plan = make_plan(self.shape, layout, batch, sequence=self.sequence, method=self.method)
        plan = replace(plan, comm=self.comm)
        return for_gpus(plan) if self.cluster.device.cuda_names else plan


def states(question: Question, home: int) -> Counter[Home]:
    """Bytes of weights, gradients and optimizer states of the whole model, each once, by where
    they are in the homes of a number.
    """
    layout = Layout(**HOMES[home])  # type: ignore[arg-type]
    width, found = width_of(question.plan(layout, question.global_batch)), Counter[Home]()
    found[layout.weights] += width.weights
    found[layout.gradients] += width.gradients
    found[layout.optimizer] += width.masters + width.moments
    total = parameters(question.shape).total
    return Counter({where: each * total for where, each in found.items()})


class Space(NamedTuple):
    """The layouts that are left, and how many are ruled out for which reason."""

    rows: Rows
    ruled_out: Counter[str]


class _Axes(NamedTuple):
    tp: int
    pp: int
    cp: int
    context: int
    ep: int
    dp: int


def space(question: Question, *, least: bool = False) -> Space:
    """All layouts of a question, on all of its devices: rows that differ in recompute alone follow
    each other. Raises UserError if the model, the sequence or the batch is wrong for every layout.

    least  only the choices that take least memory
    """
    wrong = check_plan(
        question.shape,
        Layout(),
        Batch(question.global_batch, question.global_batch),
        question.method,
        sequence=question.sequence,
    )
    if wrong:
        raise UserError("; ".join(wrong))
    ruled_out: Counter[str] = Counter()
    found = [some for axes in _axes(question) for some in _rows(question, axes, ruled_out, least)]
    rows: Rows = np.concatenate([np.zeros(0, KINDS), *found])
    return Space(_carried(question, rows, ruled_out) if len(rows) else rows, ruled_out)


def _carried(question: Question, rows: Rows, ruled_out: Counter[str]) -> Rows:
    """The layouts whose messages can travel as [comm] says. Raises UserError if there is none."""
    if not question.comm.is_chosen:
        return rows
    groups, number = alike(rows, CARRIED)
    told = []
    for tp, dp, cp, context, ep, zero, shard, sp in groups[[*CARRIED]].tolist():
        layout = Layout(tp=tp, dp=dp, cp=cp, ep=ep, zero=zero, shard=shard or None, sp=bool(sp))
        layout = replace(layout, **context_words(context))
        told.append(choice_misfits(question.plan(layout, -(-question.global_batch // dp))))
    kept = ~np.array([*map(bool, told)])[number]
    if not kept.any():
        raise UserError(told[0][0])
    ruled_out[WRONG_COMM] += int((~kept).sum())
    found: Rows = rows[kept]
    return found


def context_words(number: int) -> dict[str, Any]:
    """The fields of a layout that a number of its column `context` stands for."""
    if number < len(CONTEXTS):
        return {"context": CONTEXTS[number]}
    return {"context": "both", "inside": number}


def context_number(layout: Layout) -> int:
    """The inverse."""
    return layout.inside or CONTEXTS.index(layout.context)


def layout_of(row: np.void) -> Layout:
    """The layout of a row."""
    sizes = {name: int(row[name]) for name in ("pp", "dp", "cp", "tp", "ep", "zero", "virtual")}
    return Layout(
        **sizes,  # type: ignore[arg-type]
        shard=int(row["shard"]) or None,
        sp=bool(row["sp"]),
        **context_words(int(row["context"])),
        recompute=RECOMPUTE[row["recompute"]],
        recompute_blocks=int(row["blocks"]) or None,
        schedule=NAMES[row["schedule"]],
        **HOMES[row["home"]],
    )


def alike(rows: Rows, names: Sequence[str]) -> tuple[Rows, NDArray[np.intp]]:
    """A layout for each combination of values of some columns, in their order, and the number of
    the combination that each layout has.
    """
    code = np.zeros(len(rows), np.int64)
    for name in names:
        values, which = np.unique(rows[name], return_inverse=True)
        code = code * len(values) + which
    _, first, number = np.unique(code, return_index=True, return_inverse=True)
    return rows[first], number


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    low = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def _axes(question: Question) -> Iterator[_Axes]:
    """All sizes of the axes that make the number of devices."""
    every = divisors(question.devices)
    runs = question.planned or not question.only_planned(Layout(cp=2))
    cuts = [cp for cp in every if cp == 1 or question.sequence // cp >= TOKENS] if runs else [1]
    node = question.cluster.devices_per_node
    experts = question.shape.experts
    for tp, pp, cp in product(every, every, cuts):
        replicas, rest = divmod(question.devices, tp * pp)
        if not rest and replicas % cp == 0:
            contexts, inside = [*range(1 + (cp > 1))], node // tp
            contexts += [inside] * (1 < inside < cp and cp % inside == 0)
            for context, ep in product(contexts, divisors(replicas) if experts else [1]):
                yield _Axes(tp, pp, cp, context, ep, replicas // cp)


def _rows(question: Question, axes: _Axes, ruled_out: Counter[str], least: bool) -> list[Rows]:
    """The layouts of one set of axes that nothing rules out."""
    schedules, states = _schedules(axes), _states(question, axes)
    sizes = _micro_batches(question, axes)
    slices, again = ((0, 1) if axes.tp > 1 else (0,)), range(len(RECOMPUTE))
    if least:
        sizes, slices, again = sizes[:1], slices[-1:], again[-1:]
        states = [one for one in states if not one[1]]
    count = len(schedules) * len(states) * max(len(sizes), 1) * len(slices) * len(again)
    if reason := _refused(question, axes):
        ruled_out[reason] += count
        return []
    if not sizes:
        few = axes.dp > question.global_batch
        larger = "a micro-batch that is more than a replica's part of the batch"
        ruled_out["more replicas than samples in the batch" if few else larger] += count
        return []
    if axes.tp > 1 and question.sequence // axes.cp < axes.tp:
        ruled_out["sp cuts the sequence into less than a token"] += count // 2
        slices = (0,)
    inner = [*product(states, slices, again)]
    each = np.zeros(len(inner), KINDS)
    for name in ("tp", "pp", "dp", "cp", "context", "ep"):
        each[name] = getattr(axes, name)
    each["zero"], each["shard"], each["home"] = np.array([one[0] for one in inner]).T
    each["sp"], each["recompute"] = np.array([one[1:] for one in inner]).T
    found = []
    for (schedule, virtual), size in product(schedules, sizes):
        micros = micro_steps(question.global_batch, micro=size, replicas=axes.dp)
        if reason := _too_long(question, axes, schedule, virtual, micros):
            ruled_out[reason] += len(inner)
            continue
        some = each.copy()
        some["schedule"], some["virtual"] = schedule, virtual
        some["micro_batch"], some["micros"] = size, micros
        found.append(some)
    return found


def _refused(question: Question, axes: _Axes) -> str:
    """The reason for which no layout of these axes is possible; "" if some may be."""
    if axes.dp > MOST["dp"] or max(axes.pp, axes.tp) > 256:
        return "more than 256 parts along an axis"
    if axes.pp > len(parts(question.shape)):
        return "more stages than the model has parts"
    words = context_words(axes.context)
    layout = Layout(tp=axes.tp, cp=axes.cp, ep=axes.ep, dp=axes.dp, **words)
    batch = Batch(question.global_batch, -(-question.global_batch // axes.dp))
    shape, method, sequence = question.shape, question.method, question.sequence
    if axes.dp <= question.global_batch and check_plan(
        shape, layout, batch, method, sequence=sequence
    ):
        return "the model cannot be cut so: heads, feed-forward, experts or tokens do not divide"
    if not question.planned and question.only_planned(replace(layout, pp=axes.pp)):
        return PLANNED
    return ""


def _too_long(question: Question, axes: _Axes, schedule: int, virtual: int, micros: int) -> str:
    stages, name = axes.pp * virtual, NAMES[schedule]
    if stages > len(parts(question.shape)):
        return "more stages than the model has parts"
    filled = SCHEDULES[name].fills(axes.pp) if name else 1
    if micros > MOST["x"] or (name and stages * max(micros, filled) > FORWARDS):
        return "too many micro-batches for a schedule"
    return ""


def _schedules(axes: _Axes) -> list[tuple[int, int]]:
    """Numbers of schedules, and stages on a rank."""
    if axes.pp == 1:
        return [(0, 1)]
    several = [(2, virtual) for virtual in range(2, VIRTUAL + 1)]
    return [(1, 1), *several, (3, 1), (4, 1), (5, 2)]


def _states(question: Question, axes: _Axes) -> list[tuple[int, int, int]]:
    """Stages of ZeRO, sizes of the groups that share one copy of the states (0: all), homes."""
    replicas, homes = axes.dp * axes.cp, question.homes
    if replicas == 1:
        return [(0, 0, home) for home in (0, *homes)]
    pairs = [(zero, home) for zero in (0, 1, 2, 3) for home in homes]
    pairs = [(zero, home) for zero, home in pairs if zero or [*HOMES[home]] == ["activations"]]
    if not question.planned:
        two = (Layout(dp=2, zero=zero, **HOMES[n]) for zero, n in pairs)  # type: ignore[arg-type]
        pairs = [
            pair
            for pair, layout in zip(pairs, two, strict=True)
            if not question.only_planned(layout)
        ]
    found = [(0, 0, 0), *((zero, 0, home) for zero, home in pairs)]
    node = question.cluster.devices_per_node
    groups = {node * nodes // axes.tp for nodes in NODES}
    fitting = [n for n in sorted(groups) if 1 < n < replicas and replicas % n == 0]
    return found + [(zero, shard, 0) for zero in (1, 2, 3) for shard in (0, *fitting)]


def _micro_batches(question: Question, axes: _Axes) -> list[int]:
    """Sizes of micro-batches that leave no replica without a sample."""
    most = -(-question.global_batch // axes.dp) if axes.dp <= question.global_batch else 0
    if question.micro_batch is not None:
        return [question.micro_batch] if question.micro_batch <= most else []
    return [size for n in range(7) if (size := 1 << n) <= min(most, MICRO_BATCH)]
