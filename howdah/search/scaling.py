"""How small a cluster may be for a model, and how large a model for a cluster.

    fits      whether any layout fits, by memory alone, of devices and of homes: no step is priced
    fewest    the fewest devices, among the sizes of a cluster
    largest   the largest model of a kind: a shape whose width and depth grow in proportion
    in_each   the best layouts in several precisions

A shape grows by its groups of heads, whose size stays. Between two widths it grows by its layers,
until it is as large as the next width in the proportions of the shape:

    groups of heads    8                    10                   12
    layers             32 33 ...        62  40 41 ...        69  48
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import gcd

import numpy as np

from howdah.base.errors import UserError
from howdah.machines.cluster import Grid, resized
from howdah.plan.chosen_blocks import MOST_LAYERS
from howdah.plan.method import Precision
from howdah.search.closed_form import ClosedForm
from howdah.search.notes import usual_batch
from howdah.search.part_tables import Numbers
from howdah.search.search import (
    BEST,
    MEMORY_DOUBT,
    Found,
    Watch,
    homeless,
    room,
    search,
    sizes,
    taken,
)
from howdah.search.space import Question, Rows, layout_of, space, states
from howdah.shapes.check import check_shape
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import PRESETS
from howdah.shapes.shape import ModelShape
from howdah.sim.profile import Profile

COUNTED = 20  # layouts with the same homes whose memory is counted exactly: those that take least
BETWEEN = 32  # most sizes that are tried between two
UNITS = 2  # most groups of heads by which a model grows at a time, so that tp2 divides them


def in_each(
    question: Question, precisions: Sequence[Precision], profile: Profile | None, watch: Watch
) -> tuple[Found, list[str]]:
    """The best layouts of a question in some precisions, together; and why some have none.

    Raises UserError, that of the first, if no precision can be asked for.
    """
    every, why = list[Found](), list[UserError]()
    for one in precisions:
        method = replace(question.method, precision=one)
        try:
            every.append(search(replace(question, method=method), profile, watch=watch))
        except UserError as problem:
            why.append(problem)
    if not every:
        raise why[0]
    best = sorted((choice for found in every for choice in found.best), key=lambda c: c.seconds)
    out = sum((found.ruled_out for found in every), Counter[str]())
    counts = (sum(f.priced for f in every), sum(f.simulated for f in every))
    return Found(question, tuple(best[:BEST]), out, *counts), [str(one) for one in why]


def on(question: Question, devices: int) -> Question:
    """The same question on another number of devices."""
    return replace(question, cluster=resized(question.cluster, devices))


def fits(question: Question) -> bool:
    """Whether any layout of a question fits its devices, and the homes of their nodes. Raises
    UserError as `space` does.
    """
    question = replace(question, short=True)
    cluster, capacity = question.cluster, room(question.cluster)
    on_devices = states(question, 0)["device"] <= capacity * cluster.devices
    homes = [*([0] if on_devices else []), *question.homes]
    if not homes:
        return False
    rows, _ = space(question, least=True)
    held = ClosedForm(question, Profile()).memory(rows) if len(rows) else np.zeros(0)
    return any(_fits_in(question, rows, held, capacity, home) for home in homes)


def _fits_in(question: Question, rows: Rows, held: Numbers, capacity: float, home: int) -> bool:
    """Whether one of the layouts with these homes fits, which take `held` bytes of a device by
    closed form: those are tried that take least.
    """
    some = np.flatnonzero((rows["home"] == home) & (held <= capacity * MEMORY_DOUBT))
    for index in some[np.argsort(held[some], kind="stable")][:COUNTED]:
        plan = question.plan(layout_of(rows[index]), int(rows[index]["micro_batch"]))
        if taken(plan, capacity) <= capacity and not homeless(plan, question.cluster):
            return True
    return False


def fewest(
    question: Question,
    profile: Profile | None,
    *,
    meets: Callable[[Found], bool] | None = None,
    watch: Watch = iter,
) -> Found | None:
    """The answer on the fewest devices of a cluster on which anything fits, and `meets` what else
    is wanted; None if there is no such number.
    """
    before = 0

    def good(devices: int) -> bool:
        other = on(question, devices)
        if not fits(other):
            return False
        if meets is None:
            return True
        found = search(other, profile, refined=BEST)
        return bool(found.best) and meets(found)

    for devices in watch(sizes(question.cluster, 1, question.devices)):
        if good(devices):
            least = next(filter(good, _between(question, before, devices)), devices)
            return search(on(question, least), profile)
        before = devices
    return None


def _between(question: Question, low: int, high: int) -> Iterator[int]:
    """Sizes between two: parts of a node, or whole nodes."""
    node = question.cluster.devices_per_node
    step = 1 if high <= node else node
    if not isinstance(question.cluster.network, Grid) and (high - low) // step <= BETWEEN:
        yield from range((low // step + 1) * step, high, step)


# -- the largest model -----------------------------------------------------------------


def scaled(shape: ModelShape, groups: int, layers: int) -> ModelShape:
    """A shape with other numbers of groups of heads and of layers; widths follow the groups."""
    share = groups / shape.k

    def sized(size: int, step: int) -> int:
        return max(round(size * share / step), 1) * step

    width = sized(shape.width, gcd(shape.width, 64))
    inner = sized(shape.ffn_size, gcd(shape.ffn_size, 64))
    heads = shape.heads // shape.k * groups
    kv = None if shape.kv_heads is None else groups
    return replace(shape, layers=layers, width=width, ffn_size=inner, heads=heads, kv_heads=kv)


def largest(question: Question, fit: Callable[[Question], bool] = fits) -> Question | None:
    """The question of the largest model of its shape's kind that fits; None if not even one layer
    does. A larger model is taken to need more memory.
    """
    shape = question.shape
    unit = gcd(shape.k, UNITS)

    def depth(units: int) -> int:
        return max(round(shape.layers * units * unit / shape.k), 1)

    def asked(units: int, layers: int) -> Question:
        return replace(question, shape=scaled(shape, units * unit, layers))

    def good(units: int, layers: int) -> bool:
        other = asked(units, layers)
        return layers <= MOST_LAYERS and not check_shape(other.shape) and fit(other)

    units = _most(1, lambda n: good(n, depth(n)))
    low, high = (depth(units), depth(units) * (1 + 1 / units) ** 3) if units else (1, depth(1))
    layers = _most(low, lambda n: n < high and good(max(units, 1), n))
    return asked(max(units, 1), layers) if layers else None


def _most(least: int, good: Callable[[int], bool]) -> int:
    """The largest number from `least` on that is good, if all smaller ones are; 0 if none is."""
    if not good(least):
        return 0
    low, high = least, 2 * least
    while good(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def largest_preset(question: Question, watch: Watch = iter) -> tuple[str, ModelShape] | None:
    """The largest preset that fits, by its parameters, in steps as published runs have them."""
    by_size = sorted(PRESETS.items(), key=lambda one: -parameters(one[1]).total)
    for number in watch(range(len(by_size))):
        name, shape = by_size[number]
        sequence = min(question.sequence, shape.context)
        batch = usual_batch(shape, sequence)
        other = replace(question, shape=shape, sequence=sequence, global_batch=batch)
        try:
            if fits(other):
                return name, shape
        except UserError:
            continue  # of a precision or length that this model cannot have
    return None
