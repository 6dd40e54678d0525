"""The search: every layout by closed form, the best by simulation.

    1. `space`        lists the layouts that are possible
    2. `closed_form`  gives seconds and bytes of them all, within a few per cent
    3. here           the fastest that seem to fit are planned, their memory counted exactly and
                      their step simulated; the result is the best of these

A layout is refined only if the closed form may err so far that it could be among the best. If none
of the fastest fits, those that take least memory are tried: that nothing fits is said of memory
that was counted exactly.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from howdah.base.errors import UserError
from howdah.machines.cluster import Cluster, Grid, resized
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.search.closed_form import Closed, ClosedForm
from howdah.search.part_tables import Numbers
from howdah.search.space import PLANNED, RECOMPUTE, Question, Rows, layout_of, space
from howdah.shapes.weights import parts
from howdah.sim.measured import profile_for
from howdah.sim.memory import memory, peak
from howdah.sim.predict import kernels_of
from howdah.sim.profile import Profile
from howdah.sim.step_time import StepTime, step_time

BEST = 10  # layouts of an answer
REFINED = 50  # layouts that are simulated
TRIED = 200  # most that are planned, if their memory turns out not to fit
TIME_ERROR = 1.1  # the closed form is this far off as a rule; tests hold it
MEMORY_ERROR = 1.05
MEMORY_DOUBT = 1.25  # nothing fits that takes so many times the memory by closed form
ACTIONS = 1 << 18  # forwards that are simulated, once there are BEST layouts: about 20 seconds
TRIES = 4  # numbers of recomputed blocks that are tried
TOO_LARGE = "more memory than a device has"

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
    ruled_out  how many layouts cannot be, by the reason
    priced     layouts whose time the closed form gave
    simulated  layouts whose step was simulated
    """

    question: Question
    best: tuple[Choice, ...]
    ruled_out: Counter[str]
    priced: int
    simulated: int

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
    equal time the one that takes less memory comes first.

    profile  of the framework whose time it is; None: howdah
    watch    is given the numbers of what is simulated, and yields them
    refined  layouts that are simulated at most
    refuse   rules out a layout by its plan

    Raises UserError if the model, the sequence or the batch is wrong for every layout.
    """
    profile, capacity = (
        profile or profile_for(question.cluster, question.method),
        room(question.cluster),
    )
    rows, ruled_out = space(question)
    if not len(rows):
        return Found(question, (), ruled_out, 0, 0)
    rows, closed = _with_blocks(question, rows, ClosedForm(question, profile).price(rows))
    fitting = closed.memory <= capacity * MEMORY_ERROR
    ruled_out[TOO_LARGE] += int((~fitting).sum())
    quick = np.flatnonzero(fitting)
    quick = quick[np.argsort(closed.seconds[quick], kind="stable")][: max(TRIED, refined)]
    small = np.flatnonzero(closed.memory <= capacity * MEMORY_DOUBT)
    small = np.setdiff1d(small, quick)
    small = small[np.argsort(closed.memory[small], kind="stable")][:TRIED]
    simulated, work, best = 0, 0, list[Choice]()
    for order in (quick, small):
        for number in watch(range(len(order))):
            index = order[number]
            worst = best[BEST - 1].seconds if len(best) >= BEST else np.inf
            if simulated == refined or closed.seconds[index] > worst * TIME_ERROR:
                break
            if worst < np.inf and work > ACTIONS:
                break
            work += int(rows[index]["pp"]) * int(rows[index]["virtual"] * rows[index]["micros"])
            choice = _choice(question, rows[index], profile, capacity, refuse)
            if isinstance(choice, str):
                ruled_out[choice] += int(fitting[index])
                continue
            ruled_out[TOO_LARGE] -= int(not fitting[index])
            simulated += 1
            best = _with(best, choice)
        if best:
            break
    return Found(question, tuple(best[:BEST]), +ruled_out, len(rows), simulated)


def _with_blocks(question: Question, rows: Rows, closed: Closed) -> tuple[Rows, Closed]:
    """The layouts, and those in between that recompute as few blocks as memory asks for, where a
    layout fits with all of its blocks recomputed and not with none: time and memory are between
    those of the two.
    """
    capacity, each = room(question.cluster), len(RECOMPUTE)
    seconds, memory = closed.seconds.reshape(-1, each), closed.memory.reshape(-1, each)
    blocks = _blocks(question, rows[::each])
    none, full = memory[:, 0], memory[:, -1]
    some = np.flatnonzero((none > capacity) & (full <= capacity) & (blocks > 1))
    share = ((none - capacity) / (none - full).clip(1))[some]
    count = np.minimum(np.ceil(share * blocks[some]), blocks[some] - 1)
    between = rows[some * each + each - 1]
    between["blocks"] = count
    share = count / blocks[some]
    time = seconds[some, 0] + share * (seconds[some, -1] - seconds[some, 0])
    held = np.minimum(none[some] + share * (full - none)[some], capacity)
    more = Closed(np.append(closed.seconds, time), np.append(closed.memory, held))
    return np.append(rows, between), more


def room(cluster: Cluster) -> float:
    """Bytes of a device's memory that a run can use."""
    return cluster.device.memory - cluster.device.reserved


def _with(best: list[Choice], choice: Choice) -> list[Choice]:
    """The choices with one more, in order. Of layouts that take the same time and memory, such as
    those that recompute what is not kept anyway, the one with the shorter spelling is kept.
    """
    every = sorted([*best, choice], key=lambda one: (one.seconds, one.peak, one.spelled))
    return [*{(one.seconds, one.peak): one for one in reversed(every)}.values()][::-1]


def _choice(
    question: Question, row: np.void, profile: Profile, capacity: float, refuse: Refuse
) -> Choice | str:
    """A layout planned and simulated; why not, if it does not fit or is no answer."""
    layout, most, least = layout_of(row), float("inf"), int(row["blocks"])
    enough = int(_blocks(question, row))
    for blocks in range(least, min(least + TRIES, enough)) if least else [None]:
        plan = question.plan(replace(layout, recompute_blocks=blocks), int(row["micro_batch"]))
        if (most := taken(plan, capacity)) <= capacity:
            break
    if not question.planned and question.only_planned(plan.layout):
        return PLANNED
    if most > capacity:
        return TOO_LARGE
    if reason := refuse(plan) or _homeless(plan, question.cluster):
        return reason
    return Choice(plan, step_time(plan, question.cluster, profile), int(most), capacity)


def _blocks(question: Question, rows: Rows | np.void) -> Numbers:
    """The blocks of the largest stage of layouts."""
    count = sum(part.is_block for part in parts(question.shape))
    return -(-count // (rows["pp"] * rows["virtual"]))


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


def _homeless(plan: Plan, cluster: Cluster) -> str:
    """Why a node has no room for what its devices keep elsewhere; empty if it has."""
    held, host = memory(plan, 0, kernels_of(plan)), cluster.host
    for home, there in (("host", host.memory), ("disk", host.disk)):
        each = sum(row.bytes for row in held if row.home == home)
        if each * cluster.devices_per_node > there:
            return f"more memory than the {home} of a node has"
    return ""


# -- other questions -------------------------------------------------------------------


def sizes(cluster: Cluster, least: int, most: int) -> list[int]:
    """Numbers of devices between two bounds that a kind of cluster comes in: parts of a node, and
    1, 2, 3, 4, 6, 8, 12, … nodes; both bounds themselves.
    """
    node = cluster.devices_per_node
    steps = {part << n for part in (1, 3) for n in range(21)}
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
