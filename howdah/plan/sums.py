"""Which gradients a rank sums, with whom and in which order: a list of messages.

The true gradient of a weight is the sum of the terms of several ranks: replicas, which compute on
other samples; tp ranks, each of which has a term of some weights (`plan/sharding.py`,
`summed_over_tp`); and the stages of a tied embedding. The list of rank 13, whose stage has layers.3
and the head, in the layout `pp2 dp4 tp2 sp zero2 shard2 x2`:

    number  axis  ranks  operation       gradients                    after every     awaits
    0       tp    12 13  all-reduce      norms of head, packed        micro-batch
    1       tp    12 13  all-reduce      norms of layers.3, packed    micro-batch
    2       dp    13 15  reduce-scatter  head and layers.3, whole     micro-batch     0 1
    3       dp     9 13  all-reduce      head and layers.3, shares    step            2

Everything that concerns these sums reads this list: `parallel/sums.py` runs it, `sim/traffic.py`
counts its bytes, `sim/rank_clock.py` its time, `plan/window.py` the memory that it needs.

Every message costs a latency, however small it is; a large one delays gradients that could already
be sent. So the units whose gradients are summed over the replicas travel in buckets. Units are
taken in the order in which the backward pass completes them, and a bucket is closed as soon as it
holds enough bytes:

    backward completes   head  layers.5  layers.4  layers.3  ...  embedding
    buckets             [head  layers.5][layers.4  layers.3] ... [embedding]
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from howdah.plan.comm import Comm
from howdah.plan.flat_buffers import Buffer, Segment, share
from howdah.plan.gather_order import rows_added, units_at
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import Stride, axis
from howdah.plan.plan import Plan
from howdah.plan.program import schedule_of, stage_parts
from howdah.plan.schedule.actions import Kind
from howdah.plan.sharding import local_buffers, shard_axes, summed_over_tp
from howdah.plan.worker_ranks import pushed_ranges
from howdah.shapes.weights import parts_of

BUCKET_BYTES, FIRST_BYTES = 4 << 20, 1 << 20
TABLE = "embedding.weight"  # whose gradient has few rows, where no head uses it
ROW_NUMBER_BYTES = 4  # of the number of a row

Operation = Literal["all_reduce", "reduce_scatter", "all_gather", "push", "all_to_all"]


class Shared(Protocol):
    """What sums over replicas follow from: of a plan, or of a module that is no plan's model
    (`foreign/table.py`).
    """

    @property
    def layout(self) -> Layout: ...

    @property
    def comm(self) -> Comm: ...

    @property
    def master_bytes(self) -> int: ...

    @property
    def ranks_of_unit(self) -> Mapping[str, tuple[int, ...]]: ...


class Span(NamedTuple):
    """The elements [start, stop) of the flat gradient of a unit."""

    unit: str
    start: int
    stop: int


@dataclass(frozen=True)
class Sum:
    """One message of the list.

    stage   the stage whose backward pass completes these gradients; None: at the end of the step
    axis    the axis under which the message is counted
    ranks   the ranks that take part, in order
    op      the operation; reduce-scatter and all-gather cut each span into the ranks' shares, a
            push into those of the servers, which are the last of the ranks (`plan/servers.py`);
            all-to-all is a reduce-scatter in 4 bits (`plan/quantised.py`)
    spans   the gradients
    packed  whether the spans are copied into one message; otherwise each is a message
    every_micro  whether it runs after every micro-batch, not only after the last of a step
    names   the weights whose gradients it awaits
    row     elements of a row, of a gradient that travels by its rows that are not zero; else 0
    by_tokens  whether the gradient is at home, to which goes a row for each token
    after   numbers of the sums whose results it awaits
    hops    of an all-to-all, the ranks among which each hop is
    """

    stage: int | None
    axis: str
    ranks: Sequence[int]
    op: Operation
    spans: tuple[Span, ...]
    packed: bool = False
    every_micro: bool = False
    names: tuple[str, ...] = ()
    after: tuple[int, ...] = ()
    row: int = 0
    by_tokens: bool = False
    hops: tuple[Sequence[int], ...] = ()

    @property
    def in_window(self) -> bool:
        """Whether the gradients are whole only until they are summed, in the window
        (`plan/window.py`): of each unit, a rank keeps its share of the sum.
        """
        return self.every_micro and not self.packed and not self.by_tokens

    @property
    def moves_result(self) -> bool:
        """Whether the result has to be put in its place: copied, or added to a share."""
        return self.packed or self.every_micro

    @property
    def messages(self) -> list[int]:
        """Number of elements of each message."""
        lengths = [span.stop - span.start for span in self.spans]
        return [sum(lengths)] if self.packed else lengths


def sums_of(plan: Plan, rank: int) -> list[Sum]:
    """The sums of gradients in which `rank` takes part. Of the sums of one stage and the same
    ranks, each starts after those that are listed before it.
    """
    listed = _SumList(plan, rank, by_tokens=rows_added(plan)[0])
    for stage, buffers in completed(plan, rank).items():
        for buffer in buffers:
            listed.over_tp(stage, buffer, plan)
        buckets = _buckets(plan, buffers)
        if plan.method.sync:  # servers take chunks: to wait for others would gain nothing
            buckets = [[buffer] for buffer in buffers]
        if plan.layout.server:
            for bucket in buckets:
                listed.to_servers(stage, bucket, plan)
            continue
        listed.over_replicas(stage, buckets)
    for buffer in _trained(plan, rank):
        if _on_several(plan, buffer.unit):
            listed.over_stages(buffer)
    if plan.method.gradient_dtype == "int4":
        return [replace(row, op="all_to_all", hops=_hops(plan, rank, row)) for row in listed.sums]
    return listed.sums


def _hops(plan: Plan, rank: int, row: Sum) -> tuple[Sequence[int], ...]:
    """The groups of the hops of a sum: inside a node, then between, where the layout has nodes."""
    if not (layout := plan.layout).hpz:
        return (row.ranks,)
    near = axis(layout, "hpz")
    far = Stride(layout.sharers // near.size, near.stride * near.size)
    return near.group(rank), far.group(rank)


def sums_of_units(plan: Shared, rank: int, buffers: Sequence[Buffer]) -> list[Sum]:
    """The sums over replicas of units that one stage uses, given in the order in which the backward
    pass completes them.
    """
    listed = _SumList(plan, rank)
    listed.over_replicas(0, _buckets(plan, buffers))
    return listed.sums


def keeps_shares(plan: Shared, unit: str) -> bool:
    """Whether gradients of `unit` are reduced to shares after every micro-batch, or added to those
    that are at home on the host or the disk.
    """
    inside, _ = shard_axes(plan.layout, unit)
    away = plan.layout.gradients != "device"
    return away or (plan.layout.accumulate == "shard" and inside.size > 1)


def completed(plan: Plan, rank: int) -> dict[int, list[Buffer]]:
    """The buffers of each stage of `rank`, in the order in which the backward pass completes them.
    A buffer that several stages use is listed under the one that computes its gradients last.
    """
    pp_index = axis(plan.layout, "pp").index_of(rank)
    mine = stage_parts(plan, pp_index)
    last = dict.fromkeys(mine, 0)
    if len(mine) > 1:
        for number, action in enumerate(schedule_of(plan).programs[pp_index]):
            if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
                last[action.stage] = number
    found: dict[int, list[Buffer]] = {stage: [] for stage in mine}
    stage_of = {part: stage for stage, parts in mine.items() for part in parts}
    for buffer in _trained(plan, rank):
        users = parts_of(buffer.unit, plan.shape)
        used = [stage_of[part] for part in users if part in stage_of]
        found[max(used, key=lambda stage: (last[stage], -stage))].append(buffer)
    for stage, buffers in found.items():
        units = [unit for part in mine[stage] for unit in units_at(plan, part)]
        first = {unit: -n for n, unit in reversed([*enumerate(units)])}
        buffers.sort(key=lambda buffer: first.get(buffer.unit, 1))
    return found


def used_by_several(plan: Plan, rank: int) -> frozenset[str]:
    """The units that several stages of `rank` use."""
    mine = stage_parts(plan, axis(plan.layout, "pp").index_of(rank)).values()
    users = {b.unit: set(parts_of(b.unit, plan.shape)) for b in _trained(plan, rank)}
    return frozenset(
        unit for unit, used in users.items() if sum(bool(used & set(parts)) for parts in mine) > 1
    )


def fill_buckets(
    buffers: Sequence[Buffer], *, element_bytes: int, least_bytes: int | None = None
) -> list[list[Buffer]]:
    """`buffers` in buckets, in the order in which they are given.

    element_bytes  bytes of one gradient element
    least_bytes    every bucket but the first and the last holds at least so many bytes; None:
                   BUCKET_BYTES

    The first is not longer than it must be, because a link has nothing to do until it is full.
    """
    least_bytes = BUCKET_BYTES if least_bytes is None else least_bytes
    buckets: list[list[Buffer]] = [[]]
    for buffer in buffers:
        filled = sum(b.length for b in buckets[-1]) * element_bytes
        first = len(buckets) == 1 and filled >= min(FIRST_BYTES, least_bytes)
        if buckets[-1] and (first or filled >= least_bytes):
            buckets.append([])
        buckets[-1].append(buffer)
    return [bucket for bucket in buckets if bucket]


def _buckets(plan: Shared, buffers: Sequence[Buffer]) -> list[list[Buffer]]:
    """The buckets of a stage. All units of a bucket have their replicas on the same ranks, and a
    unit of several stages has a bucket of its own.
    """
    alike: dict[object, list[Buffer]] = {}
    for buffer in buffers:
        own = buffer.unit if _on_several(plan, buffer.unit) else ""
        alike.setdefault((own, shard_axes(plan.layout, buffer.unit)), []).append(buffer)
    width = plan.master_bytes
    return [bucket for some in alike.values() for bucket in fill_buckets(some, element_bytes=width)]


def _trained(plan: Plan, rank: int) -> list[Buffer]:
    """The buffers of `rank` that have gradients."""
    return [buffer for buffer in local_buffers(plan, rank) if buffer.trains]


def _on_several(plan: Shared, unit: str) -> bool:
    """Whether several pipeline ranks hold a unit, such as a tied embedding."""
    return len(plan.ranks_of_unit[unit]) > 1


class _SumList:
    """The list of a rank while it is made.

    by_tokens  the unit to whose gradient rows are added at home; empty: there is none
    """

    def __init__(self, plan: Shared, rank: int, by_tokens: str = "") -> None:
        self.plan, self.rank, self.by_tokens = plan, rank, by_tokens
        self.sums: list[Sum] = []
        self._over_tp: dict[object, tuple[int, ...]] = {}  # by dims, who has a term
        self._awaited: set[str] = set()  # weights whose gradients some sum awaits
        self._latest: dict[str, tuple[int, ...]] = {}  # by unit, its latest sums

    def over_tp(self, stage: int, buffer: Buffer, plan: Plan) -> None:
        """Sums the gradients of which each tp rank has a term: a message for each set of tp
        ranks.
        """
        terms: dict[tuple[int, ...], list[Segment]] = {}
        for segment in buffer.segments if plan.layout.tp > 1 else ():
            weight = plan.weight(segment.name)
            if weight.dims not in self._over_tp:  # blocks have weights of the same dims
                self._over_tp[weight.dims] = summed_over_tp(weight, plan, self.rank)
            if len(tp_ranks := self._over_tp[weight.dims]) > 1:
                terms.setdefault(tp_ranks, []).append(segment)
        along = axis(self.plan.layout, "tp").group(self.rank)
        for tp_ranks, segments in sorted(terms.items()):
            self._append(
                Sum(
                    stage,
                    axis="tp",
                    ranks=tuple(along[tp_rank] for tp_rank in tp_ranks),
                    op="all_reduce",
                    spans=tuple(Span(buffer.unit, s.start, s.stop) for s in segments),
                    packed=True,
                    every_micro=keeps_shares(self.plan, buffer.unit),
                    names=tuple(segment.name for segment in segments),
                )
            )

    def to_servers(self, stage: int, bucket: list[Buffer], plan: Plan) -> None:
        """Sums a bucket on the servers, each of which gets its range of every unit."""
        everyone, rank = range(self.plan.layout.world), self.rank
        spans = tuple(Span(b.unit, *one) for b in bucket for one in pushed_ranges(b, plan, rank))
        self._append(Sum(stage, "dp", everyone, "push", spans, names=self._names(bucket)))

    def over_replicas(self, stage: int, buckets: Sequence[list[Buffer]]) -> None:
        """Sums buckets over all copies of their units."""
        for bucket in buckets:
            self.within_copy(stage, bucket)
        for bucket in buckets:
            self.across_copies(stage, bucket)

    def within_copy(self, stage: int, bucket: list[Buffer]) -> None:
        """Sums a bucket over the ranks among which one copy of the states is sharded. Each of them
        gets its share or, where each replica updates everything, all of the sum. A rank that is
        alone has the sum, and takes it home.
        """
        first, layout = bucket[0].unit, self.plan.layout
        inside, _ = shard_axes(layout, first)
        if inside.size > 1 or keeps_shares(self.plan, first):
            whole = layout.zero == 0 and not _on_several(self.plan, first)
            tables = [(b.unit, s) for b in bucket for s in b.segments if self._by_rows(s)]
            apart, ranks = {segment.name for _, segment in tables}, inside.group(self.rank)
            rows = [buffer for buffer in bucket if buffer.unit == self.by_tokens]
            rest = [buffer for buffer in bucket if buffer not in rows]
            row = Sum(
                stage,
                axis="dp",
                ranks=ranks,
                op="all_reduce" if whole else "reduce_scatter",
                spans=tuple(span for buffer in rest for span in self._spans(buffer)),
                every_micro=keeps_shares(self.plan, first),
                names=tuple(name for name in self._names(rest) if name not in apart),
            )
            if row.spans:
                self._append(row)
            for one in rows:
                self._append(
                    replace(
                        row,
                        spans=(Span(one.unit, 0, one.length),),
                        by_tokens=True,
                        names=self._names([one]),
                    )
                )
            for unit, segment in tables:
                name, span = (segment.name,), (Span(unit, segment.start, segment.stop),)
                width = segment.box.size[1]
                self.sums.append(Sum(stage, "dp", ranks, "all_reduce", span, names=name, row=width))

    def _by_rows(self, segment: Segment) -> bool:
        """Whether the gradient of a weight is summed by its rows that are not zero."""
        return self.plan.comm.sparse and segment.name == TABLE

    def _spans(self, buffer: Buffer) -> list[Span]:
        """The elements of a buffer that are summed whole."""
        cuts = [0, *(n for s in buffer.segments if self._by_rows(s) for n in (s.start, s.stop))]
        pairs = zip(cuts[::2], [*cuts[1::2], buffer.length], strict=True)
        return [Span(buffer.unit, start, stop) for start, stop in pairs if start < stop]

    def across_copies(self, stage: int, bucket: list[Buffer]) -> None:
        """Sums a bucket's shares over the ranks that have the same share in other copies."""
        _, outside = shard_axes(self.plan.layout, bucket[0].unit)
        if outside.size > 1:
            ranks, spans = outside.group(self.rank), tuple(map(self._own, bucket))
            self._append(Sum(stage, "dp", ranks, "all_reduce", spans, names=self._names(bucket)))

    def over_stages(self, buffer: Buffer) -> None:
        """Sums a unit over the pipeline ranks that hold it, share by share. Where each replica
        updates everything, the replicas then gather the result.
        """
        along = axis(self.plan.layout, "pp").group(self.rank)
        ranks = tuple(along[index] for index in self.plan.ranks_of_unit[buffer.unit])
        names = self._names([buffer])
        self._append(Sum(None, "pp", ranks, "all_reduce", (self._own(buffer),), names=names))
        inside, _ = shard_axes(self.plan.layout, buffer.unit)
        if self.plan.layout.zero == 0 and inside.size > 1:
            whole = Span(buffer.unit, 0, buffer.length)
            self._append(Sum(None, "dp", inside.group(self.rank), "all_gather", (whole,)))

    def _append(self, row: Sum) -> None:
        """Appends a sum, behind the latest sums of the same units."""
        units = dict.fromkeys(span.unit for span in row.spans)
        before = () if row.packed else tuple(n for u in units for n in self._latest.get(u, ()))
        for unit in units:  # sums over tp of one unit are of different weights
            others = self._latest.get(unit, ()) if row.packed else ()
            self._latest[unit] = (*others, len(self.sums))
        self._awaited.update(row.names)
        self.sums.append(replace(row, after=tuple(dict.fromkeys(before))))

    def _own(self, buffer: Buffer) -> Span:
        """The rank's share of a buffer."""
        inside, _ = shard_axes(self.plan.layout, buffer.unit)
        return Span(buffer.unit, *share(buffer.length, inside.size, inside.index_of(self.rank)))

    def _names(self, bucket: list[Buffer]) -> tuple[str, ...]:
        """The weights of a bucket whose gradients no sum awaits so far."""
        return tuple(n for buffer in bucket for n in buffer.names if n not in self._awaited)
