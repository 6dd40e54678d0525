"""The search: every layout by closed form, the best by simulation.

    1. `space`        lists the layouts that are possible
    2. `closed_form`  gives seconds and bytes of them, within a few per cent; `shortlist` leaves out
                      those whose passes alone are slower than the fastest
    3. here           the fastest that seem to fit are planned, their memory counted exactly and
                      their step simulated; the result is the best of these. Of a pipeline stages of
                      equal seconds are tried, too (`stage_cut`)

A layout is refined only if the closed form may err so far that it could be among the best. If none
of the fastest fits, those that take least memory are tried: that nothing fits is said of memory
that was counted exactly.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from sys import maxsize
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.base.errors import UserError
from howdah.machines.cluster import Cluster, Grid, resized, usable_memory
from howdah.plan.homes import homes
from howdah.plan.layout import Home
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.search.closed_form import ClosedForm
from howdah.search.layer_window import has_window, wider
from howdah.search.part_tables import PartTables
from howdah.search.shortlist import Shortlist, blocks_of, shortlist
from howdah.search.space import PLANNED, WRONG_COMM, Question, layout_of, space
from howdah.search.stage_cut import GAIN, cut_by_time
from howdah.sim.chosen import choice_misfits
from howdah.sim.kernels import kernels_of
from howdah.sim.measured import profile_for
from howdah.sim.memory import Held, kept_states, memory, peak
from howdah.sim.profile import Profile
from howdah.sim.step_time import StepTime, step_time

BEST = 10  # layouts of an answer
FEW = 8  # nodes of a range of which each number is tried
REFINED = 50  # layouts that are simulated
TRIED = 200  # most that are planned, if their memory turns out not to fit
TIME_ERROR = 1.1  # the closed form is this far off as a rule; tests hold it
MEMORY_DOUBT = 1.25  # nothing fits that takes so many times the memory by closed form
ACTIONS = 1 << 18  # forwards that are simulated, once there are BEST layouts: about 20 seconds
TRIES = 4  # numbers of recomputed blocks that are tried
TOO_LARGE = "more memory than a device has"
SLOWER = "passes alone that take longer than the fastest layouts"

Watch = Callable[[Sequence[int]], Iterable[int]]  # shows progress over what it is given
Refuse = Callable[[Plan], str]  # why a plan is no answer; empty if it may be one


@dataclass(frozen=True)
class Choice:
    """A layout that fits: its plan, the time of a step, bytes on the fullest device, and those
    that a run can use there.
    """

    plan: Plan
    time: StepTime
    peak: int
    capacity: float

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def devices(self) -> int:
        return self.plan.layout.world

    @property
    def spelled(self) -> tuple[int, str]:
        """A key by which short spellings come first."""
        return len(str(self.plan.layout)), str(self.plan.layout)


@dataclass(frozen=True)
class Found:
    """The answer to a question.

    best       the fastest layouts, in order
    ruled_out  how many layouts are none of the best, by the reason
    priced     layouts whose time the closed form gave
    simulated  layouts whose step was simulated
    """

    question: Question
    best: tuple[Choice, ...]
    ruled_out: Counter[str]
    priced: int
    simulated: int

    @property
    def compared(self) -> int:
        """How many layouts were compared by their time, or by a bound of it."""
        return self.priced + self.ruled_out[SLOWER]

    @property
    def alike(self) -> int:
        """How many of the best are within the error bar of the first; 0 if none is known."""
        bar = self.best[0].time.interval if self.best else None
        return sum(one.seconds <= bar[1] for one in self.best) if bar else 0


def search(
    question: Question,
    profile: Profile | None = None,
    *,
    watch: Watch = iter,
    refined: int = REFINED,
    refuse: Refuse = lambda plan: "",
) -> Found:
    """The best layouts of a question on all of its devices; none if nothing fits. Of layouts of
    equal time the one that takes less memory comes first. Where nothing fits, homes are tried.

    profile  of the framework whose time it is; None: howdah
    watch    is given the numbers of what is simulated, and yields them
    refined  layouts that are simulated at most
    refuse   rules out a layout by its plan

    Raises UserError if the model, the sequence or the batch is wrong for every layout.
    """
    profile = profile or profile_for(question.cluster, question.method)
    asked = _Asked(question, profile, room(question.cluster), refined, refuse, watch)
    found = _search(asked)
    short = replace(question, short=True)
    tried = found.best or short.homes == question.homes
    return found if tried else _search(asked._replace(question=short))


def _search(asked: "_Asked") -> Found:
    question, profile, refined = asked.question, asked.profile, asked.refined
    rows, ruled_out = space(question)
    if not len(rows):
        return Found(question, (), ruled_out, 0, 0)
    form, most = ClosedForm(question, profile), max(TRIED, refined)
    priced = shortlist(form, rows, most, asked.capacity)
    best, simulated, out = _simulated(asked, priced, _fastest(priced, asked.capacity, most))
    if not best:
        if priced.slower:
            priced = shortlist(form, rows, maxsize, asked.capacity)
        order = _smallest(priced, asked.capacity, most)
        best, simulated, others = _simulated(asked, priced, order)
        out.update(others)
    best = _widened(asked, _cut_by_time(asked, form.tables, best[:BEST]))
    out[TOO_LARGE] += int((~priced.fitting(asked.capacity)).sum())
    out[SLOWER] += priced.slower
    out.update(ruled_out)
    return Found(question, tuple(best), +out, len(priced.rows), simulated)


class _Asked(NamedTuple):
    """What `search` is asked."""

    question: Question
    profile: Profile
    capacity: float
    refined: int
    refuse: Refuse
    watch: Watch


def _fastest(priced: Shortlist, capacity: float, most: int) -> NDArray[np.intp]:
    """The numbers of the fastest layouts that seem to fit, in order."""
    quick = np.flatnonzero(priced.fitting(capacity))
    return quick[np.argsort(priced.closed.seconds[quick], kind="stable")][:most]


def _smallest(priced: Shortlist, capacity: float, most: int) -> NDArray[np.intp]:
    """The numbers of those that take least memory, without the fastest, in order."""
    memory = priced.closed.memory
    small = np.flatnonzero(memory <= capacity * MEMORY_DOUBT)
    small = np.setdiff1d(small, _fastest(priced, capacity, most))
    return small[np.argsort(memory[small], kind="stable")][:TRIED]


def _simulated(
    asked: _Asked, priced: Shortlist, order: NDArray[np.intp]
) -> tuple[list[Choice], int, Counter[str]]:
    """Layouts planned and simulated, one after the other: the best in order, how many there were,
    and why others are none. Of those that did not seem to fit, one less is too large if it does.
    """
    (rows, closed, _), fitting = priced, priced.fitting(asked.capacity)
    simulated, work, best, out = 0, 0, list[Choice](), Counter[str]()
    for number in asked.watch(range(len(order))):
        index = order[number]
        worst = best[BEST - 1].seconds if len(best) >= BEST else np.inf
        if simulated == asked.refined or closed.seconds[index] > worst * TIME_ERROR:
            break
        if worst < np.inf and work > ACTIONS:
            break
        work += int(rows[index]["pp"]) * int(rows[index]["virtual"] * rows[index]["micros"])
        choice = _choice(asked, rows[index])
        if isinstance(choice, str):
            out[choice] += int(fitting[index])
            continue
        out[TOO_LARGE] -= int(not fitting[index])
        simulated += 1
        best = _with(best, choice)
    return best, simulated, out


def room(cluster: Cluster) -> float:
    """Bytes of a device's memory that a run can use."""
    return usable_memory(cluster)


def _with(best: list[Choice], choice: Choice) -> list[Choice]:
    """The choices with one more, in order. Of layouts that take the same time and memory, such as
    those that recompute what is not kept anyway, the one with the shorter spelling is kept.
    """
    every = sorted([*best, choice], key=lambda one: (one.seconds, one.peak, one.spelled))
    return [*{(one.seconds, one.peak): one for one in reversed(every)}.values()][::-1]


def _choice(asked: _Asked, row: np.void) -> Choice | str:
    """A layout planned and simulated; why not, if it does not fit or is no answer."""
    question, capacity = asked.question, asked.capacity
    layout, most, least = layout_of(row), float("inf"), int(row["blocks"])
    enough = int(blocks_of(question, row))
    for blocks in range(least, min(least + TRIES, enough)) if least else [None]:
        plan = question.plan(replace(layout, recompute_blocks=blocks), int(row["micro_batch"]))
        if (most := taken(plan, capacity)) <= capacity:
            break
    return _judged(asked, plan, int(most))


def _judged(asked: _Asked, plan: Plan, most: int) -> Choice | str:
    """A plan simulated whose fullest device holds `most` bytes; why not, if it is no answer."""
    question = asked.question
    if not question.planned and question.only_planned(plan.layout):
        return PLANNED
    if most > asked.capacity:
        return TOO_LARGE
    if choice_misfits(plan):
        return WRONG_COMM
    if reason := asked.refuse(plan) or homeless(plan, question.cluster):
        return reason
    return Choice(plan, step_time(plan, question.cluster, asked.profile), most, asked.capacity)


def _cut_by_time(asked: _Asked, tables: PartTables, best: list[Choice]) -> list[Choice]:
    """The choices in order, each with stages of equal seconds if that makes it faster."""
    found = list[Choice]()
    for choice in best:
        layout, other = cut_by_time(tables, choice.plan), choice
        if layout:
            plan = asked.question.plan(layout, choice.plan.micro_batch)
            cut = _judged(asked, plan, taken(plan, asked.capacity))
            if isinstance(cut, Choice) and cut.seconds < choice.seconds * (1 - GAIN):
                other = cut
        found = _with(found, other)
    return found


def _widened(asked: _Asked, best: list[Choice]) -> list[Choice]:
    """The choices in order, each with a wider window of weights if that makes it faster."""
    found = list[Choice]()
    for choice in best:
        plan, other = choice.plan, None
        if has_window(plan.layout):
            machines, capacity = asked.question.cluster, asked.capacity
            other = wider(plan, machines, asked.profile, capacity=capacity)
        found = _with(found, Choice(*other, choice.capacity) if other else choice)
    return found


def taken(plan: Plan, capacity: float) -> int:
    """Bytes of the device that holds most; of a device that holds more than `capacity`, if there
    is one.
    """
    kernels, most = kernels_of(plan), 0
    for rank in axis(plan.layout, "pp").group(0):
        most = max(most, peak(memory(plan, rank, kernels)))
        if most > capacity:
            break
    return most


def homeless(plan: Plan, cluster: Cluster) -> str:
    """Why a node has no room for what its devices keep elsewhere; empty if it has. What is kept of
    states alone is quickly told, and rules most layouts out.
    """
    found = _too_small(plan, cluster, partial(kept_states, plan)) or home_of(plan, cluster)
    return f"more memory than the {found[0]} of a node has" if found else ""


def home_of(plan: Plan, cluster: Cluster) -> tuple[Home, float, float] | None:
    """The first home that is too small for what the devices of a node keep there, the bytes that
    all of them keep, and those that there are; None if none is too small.

    Where the host's memory is the device's, the devices keep both in it.
    """
    return _too_small(plan, cluster, partial(memory, plan, kernels=kernels_of(plan)))


def _too_small(
    plan: Plan, cluster: Cluster, held_by: Callable[[int], list[Held]]
) -> tuple[Home, float, float] | None:
    """The first home that is too small for what `held_by` says of each rank, as `home_of`."""
    if homes(plan.layout) == {"device"}:
        return None
    host, number = cluster.host, min(cluster.devices_per_node, plan.layout.world)
    one, usable = shared(cluster), number * usable_memory(cluster)
    memory_there = min(host.memory, usable) if one else host.memory
    there: dict[Home, float] = {"host": memory_there, "disk": host.disk}
    stages = axis(plan.layout, "pp")
    held = [held_by(rank) for rank in stages.group(0)]  # of a rank of each stage
    for home, most in there.items():
        kept = [float(peak(rows, home)) for rows in held]
        if one and home == "host":
            kept = [each and each + peak(rows) for each, rows in zip(kept, held, strict=True)]
        for first in range(0, plan.layout.world, number):
            node = range(first, min(first + number, plan.layout.world))
            if (all_kept := sum(kept[stages.index_of(rank)] for rank in node)) > most:
                return home, all_kept, most
    return None


def shared(cluster: Cluster) -> bool:
    """Whether the host's memory is the device's."""
    return cluster.host.link.name == "shared"


# -- other questions -------------------------------------------------------------------


def sizes(cluster: Cluster, least: int, most: int) -> list[int]:
    """Numbers of devices between two bounds that a kind of cluster comes in: parts of a node, and
    1, 2, 3, 4, 6, 8, 12, … nodes, or each number of nodes where these are few; both bounds
    themselves.
    """
    node = cluster.devices_per_node
    steps = {part << n for part in (1, 3) for n in range(21)}
    if most - least <= FEW * node:
        steps |= {*range(least // node, most // node + 1)}
    wanted = {least, most, *(n for n in steps if n < node), *(node * n for n in steps)}
    if isinstance(cluster.network, Grid):
        wanted = {int(np.prod(dims)) for dims in (*cluster.network.slices, cluster.network.dims)}
    return [n for n in sorted(wanted) if least <= n <= most and _exists(cluster, n)]


def _exists(cluster: Cluster, devices: int) -> bool:
    try:
        resized(cluster, devices)
    except UserError:
        return False
    return True


def on_each(
    question: Question, devices: Sequence[int], profile: Profile | None, watch: Watch
) -> Iterator[Found]:
    """The answers on each of several numbers of devices."""
    for count in watch(devices):
        other = replace(question, cluster=resized(question.cluster, count))
        yield search(other, profile, refined=BEST)


def pareto(found: Iterable[Found]) -> list[Choice]:
    """The fastest layout for each number of devices, without those that more devices do not make
    faster; the fewest devices first.
    """
    kept: list[Choice] = []
    for one in found:
        if one.best and (not kept or one.best[0].seconds < kept[-1].seconds):
            kept.append(one.best[0])
    return kept
