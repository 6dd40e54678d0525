"""The search: every layout by closed form, the best by simulation.

    1. `space`        lists the layouts that are possible
    2. `closed_form`  gives seconds and bytes of them all, within a few per cent
    3. here           the fastest that seem to fit are planned, their memory counted exactly and
                      their step simulated; the result is the best of these

A layout is refined only if the closed form may err so far that it could be among the best.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from howdah.base.errors import UserError
from howdah.machines.cluster import Cluster, Grid, resized
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.search.closed_form import ClosedForm
from howdah.search.space import Question, layout_of, space
from howdah.sim.memory import memory, peak
from howdah.sim.predict import kernels_of
from howdah.sim.profile import Profile, own_profile
from howdah.sim.step_time import StepTime, step_time

BEST = 10  # layouts of an answer
REFINED = 50  # layouts that are simulated
TRIED = 200  # most that are planned, if their memory turns out not to fit
TIME_ERROR = 1.1  # the closed form is this far off as a rule; tests hold it
MEMORY_ERROR = 1.05
TOO_LARGE = "more memory than a device has"

Watch = Callable[[Sequence[int]], Iterable[int]]  # shows progress over what it is given


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
) -> Found:
    """The best layouts of a question on all of its devices; none if nothing fits.

    profile  of the framework whose time it is; None: howdah
    watch    is given the numbers of what is simulated, and yields them
    refined  layouts that are simulated at most

    Raises UserError if the model, the sequence or the batch is wrong for every layout.
    """
    profile, capacity = profile or own_profile(question.cluster.device), room(question.cluster)
    rows, ruled_out = space(question)
    if not len(rows):
        return Found(question, (), ruled_out, 0, 0)
    closed = ClosedForm(question, profile).price(rows)
    fitting = np.flatnonzero(closed.memory <= capacity * MEMORY_ERROR)
    order = fitting[np.argsort(closed.seconds[fitting], kind="stable")][: max(TRIED, refined)]
    too_large, simulated, best = len(rows) - len(fitting), 0, list[Choice]()
    for number in watch(range(len(order))):
        index = order[number]
        worst = best[BEST - 1].seconds if len(best) >= BEST else np.inf
        if simulated == refined or closed.seconds[index] > worst * TIME_ERROR:
            break
        choice = _choice(question, rows[index], profile, capacity)
        too_large += choice is None
        if choice:
            simulated += 1
            best = sorted([*best, choice], key=lambda one: one.seconds)
    ruled_out[TOO_LARGE] += too_large
    return Found(question, tuple(best[:BEST]), +ruled_out, len(rows), simulated)


def room(cluster: Cluster) -> float:
    """Bytes of a device's memory that a run can use."""
    return cluster.device.memory - cluster.device.reserved


def _choice(question: Question, row: np.void, profile: Profile, capacity: float) -> Choice | None:
    """A layout planned and simulated; None if it does not fit."""
    plan = question.plan(layout_of(row), int(row["micro_batch"]))
    kernels, most = kernels_of(plan), 0
    for rank in axis(plan.layout, "pp").group(0):
        most = max(most, peak(memory(plan, rank, kernels)))
        if most > capacity:
            return None
    return Choice(plan, step_time(plan, question.cluster, profile), most, capacity)


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
