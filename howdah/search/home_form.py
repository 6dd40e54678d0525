"""Homes by closed form: what moves beside the passes, and in the update, of many layouts at once.

The bytes are those of `plan/homes.py`, for one element; all are proportional. In the passes:

    forward    | embedding | layers.0 | layers.1 | head ┐    each unit hides the fetch of the next
    backward               | layers.0 | layers.1 | head ┘    one; gradients go beside, lane by lane
    activations            of a block go beside the next block's forward pass, and come likewise

    ahead      Σ max(its forward, the fetch of the next, what the last one keeps goes); of a stage
               the last block's activations go beside nothing
    back       likewise, and no micro-batch is shorter than all that a lane moves for it
    left       the gradients of the last two units go when all is computed
    update     the lane that moves most, or the arithmetic; and the first unit comes, the last goes
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from howdah.plan.homes import Move, states_away, unit_moves
from howdah.plan.layout import Layout
from howdah.search.part_tables import Numbers, PartTables
from howdah.search.space import HOMES
from howdah.sim.home_times import LANES, lane_of, lane_speeds, update_bandwidth


class Held(NamedTuple):
    """Of layouts with the same stages.

    home     numbers of their homes [layout]
    micros   their micro-batches [layout]
    of_rank  parts of each kind on a rank [rank, kind]
    seconds  [forward, backward, input half, weight half; kind, layout]
    own      elements of a part that a rank updates [kind, layout]
    tied     of these, those of a tied embedding, which both ends have [layout]
    stages   whether each has blocks [stage]
    where    its rank [stage]
    kept     bytes of activations of a part [kind, layout]
    """

    home: Numbers
    micros: Numbers
    of_rank: Numbers
    seconds: Numbers
    own: Numbers
    tied: Numbers
    stages: Numbers
    where: Numbers
    kept: Numbers


class _Lanes(NamedTuple):
    """Seconds of an element on each lane [lane, layout]; of a byte of activations.

    weights     whenever a unit is used
    gradients   of a micro-batch
    norm        once, before the update
    comes       before a unit is updated
    goes        behind it
    goes_kept   activations, behind a block's forward pass
    comes_kept  ahead of its backward pass
    """

    weights: Numbers
    gradients: Numbers
    norm: Numbers
    comes: Numbers
    goes: Numbers
    goes_kept: Numbers
    comes_kept: Numbers


class HomeForm:
    """The closed form of layouts some of which keep states or activations off the device."""

    def __init__(self, tables: PartTables, held: Held) -> None:
        self.held, self.away = held, held.home > 0
        away = [states_away(Layout(**one)) for one in HOMES]  # type: ignore[arg-type]
        self.states = np.array(away)[held.home]
        self.bandwidth = update_bandwidth(tables.counted)
        self.device = tables.speeds.bandwidth
        self.lanes = _lanes(tables, held)
        kinds = [str(part) for part in tables.kinds]
        self.ends = [kinds.index("embedding"), kinds.index("head")]
        self.blocks = tables.blocks
        self.block = np.flatnonzero(self.blocks)[-1]
        fetched = held.own[:, None] * self.lanes.weights  # [kind, lane, layout]
        kept = (held.kept * self.blocks[:, None])[:, None]
        self.goes, self.comes = kept * self.lanes.goes_kept, kept * self.lanes.comes_kept
        self.ahead_of = (fetched[self.block] + self.goes).max(1)  # [kind, layout]
        self.back_of = (fetched[self.block] + self.comes).max(1)
        fetched = fetched.sum(1)  # on one lane
        self.one = fetched[self.block], fetched[self.ends[0]], fetched[self.ends[1]]
        ranks = range(len(held.of_rank))
        self.passes = np.array([held.stages[held.where == rank].sum() for rank in ranks])[:, None]

    def ahead(self, seconds: Numbers) -> Numbers:
        """Seconds of forward passes, by rank, that take `seconds` without homes."""
        block, _, head = self.one
        first, last = (self.held.of_rank[:, end][:, None] for end in self.ends)
        forward = self.held.seconds[0]
        found = self._blocks(forward, self.ahead_of, self.goes)
        found += first * np.maximum(forward[self.ends[0]], block)
        found += last * (forward[self.ends[1]] + (head - block).clip(0))
        return np.where(self.away, np.maximum(seconds, found), seconds)

    def back(self, ahead: Numbers, seconds: Numbers) -> Numbers:
        """Seconds of backward passes, likewise; forward passes take `ahead`."""
        block, embedding, _ = self.one
        first, last = (self.held.of_rank[:, end][:, None] for end in self.ends)
        forward, backward = self.held.seconds[:2]
        head = backward[self.ends[1]]
        found = self._blocks(backward, self.back_of, self.comes)
        found += last * (head + (block - forward[self.ends[1]] - head).clip(0))
        found += first * (backward[self.ends[0]] + (embedding - block).clip(0))
        found = np.maximum(seconds, found)
        lane = self._micro_batch().max(0) - ahead
        return np.where(self.away, np.maximum(found, lane), seconds)

    def left(self, ahead: Numbers, back: Numbers) -> Numbers:
        """Seconds besides, where the passes of a micro-batch take `ahead` and `back`: gradients of
        the last units go when all is computed, and the first unit's weights come before. A link
        that is never idle is so from the first gradient on.
        """
        held = self.held
        goes = held.own[:, None] * self.lanes.gradients
        block = goes[np.flatnonzero(self.blocks)[-1]].sum(0)
        first = held.of_rank[:, self.ends[0]][:, None]
        tail = block + first * (goes[self.ends[0]].sum(0) + self.one[1])
        busy = self._micro_batch()[LANES.index("evict")] >= (ahead + back) * (1 - 1e-9)
        return np.where(self.away, np.where(busy, ahead + first * self.one[1], tail), 0.0)

    def update(self, seconds: Numbers, element: float) -> Numbers:
        """Seconds of updates, by rank, that take `seconds` on the device, of which one element
        takes `element` bytes.
        """
        lanes, own = self.lanes, self._own()
        each = element / self.bandwidth
        last = self.held.own[self.ends[1]]
        first = self.held.own[self.ends[0]]
        comes, goes = (one.sum(0) for one in (lanes.comes, lanes.goes))
        ends = first * comes + last * goes
        busy = (own * (lanes.comes + lanes.goes)[:, None]).max(0)
        disk = lanes.goes[LANES.index("disk")] > 0  # that writes while the last is updated
        found = np.maximum(own * each + ends, busy + last * (each + np.where(disk, 0.0, goes)))
        found += (own * lanes.norm[:, None]).sum(0)
        return np.where(self.states, found, seconds)

    def _blocks(self, seconds: Numbers, beside: Numbers, kept: Numbers) -> Numbers:
        """Seconds of the blocks of each rank, each of which hides what moves beside it; the
        activations of one block of each stage move alone (`kept`).
        """
        counts = self.held.of_rank * self.blocks
        kinds = range(counts.shape[1])
        found = sum(counts[:, n, None] * np.maximum(seconds[n], beside[n]) for n in kinds)
        return found + self.passes * np.minimum(kept[self.block].sum(0), seconds[self.block])

    def _own(self) -> Numbers:
        """Elements that each rank updates [rank, layout]."""
        held = self.held
        own = sum(held.of_rank[:, n, None] * held.own[n] for n in range(len(held.own)))
        both = held.of_rank[:, self.ends].prod(1)[:, None]
        return own - both * held.tied

    def _micro_batch(self) -> Numbers:
        """Seconds of all that each lane moves for a micro-batch [lane, rank, layout]."""
        held, lanes = self.held, self.lanes
        blocks, kinds = np.where(self.blocks, 2, 1), range(len(held.own))
        uses = sum((held.of_rank * blocks)[:, n, None] * held.own[n] for n in kinds)
        kept = self.goes + self.comes  # [kind, lane, layout]; weights of the ends are used once
        moved = sum(held.of_rank[:, n, None] * kept[n][:, None] for n in kinds)
        return uses * lanes.weights[:, None] + self._own() * lanes.gradients[:, None] + moved


def _lanes(tables: PartTables, held: Held) -> _Lanes:
    speed = lane_speeds(tables.formats, tables.counted)
    found = {name: np.zeros((len(LANES), len(HOMES), 2)) for name in _Lanes._fields}
    for number, home in enumerate(HOMES):
        plan = tables.formats
        plan = replace(plan, layout=replace(plan.layout, **home))  # type: ignore[arg-type]
        if (kept := plan.layout.activations) != "device":
            for name, way in (("goes_kept", "evict"), ("comes_kept", "fetch")):
                lane = "disk" if kept == "disk" else way
                found[name][LANES.index(lane), number] = 1 / speed[lane]
        for micros in (1, 2) if states_away(plan.layout) else ():
            for name, move in _named(unit_moves(plan, 1, gathers=1, micros=micros)):
                lane = lane_of(move)
                seconds = move.bytes * move.times / speed[lane]
                found[name][LANES.index(lane), number, micros - 1] += seconds
    each = {}
    for name, (once, twice) in ((name, np.moveaxis(one, -1, 0)) for name, one in found.items()):
        grows = (twice - once)[:, held.home]
        whole = once[:, held.home] + grows * (held.micros - 1)
        each[name] = whole / held.micros if name == "gradients" else whole
    return _Lanes(**each)


def _named(every: Iterator[Move]) -> Iterator[tuple[str, Move]]:
    """Moves of the update, and of the passes, by the field that counts them."""
    for move in every:
        if move.when == "passes":
            yield move.what, move
        elif move.when == "norm":
            yield "norm", move
        else:
            goes = move.what == "weights" or (move.what, move.way) == ("optimizer", "evict")
            yield "goes" if goes else "comes", move
