"""From seconds that were measured to the values of a profile: pure functions.

The simulator computes a time as a sum: so many operations at a speed, so many bytes at a bandwidth,
and seconds that the host needs. Here each term is asked of the simulator itself, with one value set
to 1 and the others to 0, and the values are those whose sum comes nearest to what was measured:

    seconds of a block  =  its products  +  forward · 1  +  stream · (bytes / bandwidth)  +  …

The distance is relative, so that a short time counts as much as a long one, and no value is
negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from howdah.machines.cluster import Cluster, Link
from howdah.plan.plan import Plan
from howdah.shapes.part import Part
from howdah.sim.operator_times import Speeds
from howdah.sim.part_times import PartTimes, part_times
from howdah.sim.profile import Kernel, Profile
from howdah.sim.step_time import step_time

Numbers = NDArray[np.float64]
HEAD = Part("head")
EVERY = Link("every message", 1e30, 0.0)
NOTHING = 1e-12  # seconds: a column of a term that does not occur
KINDS = ("stream", "activation", "heads")  # of passes over memory in a block
# A profile in which nothing takes time but what it is given.
EMPTY = Profile(name="here", stream=0.0, adds=True, pp=False, overlap=False, gather=False)
EMPTY = replace(EMPTY, again=1.0, update=0.0, straggling=0.0)


@dataclass(frozen=True)
class Sized:
    """Seconds of the phases of an operation, and its sizes: operations, rows, inner, columns."""

    sizes: tuple[float, float, float, float]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class PartsOfModel:
    """Seconds of a micro-batch's forward and backward pass through the parts of a model."""

    plan: Plan
    embedding: tuple[float, float]
    block: tuple[float, float]
    head: tuple[float, float]


@dataclass(frozen=True)
class StepsOfModel:
    """Seconds of a whole step of a plan."""

    plan: Plan
    seconds: float


def nonnegative(
    terms: Sequence[Sequence[float]],
    seconds: Sequence[float],
    whole: Sequence[float] | None = None,
) -> list[float]:
    """The weights of the terms, none below 0, whose sums are nearest to `seconds`.

    terms  of each, its size in each measurement
    whole  seconds of which these are a part: a mistake counts by its share of them
    """
    scale = np.array(seconds if whole is None else whole, float)
    wanted, table = np.array(seconds, float) / scale, np.array(terms, float) / scale
    largest = np.abs(table).max(axis=1)
    chosen = [one for one, most in enumerate(largest) if most > 0]
    found = np.zeros(len(table))
    while chosen:
        scaled = table[chosen] / largest[chosen, None]
        weights = np.linalg.lstsq(scaled.T, wanted, rcond=None)[0]
        if (weights >= 0).all():
            found[chosen] = weights / largest[chosen]
            break
        del chosen[int(weights.argmin())]
    return [float(one) for one in found]


def kernel_of(measured: Sequence[Sized], phase: int) -> Kernel:
    """The kernel of one phase of products, from products of several sizes."""
    seconds = [one.seconds[phase] for one in measured]
    work, rows, inner, columns = (
        list(each) for each in zip(*(m.sizes for m in measured), strict=True)
    )
    terms = [[1.0] * len(work), work]
    terms += [[w / s for w, s in zip(work, size, strict=True)] for size in (rows, columns, inner)]
    start, once, m, n, k = nonnegative(terms, seconds)
    once = once or min(s / w for s, w in zip(seconds, work, strict=True))
    return Kernel(start, 1 / once, m / once, n / once, k / once)


# -- passes over memory, and the host ------------------------------------------------


class Fit:
    """Fits the values of one precision on a cluster, step by step, into `profile`."""

    def __init__(self, cluster: Cluster, profile: Profile) -> None:
        self.cluster, self.profile = cluster, profile

    def _part(self, plan: Plan, part: Part, profile: Profile) -> PartTimes:
        speeds = Speeds(self.cluster, self.cluster, plan.method, profile)
        return part_times(plan, speeds, 0, {}, profile)[0][part]

    def _touch(self, plan: Plan, part: Part, **values: Any) -> float:
        return self._part(plan, part, replace(EMPTY, **values)).touch

    def blocks(self, measured: Sequence[PartsOfModel]) -> None:
        """Passes of a block, and what the host adds to it."""
        first = Part("layers", 0)
        products = [self._part(one.plan, first, self.profile).products for one in measured]
        ones, ahead = [1.0] * len(measured), [one.block[0] for one in measured]
        passes = [[self._touch(m.plan, first, **{k: 1.0}) for m in measured] for k in KINDS]
        rest = [max(t - p.forward, 0.0) for t, p in zip(ahead, products, strict=True)]
        host, *counts = nonnegative([ones, *passes], rest, ahead)
        values: dict[str, Any] = dict(zip(KINDS, counts, strict=True))
        touch = [self._touch(one.plan, first, **values) for one in measured]
        back = [one.block[1] for one in measured]
        rest = [max(t - p.input - p.weight, 0.0) for t, p in zip(back, products, strict=True)]
        host_back, again = nonnegative([ones, touch], rest, back)
        self.profile = replace(
            self.profile, forward=host, backward=host_back, again=again, **values
        )

    def ends(self, measured: Sequence[PartsOfModel]) -> None:
        """Passes over logits, the stream and the table of the embedding; what the host adds."""
        logits = [self._touch(one.plan, HEAD, logits=1.0, loss=1.0) for one in measured]
        stream = [self._touch(one.plan, HEAD, norm=1.0, loss=1.0) for one in measured]
        products = [self._part(one.plan, HEAD, self.profile).products for one in measured]
        rows = [4.0 * one.plan.shape.vocab * one.plan.shape.width for one in measured]
        table = [each / self.cluster.device.bandwidth for each in rows]
        ahead, back = ([one.head[way] for one in measured] for way in (0, 1))
        rest = [max(t - p.forward, 0.0) for t, p in zip(ahead, products, strict=True)]
        ones, none = [1.0] * len(rest), [0.0] * len(rest)
        looked = [one.embedding[0] for one in measured]
        terms = [ones * 2, logits + none, stream + none]
        host, first, norm = nonnegative(terms, rest + looked, ahead + looked)
        known = [p.input + p.weight for p in products]
        known = [k + self.profile.again * norm * s for k, s in zip(known, stream, strict=True)]
        rest = [max(t - k, 0.0) for t, k in zip(back, known, strict=True)]
        looked = [one.embedding[1] for one in measured]
        terms = [ones * 2, logits + none, none + table]
        host_back, then, found = nonnegative(terms, rest + looked, back + looked)
        both = first + then or 1.0
        self.profile = replace(
            self.profile,
            end_forward=host,
            end_backward=host_back,
            logits=both,
            loss=max(first / both, NOTHING),
            norm=norm,
            table=found,
        )

    def steps(self, measured: Sequence[StepsOfModel]) -> None:
        """What a step takes besides its passes, and what each pass takes besides its parts."""
        bare = replace(self.profile, update=0.0, action=0.0, step=0.0)
        passes = [step_time(one.plan, self.cluster, bare).seconds for one in measured]
        updates = replace(EMPTY, update=1.0)
        alone = [step_time(one.plan, self.cluster, updates) for one in measured]
        touched = [one.breakdown["update"] for one in alone]
        rest = [max(one.seconds - known, 0.0) for one, known in zip(measured, passes, strict=True)]
        actions = [2.0 * one.plan.micros for one in measured]
        terms = [[1.0] * len(rest), actions, touched]
        step, action, update = nonnegative(terms, rest, [one.seconds for one in measured])
        self.profile = replace(self.profile, step=step, action=action, update=update)

    def together(self, measured: Sequence[tuple[StepsOfModel, StepsOfModel]]) -> None:
        """What ranks lose where they wait for each other: for each message, and in all.

        The fit's cluster has as many devices as ranks, with their links.

        measured  steps of a model on all ranks, and those of each rank alone with such a model. By
                  how much these are longer than predicted, all are: that is no loss. A mistake
                  counts by its seconds: what is lost in a long step is known better
        """
        known = replace(self.profile, meet=0.0, uneven=0.0)
        alone = [self._unlost(one.plan, each, known) for one, each in measured]
        shared = [one for one, _ in measured]
        free = replace(self.cluster, inside=EVERY, between=EVERY)
        once = replace(EMPTY, waits=known.waits, crowd=known.crowd, meet=1.0)
        messages = [step_time(one.plan, free, once).seconds for one in shared]
        rest = [max(one.seconds - least, 0.0) for one, least in zip(shared, alone, strict=True)]
        longest = max(one.seconds for one in shared)
        meet, uneven = nonnegative([messages, alone], rest, [longest] * len(shared))
        self.profile = replace(self.profile, meet=meet, uneven=uneven)

    def _unlost(self, plan: Plan, alone: StepsOfModel, profile: Profile) -> float:
        """Seconds of a step of ranks that lose nothing."""
        one = replace(self.cluster, devices_per_node=1, nodes=1)
        as_predicted = alone.seconds / step_time(alone.plan, one, profile).seconds
        return as_predicted * step_time(plan, self.cluster, profile).seconds
