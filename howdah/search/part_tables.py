"""The tables that the closed form reads: what one part of each kind costs on a rank.

The blocks of a model are of few kinds (dense, with experts), and the layouts of a search have few
different shapes of them: those of tp, cp, ep, sp, micro-batch and recompute. For each shape the
seconds and bytes of every kind are asked once from `sim`, with a plan that has one part of a kind.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from howdah.collectives.choice import unusable
from howdah.machines.cluster import attained
from howdah.machines.network import axis_groups, collective_path
from howdah.plan.batch import Batch
from howdah.plan.exchanges import exchanges
from howdah.plan.layout import Layout, family_of
from howdah.plan.mesh_axes import Stride
from howdah.plan.plan import Plan, for_gpus
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import local_buffers, local_of
from howdah.plan.stages import Stages, by_cost, looped, v_shaped
from howdah.plan.sums import BUCKET_BYTES
from howdah.search.space import RECOMPUTE, Question, context_words
from howdah.shapes.activations import bytes_of, made_again, saved, shared
from howdah.shapes.part import Part
from howdah.shapes.products import part_flops
from howdah.shapes.weights import parts
from howdah.sim.chosen import Collective, ProgramTimes
from howdah.sim.kernels import kernels_of
from howdah.sim.message_times import MessageTimes
from howdah.sim.operator_times import Speeds
from howdah.sim.part_times import part_times, waited
from howdah.sim.profile import Profile, curve_of
from howdah.sim.step_time import wired

Numbers = Any  # arrays of numbers: most functions of numpy say no more of what they return
Counts = tuple[Numbers, NDArray[np.int64]]  # of parts [stage, kind], and each stage's rank
KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
VECTORS = BUCKET_BYTES, 16 * BUCKET_BYTES  # bytes of sums, about


class Shape(NamedTuple):
    """What the seconds and activations of a part depend on; recompute and context by number."""

    tp: int
    cp: int
    ep: int
    sp: int
    micro_batch: int
    recompute: int
    context: int = 0


class PartTable(NamedTuple):
    """Of one micro-batch, by kind of part: [kind].

    seconds   [forward, backward, input half, weight half; kind]
    kept      bytes of activations that wait for the backward pass
    again     bytes that are recomputed at a time
    once      bytes that the blocks of a stage share
    """

    seconds: Numbers
    kept: Numbers
    again: Numbers
    once: float


class WeightTable(NamedTuple):
    """Elements that a rank holds of one part: of dense weights and of experts, by kind [kind], and
    of a tied embedding (which is in both of its kinds).
    """

    dense: Numbers
    experts: Numbers
    tied: float


class PartTables:
    """The tables of one question, under one profile."""

    def __init__(self, question: Question, profile: Profile) -> None:
        self.question, self.profile = question, profile
        self.counted = wired(attained(question.cluster), profile)
        self.speeds = Speeds(question.cluster, self.counted, question.method, profile)
        every = parts(question.shape)
        plan = self._plan(Shape(1, 1, 1, 0, 1, 0))
        first: dict[tuple[str, bool], Part] = {}
        for part in every:
            first.setdefault((part.stack, plan.sparse(part)), part)
        self.kinds = list(first.values())
        number = {one: index for index, one in enumerate(first)}
        self._kind = {part: number[part.stack, plan.sparse(part)] for part in every}
        self.blocks = np.array([part.is_block for part in self.kinds])
        self._parts: dict[Shape, PartTable] = {}
        self._weights: dict[tuple[int, int], WeightTable] = {}
        self._times: dict[tuple[int, int, int, int], MessageTimes] = {}
        self._paths: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._stages: dict[tuple[int, int, bool], Counts] = {}
        self._programs = ProgramTimes(plan, self.counted)

    # -- stages

    def stages(self, pp: int, schedule: str | None, virtual: int) -> Counts:
        """How many parts of each kind every stage has, and the rank of each stage."""
        layout = Layout(pp=pp, schedule=schedule, virtual=virtual)
        key = pp, virtual, family_of(layout).folded
        if key not in self._stages:
            where = v_shaped(pp) if key[-1] else looped(pp, virtual)
            found = by_cost(self._costs, where)  # as `make_stages` does
            counts = np.zeros((len(found.parts), len(self.kinds)))
            for stage, some in enumerate(found.parts):
                for part in some:
                    counts[stage, self._kind[part]] += 1
            self._stages[key] = counts, np.array(found.where)
        return self._stages[key]

    # -- parts

    def parts(self, shape: Shape) -> PartTable:
        """The table of a shape."""
        if shape not in self._parts:
            self._parts[shape] = self._table(self._plan(shape, alone=True))
        return self._parts[shape]

    def seconds_of(self, shape: Shape) -> dict[Part, float]:
        """Seconds of every part of the model, forward and backward, in forward order."""
        forward, backward = self.parts(shape).seconds[:2]
        return {part: float(forward[n] + backward[n]) for part, n in self._kind.items()}

    def weights(self, tp: int, ep: int) -> WeightTable:
        """What a rank holds of the weights of each kind of part."""
        if (tp, ep) not in self._weights:
            held = local_buffers(self._plan(Shape(tp, 1, ep, 0, 1, 0)), 0)
            length = {buffer.unit: buffer.length for buffer in held}
            tied = length.get("tied", 0)
            names = {"embedding": ("embedding", "tied"), "head": ("head", "tied")}
            dense = [sum(length.get(u, 0) for u in names.get(p, (p,))) for p in self.kinds]
            experts = [length.get(f"{part}.experts", 0) for part in self.kinds]
            self._weights[tp, ep] = WeightTable(
                np.array(dense, float), np.array(experts, float), tied
            )
        return self._weights[tp, ep]

    def wire(self, operation: str, group: Stride) -> tuple[float, float]:
        """Seconds of a collective for each byte of the whole vector, and for each message. Those of
        a program that [comm] chooses are taken between two sizes, as if all vectors were such.
        """
        size, stride = group
        bandwidth, latency = self._path((size, stride, -1))
        halves = 2 if operation == "all_reduce" else 1
        direct = halves * (size - 1) / size / bandwidth, halves * latency
        chosen = self.question.comm.algorithm
        if size == 1 or not chosen or any(unusable(chosen, operation, size)):
            return direct
        every = axis_groups(self.question.devices, size=size, stride=stride)
        ranks = range(0, size * stride, stride)
        calls = (Collective(operation, ranks, length, 1) for length in VECTORS)
        short, long = (self._programs.seconds(call, every) for call in calls)
        if short is None or long is None:
            return direct
        byte = (long - short) / (VECTORS[1] - VECTORS[0])
        return byte, max(short - byte * VECTORS[0], 0.0)

    def hops(self, pp: int) -> list[tuple[float, float]]:
        """Seconds for each byte and for each message from each pipeline rank to the next, and from
        the last to the first. Pairs of ranks at equal places of their nodes have equal numbers.
        """
        stride = self.question.devices // pp
        alike = max(self.question.cluster.devices_per_node // stride, 1)
        inner = [self._path((pp, stride, rank % alike)) for rank in range(pp - 1)]
        return [*inner, self._path((pp, stride, pp - 1))] if pp > 1 else [(np.inf, 0.0)]

    def _path(self, key: tuple[int, int, int]) -> tuple[float, float]:
        """Of a ring, or of one rank of it and the next."""
        size, stride, place = key
        if size < 2:
            return np.inf, 0.0
        if key not in self._paths:
            groups = axis_groups(self.question.devices, size=size, stride=stride)
            if place >= 0:
                groups = groups[:, sorted((place, (place + 1) % size))]
            found = collective_path(self.counted, groups)
            call = curve_of(self.counted.device).call
            self._paths[key] = found.link.bandwidth, found.messages * found.link.latency + call
        return self._paths[key]

    def _plan(self, shape: Shape, *, alone: bool = False) -> Plan:
        """A plan without pipeline on all devices; `alone`: with one part of each kind, a stage of
        its own.
        """
        q, tp, cp = self.question, shape.tp, shape.cp
        layout = Layout(tp=tp, cp=cp, ep=shape.ep, dp=q.devices // tp // cp, sp=bool(shape.sp))
        again, words = RECOMPUTE[shape.recompute], context_words(shape.context)
        layout = replace(layout, recompute=again, micros=1, **words)
        batch = Batch(shape.micro_batch * q.devices // tp // cp, shape.micro_batch)
        stages = Stages((parts(q.shape),), (0,))
        if alone:
            stages = Stages(tuple((part,) for part in self.kinds), (0,) * len(self.kinds))
        plan = Plan(q.shape, layout, batch, q.sequence, q.method, stages, comm=q.comm)
        return for_gpus(plan) if q.cluster.device.cuda_names else plan

    def _table(self, plan: Plan) -> PartTable:
        of, kernels, width = local_of(plan, 0), kernels_of(plan), plan.compute_bytes
        found = part_times(plan, self.speeds, 0, self._blocking(plan), self.profile)
        times = [found[stage][part] for stage, part in enumerate(self.kinds)]

        def sized(listed: object) -> Iterator[float]:
            for part in self.kinds:
                chosen = plan.recompute.get(part, "none")
                yield bytes_of(listed(plan.shape, part, kernels, chosen), of, compute=width)  # type: ignore[operator]

        return PartTable(
            np.array([[one.seconds(kind) for one in times] for kind in KINDS]),
            np.array([*sized(saved)]),
            np.array([*sized(made_again)]),
            bytes_of(shared(plan.shape, kernels), of, compute=width),
        )

    def _blocking(self, plan: Plan) -> dict[tuple[int, bool], float]:
        """Seconds in which computation waits for the exchanges of a part, by stage and way."""
        layout = plan.layout
        key = layout.tp, layout.cp, layout.ep, layout.trading
        found: dict[tuple[int, bool], float] = {}
        times = self._times.setdefault(key, MessageTimes(plan, self.counted, self.profile))
        for row in exchanges(plan, 0):
            if row.axis != "pp":
                once = waited(row, times.of_exchange(row, 0), plan, self.speeds, self.profile)
                found[row.stage, row.back] = found.get((row.stage, row.back), 0.0) + once
        return found

    @cached_property
    def _costs(self) -> dict[Part, float]:
        """The FLOPs of every part, by which a model is divided into stages; blocks of a kind have
        the same.
        """
        shape, sequence = self.question.shape, self.question.sequence
        kinds = [float(part_flops(shape, kind, sequence)) for kind in self.kinds]
        return {part: kinds[kind] for part, kind in self._kind.items()}

    @cached_property
    def formats(self) -> Plan:
        """A plan whose formats are those of all layouts."""
        return self._plan(Shape(1, 1, 1, 0, 1, 0))
