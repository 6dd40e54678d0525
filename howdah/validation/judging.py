"""Predicted times beside published ones: errors by source, order inside sweeps, what is refused.

The error of a prediction is |ln(predicted / published)| in percent; that of a refused row is 100.
A row that does not say its model, device, layout, batch or time is left out, and has no error.

    m0   as predicted
    m1   in each (source, device, framework) the row with the smallest id gives a factor for the
         others, and is not scored
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import log
from statistics import mean
from typing import Literal

from howdah.base.errors import UserError
from howdah.plan.plan import Plan
from howdah.sim.profile import Profile, profile_of
from howdah.sim.step_time import step_time
from howdah.validation.plans import UNSTATED, Answer, answer
from howdah.validation.rows import Row

Mode = Literal["m0", "m1"]
Predict = Callable[[Answer], float]
REFUSED = 100.0  # percent
# The part of one row's error that another row of its cluster and framework has too: the factor of
# m1 has it as its exponent. Where nothing was fitted to the publisher (bench/planner/left_out.py),
# one exponent is best between 0.5 and 0.6, rows of the same model share more, and a model with
# experts says nothing of one without.
SHARED = 0.5
SAME_MODEL = 0.2
SWEEP = 3  # fewest layouts that have an order


@dataclass(frozen=True)
class Judged:
    """One row: seconds of a step, predicted and published, or why there is no prediction.

    answer      the row as a plan; None where there is none
    predicted   0 without a prediction
    reason      why there is none; empty where there is
    calibrates  the row gives the factor of m1
    """

    row: Row
    answer: Answer | None
    published: float
    predicted: float = 0.0
    reason: str = ""
    calibrates: bool = False

    @property
    def error(self) -> float | None:
        """Percent; None for a row that is not scored."""
        if self.calibrates or (self.answer is None and UNSTATED.search(self.reason)):
            return None
        return 100 * abs(log(self.predicted / self.published)) if self.predicted else REFUSED


def predicted_seconds(answer: Answer) -> float:
    """Seconds of a step of the answer's plan; of one of its blocks where the row is about one."""
    return seconds_of(answer, profile_of(answer.framework))


def seconds_of(answer: Answer, profile: Profile) -> float:
    """Seconds as of `predicted_seconds`, under a profile."""
    if answer.flash != bool(profile.flash):
        profile = replace(profile, flash=2 * answer.flash)
    found = step_time(answer.plan, answer.cluster, profile)
    if answer.fewer is None:
        return found.seconds
    less = step_time(answer.fewer, answer.cluster, profile)
    updates = (one.breakdown.get("update", 0.0) for one in (found, less))
    return found.seconds - less.seconds - next(updates) + next(updates)


def judge(
    rows: Iterable[Row], mode: Mode = "m0", predict: Predict = predicted_seconds
) -> list[Judged]:
    """Every row of quality A or B beside its prediction, in the order of the file."""
    judged = [_judged(row, predict) for row in rows if row["quality"][:1] in ("", "A", "B")]
    return calibrated(judged) if mode == "m1" else judged


def _judged(row: Row, predict: Predict) -> Judged:
    found = answer(row)
    if isinstance(found, str):
        return Judged(row, None, 0.0, reason=found)
    try:
        return Judged(row, found, found.published, predict(found))
    except (UserError, ArithmeticError, ValueError) as problem:
        return Judged(row, found, found.published, reason=f"refused: {problem}")


def calibrated(judged: Sequence[Judged]) -> list[Judged]:
    """The judged rows with the factors of m1."""
    first: dict[tuple[str, ...], Judged] = {}
    for one in judged:
        if one.predicted:
            first[group(one)] = min(first.get(group(one), one), one, key=_number)
    found = []
    for one in judged:
        known = first.get(group(one))
        factor = (known.published / known.predicted) ** _shared(known, one) if known else 1.0
        found.append(replace(one, predicted=one.predicted * factor, calibrates=one is known))
    return found


def _shared(known: Judged, one: Judged) -> float:
    """The part of the error of `known` that `one` has too."""
    if known.answer is None or one.answer is None:
        return 0.0
    kinds = {each.answer.plan.shape.experts is None for each in (known, one) if each.answer}
    same = known.row["model"] == one.row["model"]
    return SHARED + SAME_MODEL * same if len(kinds) == 1 else 0.0


def group(one: Judged) -> tuple[str, ...]:
    """What one factor of m1 is for."""
    return one.row["source"], one.row["gpu"], one.row["framework"]


def _number(one: Judged) -> tuple[int, str]:
    numbers = re.findall(r"\d+", one.row["id"])
    return int(numbers[-1]) if numbers else 0, one.row["id"]


# -- errors --------------------------------------------------------------------


def by_source(judged: Iterable[Judged]) -> dict[str, list[float]]:
    """The errors of the scored rows of each source, in percent."""
    found: dict[str, list[float]] = defaultdict(list)
    for one in judged:
        if (error := one.error) is not None:
            found[one.row["source"]].append(error)
    return dict(found)


def mean_over_sources(judged: Iterable[Judged]) -> float:
    """The mean over sources of the mean of their errors; 0 without any."""
    means = [mean(errors) for errors in by_source(judged).values()]
    return mean(means) if means else 0.0


def refused(judged: Iterable[Judged]) -> Counter[tuple[str, bool]]:
    """How often each reason leaves rows without a prediction, and whether that is scored."""
    return Counter((one.reason, one.error is not None) for one in judged if one.reason)


# -- sweeps --------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """Layouts of one model on the same devices with the same batch.

    tau     Kendall's tau-b between predicted and published times
    regret  how much longer the layout with the least predicted time takes than the best, percent
    """

    source: str
    model: str
    rows: int
    tau: float
    regret: float


def sweeps(judged: Iterable[Judged]) -> list[Sweep]:
    """The sweeps among predicted rows: at least three rows, not all of one layout."""
    found: dict[tuple[str, ...], list[Judged]] = defaultdict(list)
    layouts: dict[tuple[str, ...], set[tuple[str, int]]] = defaultdict(set)
    for one in judged:
        if one.predicted and one.answer:
            key, plan = _sweep(one.row, one.answer.plan), one.answer.plan
            found[key].append(one)
            layouts[key].add((str(plan.layout), plan.micro_batch))
    return [
        _ordered(ones)
        for key, ones in found.items()
        if len(ones) >= SWEEP and len(layouts[key]) > 1
    ]


def _sweep(row: Row, plan: Plan) -> tuple[str, ...]:
    columns = ("source", "framework", "model", "gpu", "precision")
    sizes = plan.shape.layers, plan.shape.width, plan.shape.heads, plan.sequence
    total = plan.layout.world, plan.batch.global_batch
    return *(row[name] for name in columns), str(sizes), str(total)


def _ordered(ones: Sequence[Judged]) -> Sweep:
    pick = min(ones, key=lambda one: one.predicted)
    best = min(one.published for one in ones)
    pairs = [(one.predicted, one.published) for one in ones]
    return Sweep(
        ones[0].row["source"],
        ones[0].row["model"],
        len(ones),
        kendall(pairs),
        100 * (pick.published / best - 1),
    )


def kendall(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau-b of (predicted, published) pairs; 0 where one of them is all equal."""
    agree, left, right = 0, 0, 0
    for (a, b), (c, d) in combinations(pairs, 2):
        first, second = (a > c) - (a < c), (b > d) - (b < d)
        agree, left, right = agree + first * second, left + abs(first), right + abs(second)
    return float(agree / (left * right) ** 0.5) if left and right else 0.0
