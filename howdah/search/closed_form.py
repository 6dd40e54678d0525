"""Time and memory of many layouts at once, by closed form.

    pipeline   with w = F + B of a rank, m micro-batches, p ranks and a message of c between two:
               1f1b      Σ w + 2(p-1)c + (m-1)·period, where no period is shorter than the slowest
                         rank's w, nor than a p-th of the way of a micro-batch there and back
               v stages  m·max w + Σ others' w / v,  no less than the way of one micro-batch
               split     m·max w + what a bubble of (F + I - W) or (F + I - 2W) a rank leaves
    zero2, 3   each pass no shorter than its own sums and gathers; they slow computation down
    sums       of the step: what is left when the last backward pass has ended
    gathers    of zero1 and zero2: what the first forward pass waits for
    update     bytes of a rank's share / bandwidth
    homes      what moves beside the passes, and in the update (`search/home_form.py`)
    memory     states, windows, and as many micro-batches in flight as the schedule holds

The event simulation (`sim/step_time.py`) is the measure; tests hold the two together. Layouts are
taken together that have the same pipeline; arrays are [rank or stage, layout].
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.schedule.registry import SCHEDULES
from howdah.plan.storage import WINDOW
from howdah.search.home_form import Held, HomeForm
from howdah.search.part_tables import Numbers, PartTables, Shape
from howdah.search.space import HOMES, NAMES, Question, Rows, alike
from howdah.sim.memory import BLOCKS, width_of
from howdah.sim.profile import Profile

SHAPE = ("tp", "cp", "ep", "sp", "micro_batch", "recompute", "context")
GROUPS = ("tp", "cp", "ep", "dp", "pp", "shard", "zero")
SPLIT = [name for name, family in SCHEDULES.items() if family.split]


class Closed(NamedTuple):
    """Seconds of a step, and bytes on the fullest device, of each layout."""

    seconds: Numbers
    memory: Numbers


class _Wire(NamedTuple):
    """Of a collective: seconds for each byte of the vector, those of a message, its ranks."""

    byte: Numbers
    message: Numbers
    size: Numbers


def _over_kinds(counts: Numbers, values: Numbers) -> Numbers:
    """Counts [rank, kind] times values [..., kind, layout], over kinds: [..., rank, layout]. Not as
    a product of matrices, whose last digits depend on how many layouts there are.
    """
    kinds = range(counts.shape[1])
    return sum(counts[:, kind, None] * values[..., kind, None, :] for kind in kinds)


class ClosedForm:
    """The closed form for one question, under one profile."""

    def __init__(self, question: Question, profile: Profile) -> None:
        self.question, self.profile = question, profile
        self.tables = PartTables(question, profile)
        self.width = width_of(self.tables.formats)

    def price(self, rows: Rows) -> Closed:
        """Seconds and bytes of layouts."""
        seconds, memory = np.zeros(len(rows)), np.zeros(len(rows))
        for chosen, one in self._pipelines(rows):
            seconds[chosen], memory[chosen] = one.seconds(), one.memory()
        return Closed(self._stepped(seconds), memory)

    def least(self, rows: Rows) -> Numbers:
        """Seconds that no layout with these pipelines and micro-batches goes below, whatever its
        states, homes and recomputation: those of its passes alone.
        """
        seconds = np.zeros(len(rows))
        for chosen, one in self._pipelines(rows):
            seconds[chosen] = one.passes()
        return self._stepped(seconds)

    def _stepped(self, seconds: Numbers) -> Numbers:
        """Seconds of whole steps, with what many nodes lose."""
        nodes = -(-self.question.devices // self.question.cluster.devices_per_node)
        several = self.question.devices > 1
        lost = self.profile.straggling * np.log2(nodes) + self.profile.uneven * several
        return seconds * (1 + lost) + self.profile.step

    def memory(self, rows: Rows) -> Numbers:
        """Bytes of layouts on the fullest device."""
        memory = np.zeros(len(rows))
        for chosen, one in self._pipelines(rows):
            memory[chosen] = one.memory()
        return memory

    def _pipelines(self, rows: Rows) -> Iterator[tuple[NDArray[np.intp], "_Pipeline"]]:
        """The pipelines of layouts, and the numbers of the layouts that have each."""
        names = ["pp", "schedule", "virtual"]
        pipelines, number = alike(rows, names)
        for index, (pp, schedule, virtual) in enumerate(pipelines[names].tolist()):
            chosen = np.flatnonzero(number == index)
            yield chosen, _Pipeline(self, pp, NAMES[schedule], virtual, rows[chosen])


class _Pipeline:
    """Layouts with the same stages and schedule."""

    def __init__(
        self, closed: ClosedForm, pp: int, schedule: str | None, virtual: int, rows: Rows
    ) -> None:
        self.tables, self.profile, self.width = closed.tables, closed.profile, closed.width
        self.pp, self.schedule, self.virtual, self.rows = pp, schedule, virtual, rows
        self.micros, self.zero = rows["micros"].astype(float), rows["zero"]
        self.counts, self.where = self.tables.stages(pp, schedule, virtual)
        self.of_rank = np.stack([self.counts[self.where == rank].sum(0) for rank in range(pp)])
        shapes, number = alike(rows, SHAPE)
        found = [self.tables.parts(Shape(*one)) for one in shapes[[*SHAPE]].tolist()]
        self.part_seconds = np.stack([one.seconds for one in found], -1)[..., number]
        self.kept = np.stack([one.kept for one in found], -1)[..., number]
        self.again = np.stack([one.again for one in found], -1)[..., number]
        self.once = np.array([one.once for one in found])[number]
        self._weigh()
        self._wire()
        away = (rows["home"] > 0).any()
        self.homes = HomeForm(self.tables, self._of_homes()) if away else None

    def _weigh(self) -> None:
        """Elements of each rank, and of its largest units."""
        pairs, number = alike(self.rows, ["tp", "ep"])
        found = [self.tables.weights(*one) for one in pairs[["tp", "ep"]].tolist()]
        self.unit = np.stack([one.dense for one in found], -1)[:, number]
        self.expert_unit = np.stack([one.experts for one in found], -1)[:, number]
        self.tied = np.array([one.tied for one in found])[number]
        self.dense = _over_kinds(self.of_rank, self.unit)
        self.experts = _over_kinds(self.of_rank, self.expert_unit)
        kinds = [str(part) for part in self.tables.kinds]
        ends = self.of_rank[:, [kinds.index("embedding"), kinds.index("head")]]
        self.dense -= ends.prod(1)[:, None] * self.tied  # once, where a rank has both ends
        self.units = self.of_rank.sum(1)[:, None]

    def _of_homes(self) -> Held:
        """What the form of homes is told of each layout."""
        dense, experts = (
            np.where(self.zero > 0, size, 1) for size in (self.shard, self.expert_shard)
        )
        return Held(
            self.rows["home"],
            self.micros,
            self.of_rank,
            self.part_seconds,
            self.unit / dense + self.expert_unit / experts,
            self.tied / dense,
            self.counts @ self.tables.blocks > 0,
            self.where,
            self.kept,
        )

    def _wire(self) -> None:
        """The groups over which states are sharded, and those across their copies."""
        groups, number = alike(self.rows, GROUPS)
        found = []
        for tp, cp, ep, dp, pp, shard, zero in groups[[*GROUPS]].tolist():
            layout = Layout(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, zero=zero, shard=shard or None)
            summed = "reduce_scatter" if zero else "all_reduce"
            row = []
            for inside, outside in (("shard", "across"), ("expert_shard", "expert_across")):
                calls = (inside, "all_gather"), (inside, summed), (outside, "all_reduce")
                for name, operation in calls:
                    group = axis(layout, name)
                    row.append((*self.tables.wire(operation, group), group.size))
            found.append(row)
        table = np.array(found, float)[number]  # [layout, collective, 3]
        wires = [_Wire(*columns) for columns in np.moveaxis(table, 0, -1)]
        self.gathers, self.within, self.across = zip(wires[:3], wires[3:], strict=True)
        self.shard, self.expert_shard = (wire.size for wire in self.gathers)
        rows, question = self.rows, self.tables.question
        tokens = question.sequence / rows["cp"] * rows["micro_batch"]
        tokens = tokens / np.where(rows["sp"] > 0, rows["tp"], 1)
        tensors = 2 if question.shape.family == "encoder-decoder" else 1
        size = tokens * question.shape.width * self.tables.formats.compute_bytes * tensors
        hops = np.array(self.tables.hops(self.pp))[:, :, None]
        self.send = size / hops[:, 0] + hops[:, 1] * tensors  # [rank, layout], to the next rank

    # -- time

    def _passes(self) -> Numbers:
        """Seconds of forward, backward, its input half, its weight half, by rank."""
        return _over_kinds(self.of_rank, self.part_seconds)

    def passes(self) -> Numbers:
        """Seconds of all passes without messages beside them: no more than with them."""
        forward, backward, inner, weight = self._passes()
        if self.schedule in SPLIT:
            return self._split(forward, inner, weight, bound=True)
        return self._whole(forward, backward)

    def seconds(self) -> Numbers:
        """Seconds from the first forward to the end of the update."""
        forward, backward, inner, weight = self._passes()
        (gather, expert_gather), reduce = self._messages()
        each = np.where(self.zero >= 3, gather, 0)
        expert = np.where(self.zero >= 3, expert_gather, 0)
        sums = np.where(self.zero >= 2, reduce[0], 0)
        first = np.where((self.zero == 1) | (self.zero == 2), gather, 0)
        ahead = self._beside(forward, each, 0.0, expert)
        if self.homes:
            ahead = self.homes.ahead(ahead)
        tail = np.minimum(sums * self.virtual / self.units, ahead)  # of each stage's last sum
        if self.virtual > 1 and self.expert_unit.any():
            tail = 0 * tail  # the last block's sums are several, of which one is most of them
        last = self._beside(backward, each, 0.0, expert)
        if self.schedule in SPLIT:
            split = self._beside(inner, each, 0.0, expert), self._beside(weight, sums, tail)
            if self.homes:
                split = self.homes.back(ahead, sum(split)) - split[1], split[1]
            time = self._split(ahead, *split)
            back = sum(split)
            last = split[1]  # its weight gradients come last, those of all stages together
        else:
            back = self._beside(backward, each + sums, tail, expert)
            if self.homes:
                back = self.homes.back(ahead, back)
            time = self._whole(ahead, back)
        late = self._beside(forward, first) - forward
        late = np.where(first > 0, np.maximum(late, first + forward / self.units - forward), 0)
        longest = late.max(0)  # several stages of a rank: ranks gather at once
        ended = time + longest + (late.sum(0) - longest) / self.virtual - self._drain(last)
        left = self._left(last, reduce)
        if self.homes:
            left = left + self.homes.left(ahead, back)
        return (ended + left + self._update()).max(0) + self._tie()

    def _messages(self) -> tuple[tuple[Numbers, Numbers], tuple[Numbers, Numbers]]:
        """Seconds of a rank's gathers of all its weights, and of its experts' alone; of its sums
        within and across copies.
        """
        bytes_of = {"gather": self.width.gathered, "sum": self.tables.formats.sent_gradient_bytes}

        def once(
            wires: tuple[_Wire, _Wire], width: float, parts: tuple[Numbers, Numbers]
        ) -> tuple[Numbers, Numbers]:
            each = []
            for wire, elements, part in zip(wires, (self.dense, self.experts), parts, strict=True):
                units = self.units * (elements > 0) * (wire.size > 1)
                each.append(elements * width / part * wire.byte + units * wire.message)
            return sum(each), each[1]

        gather = once(self.gathers, bytes_of["gather"], (1.0, 1.0))
        within = once(self.within, bytes_of["sum"], (1.0, 1.0))[0]
        shared = (self.shard, self.expert_shard)
        return gather, (within, once(self.across, bytes_of["sum"], shared)[0])

    def _beside(
        self,
        seconds: Numbers,
        messages: Numbers,
        tail: Numbers | float = 0.0,
        experts: Numbers | float = 0.0,
    ) -> Numbers:
        """Seconds of computation with messages beside it, which slow it down; the last of them may
        outlast it by `tail`. Those that gather `experts` run beside one half of a block, the others
        beside the other half.
        """
        if not self.profile.overlap:
            return seconds + messages
        half = (seconds / 2).clip(experts) + seconds / 2
        seconds = np.where(np.asarray(experts) > 0, half, seconds)
        slowed = seconds + messages * (1 - 1 / self.profile.slowdown)
        return np.maximum(messages - tail, slowed)

    def _whole(self, ahead: Numbers, back: Numbers) -> Numbers:
        """Seconds of all passes of 1f1b and interleaved."""
        p, v, m, work = self.pp, self.virtual, self.micros, ahead + back
        slowest, between = work.max(0), self.send[:-1]
        if v == 1:
            behind = work[::-1].cumsum(0)[::-1]  # from each rank to the last and back
            behind[:-1] += 2 * between[::-1].cumsum(0)[::-1]
            held = np.minimum(m, p - np.arange(p)[:, None])
            period = np.maximum(slowest, (behind / held).max(0) * (m > p))
            return behind[0] + (np.minimum(m, p) - 1) * slowest + np.maximum(m - p, 0) * period
        path = work.sum(0) + 2 * v * self.send.sum(0) - 2 * self.send[-1]
        period = np.maximum(slowest + v * self.send.max(0), v * self.send.max(0) * (1 + (p == 2)))
        fill = (work.sum(0) - slowest) / v + (v + 1) * between.sum(0)
        return np.maximum(m * period + fill, path + (m - 1) * period / v)

    def _split(
        self, ahead: Numbers, inner: Numbers, weight: Numbers, *, bound: bool = False
    ) -> Numbers:
        """Seconds of all passes of a schedule with split backward passes.

        bound  those that no longer passes go below: in zb-h1 longer weight halves fill the bubble
        """
        work, way, between = ahead + inner + weight, ahead + inner, self.send[:-1].sum(0)
        idle = {"zb-h1": way - weight, "zb-h2": ahead, "zb-v": ahead / 2}[self.schedule or ""]
        hops = {"zb-h1": 4, "zb-h2": 1.5, "zb-v": 4.5}[self.schedule or ""] * between
        bubble = (idle.sum(0) - idle.min(0)).clip(0)
        if bound and self.schedule == "zb-h1":
            bubble = 0 * bubble
        full = self.micros * work.max(0) + bubble + hops
        few = way.sum(0) + (self.micros - 1) * way.max(0) + weight.max(0)
        return np.maximum(full, few + 2 * self.virtual * between)

    def _drain(self, back: Numbers) -> Numbers:
        """Seconds by which a rank's last backward pass ends before that of the first rank."""
        if self.schedule in SPLIT:
            return 0 * back
        sent = self.send.cumsum(0) - self.send
        return (np.cumsum(back, 0) - back) / self.virtual + sent

    def _left(self, last: Numbers, reduce: tuple[Numbers, Numbers]) -> Numbers:
        """Seconds by which the sums outlast the last backward pass; those of zero2 and zero3 are
        counted with every pass, but for the last bucket.
        """
        within, across = np.where(self.zero >= 2, reduce[0] / self.units, reduce[0]), reduce[1]
        total = np.maximum(within, across) + np.minimum(within, across) / self.units
        if not self.profile.overlap:
            return total
        v = self.virtual
        behind = last / v * (1 - 1 / self.units)  # of the stage that is last
        if self.schedule in SPLIT:
            between = last / v * np.minimum(self.pp, self.micros)
        else:  # a micro-batch comes back when it was on every rank
            between = np.maximum(self.pp * last / v, last.sum(0) / v + self.send.sum(0))
        earlier = (v - 1) * between  # behind other stages
        slowed = np.minimum(total / v, last / v) * (1 - 1 / self.profile.slowdown)
        return np.maximum(total - behind - earlier, total / v - behind).clip(0) + slowed

    def _update(self) -> Numbers:
        plan = self.tables.formats
        states = len(plan.method.optimizer.states)
        touched = (3 + 2 * states) * plan.master_bytes + plan.compute_bytes
        element = self.profile.update * touched
        update = self._own(self.zero > 0) * element / self.tables.speeds.bandwidth
        return self.homes.update(update, element) if self.homes else update

    def _elsewhere(self, what: str) -> Numbers:
        """Whether the home of a kind of state is not the device, by layout."""
        return np.array([what in one for one in HOMES])[self.rows["home"]]

    def _own(self, shared: Numbers) -> Numbers:
        """Elements of a rank's share, where it is `shared`; else all."""
        cut = self.dense / self.shard + self.experts / self.expert_shard
        return np.where(shared, cut, self.dense + self.experts)

    def _tie(self) -> Numbers:
        """Seconds in which both ends of the pipeline sum the gradients of a tied embedding."""
        if self.pp == 1 or self.schedule == "zb-v" or not self.tied.any():
            return np.zeros(len(self.rows))
        bytes_ = self.tied / self.shard * self.tables.formats.sent_gradient_bytes
        between, latency = self.tables.hops(self.pp)[-1]  # from the last rank to the first
        tied = bytes_ / between + 2 * latency
        whole = self.tied * self.width.gathered * self.gathers[0].byte + self.gathers[0].message
        return tied + np.where(self.zero == 0, whole, 0)

    # -- memory

    def memory(self) -> Numbers:
        """Bytes on the fullest device."""
        width, zero = self.width, self.zero
        own, whole = self._own(zero > 0), self.dense + self.experts
        weights, gradients = self._elsewhere("weights"), self._elsewhere("gradients")
        held = (width.masters + width.moments) * own * ~self._elsewhere("optimizer")
        held += width.weights * np.where(zero == 3, own, whole) * ~weights
        held += width.gradients * np.where(zero >= 2, own, whole) * ~gradients
        units = np.concatenate([self.unit, self.expert_unit])[None]
        count = np.concatenate([self.of_rank, self.of_rank], 1)[:, :, None]
        once, again = (np.where(count >= often, units, 0) for often in (1, 2))
        several = np.sort(np.concatenate([once, again], 1), 1)[:, ::-1]
        cut = self.shard > 1
        gathered = several[:, :WINDOW].sum(1)
        passes = np.where(((zero == 3) & cut) | weights, gathered * width.gathered, 0)
        sparse = self.expert_unit.any()
        slots = np.minimum(2 + (self.rows["tp"] > 1) + sparse, self.units * (1 + sparse))
        whole = several[:, 0]
        largest = np.where(self.expert_shard > 1, whole, once[:, : len(self.unit)].max(1))
        window = np.where((zero >= 2) & cut, slots * largest, np.where(gradients, whole, 0))
        passes = passes + window * width.reduced
        block = self.tables.blocks[:, None] & self._elsewhere("activations")
        again = self.again + BLOCKS * self.kept * block
        again = np.where(self.of_rank[:, :, None] > 0, again[None], 0).max(1)
        return (held + passes + again + self._activations()).max(0)

    def _activations(self) -> Numbers:
        """Bytes of the micro-batches in flight on each rank."""
        blocks = (self.counts @ self.tables.blocks > 0)[:, None]
        here = ~(self.tables.blocks[:, None] & self._elsewhere("activations"))
        stage = _over_kinds(self.counts, self.kept * here) + blocks * self.once
        rank = np.stack([stage[self.where == rank].sum(0) for rank in range(self.pp)])
        p, m, v = self.pp, self.micros, self.virtual
        index = np.arange(p)[:, None]
        if self.schedule == "interleaved":
            longest = np.where(m >= p, -(-m // np.maximum(m // p, 1)), m)
            return rank / v * np.minimum(longest * (v - 1) + 2 * (p - 1 - index) + 1, m * v)
        flying = {"zb-h1": p + 0 * index, "zb-h2": 2 * p - 1 + 0 * index, "zb-v": p + 0 * index}
        return rank * np.minimum(flying.get(self.schedule or "", p - index), m)
