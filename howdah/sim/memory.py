"""The memory of one rank, in bytes, by component, home and moment, before anything is allocated.

A step has two moments. In the *passes* (forward and backward) activations are allocated and freed;
in the *update* the optimizer runs. A rank needs the larger of the two sums. With Ψ elements in the
rank's own buffers, padding included, and N ranks that shard one copy of them, in bf16 with Adam:

    component    bytes                              moments
    weights      2Ψ   zero3: ÷N                     both
    masters      4Ψ   from zero1 on ÷N              both     none if weights are in float32, and
                                                             have the same home
    gradients    4Ψ   accumulate=shard: ÷N          both
    moments      8Ψ   from zero1 on ÷N              both     of the optimizer, 4Ψ each
    gathered     2Ψ of two units, in zero3          passes   the unit in use and the next one;
                                                             storage.window of them
                 a message of the largest unit,     passes   while it is restored
                 if it is sent in 8 bits
    copies       2Ψ ÷ H, in zero3 hpzH              both     the second copy of the weights, in
                                                             the form in which they are sent
                 4Ψ for each worker, at a server     both     what each worker has pulled
                 that corrects for delays
    reduced      4Ψ of a few buckets, if gradients  passes   full gradients before the
                 are kept as shares                          reduce-scatter (`plan/window.py`)
                 2Ψ of the largest message, if they          the copies that are sent
                 are sent as bf16
    activations  micro-batches in flight            passes   by the schedule
    recomputed   activations of one block           passes   while its backward pass runs
    staged       what an update moves at a time     both     in the host's memory, for states that
                                                             are not on the device
    programs     what arrives to be added, of the   both     of chosen algorithms (`comm.algorithm`)
                 largest collective of a group

A parameter server has its range of all of it in place of Ψ, and the ranges that it copies
(`plan/servers.py`); messages that wait at a server or a worker are not counted.

The home of a component is the device, the host or the disk. A unit that is not sharded (N = 1, or
experts that are on one rank each) needs no all-gather. A component whose home is not the device
needs the same windows ("gathered", "reduced") on the device as a sharded one. Of activations, those
of blocks have another home; two blocks have theirs on the device while they run.

The lists of `shapes/activations.py` give the activations of a micro-batch, and the schedule gives
the number of micro-batches in flight. Frameworks that keep other formats have another `Width`; the
table of the ZeRO paper (https://arxiv.org/abs/1910.02054, figure 1) is `states` with 2-byte
gradients.

Not counted: memory that a device uses before the first tensor, workspaces of kernels, and the gaps
of an allocator. `bench/memory/` lists how much those take in published runs.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Literal, NamedTuple

from howdah.plan.flat_buffers import Buffer, share
from howdah.plan.gather_order import never_whole, rows_added
from howdah.plan.gathers import copied
from howdah.plan.homes import masters_apart, staged_bytes
from howdah.plan.layout import Home, Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import BYTES, Plan
from howdah.plan.program import stage_parts, steady_schedule
from howdah.plan.quantised import feedback_elements, message_bytes, reducing_bytes
from howdah.plan.schedule.held import peak_held
from howdah.plan.servers import held_length, serves
from howdah.plan.sharding import local_buffers, local_of, own_range, shard_axes
from howdah.plan.stages import stages_of
from howdah.plan.sums import sums_of
from howdah.plan.window import window_of
from howdah.plan.worker_ranks import served_buffers
from howdah.shapes.activations import bytes_of, made_again, saved, shared
from howdah.shapes.kept import Kernels
from howdah.shapes.part import Part
from howdah.shapes.weights import FROZEN
from howdah.sim.chosen import staged_by_programs

Moment = Literal["passes", "update"]
PASSES: tuple[Moment, ...] = ("passes",)
BOTH: tuple[Moment, ...] = ("passes", "update")

# Blocks whose activations are on the device at a time: the one that runs, and the next.
BLOCKS = 2


class Held(NamedTuple):
    """One component of a rank's memory: its home, the moments at which it is held, its bytes."""

    component: str
    home: Home
    moments: tuple[Moment, ...]
    bytes: int


class Width(NamedTuple):
    """Bytes per element of each component; 0 if there is none. `moments` is the sum of them all."""

    weights: int
    masters: int
    gradients: int
    moments: int
    gathered: int
    reduced: int


FROZEN_WIDTH = Width(0, 0, 0, 0, 0, 0)  # beside their weights, which are all that there is


def width_of(plan: Plan) -> Width:
    """The formats of howdah: weights in the compute format, all else in float32 or wider."""
    narrow, wide = plan.compute_bytes, plan.master_bytes
    masters = wide if masters_apart(plan) else 0
    moments = wide * len(plan.method.optimizer.states)
    return Width(narrow, masters, wide, moments, gathered=narrow, reduced=wide)


def memory(plan: Plan, rank: int, kernels: Kernels, width: Width | None = None) -> list[Held]:
    """Everything that `rank` holds, with one row for each component and home that has any bytes.

    kernels  what the operations save for the backward pass
    width    the formats of another framework; None for howdah's own
    """
    width = width or width_of(plan)
    held: Sequence[Buffer] = local_buffers(plan, rank)
    if serves(plan.layout, rank):
        held = served_buffers(plan)
    bundles = Counter[tuple[str, bool]]()
    rows, trained = [], dict[str, tuple[int, int]]()
    for buffer in held:
        whole, own = _cut(buffer, plan, rank)
        rows += states(whole, own, plan.layout, _kept(buffer, plan, rank, width))
        for at, count in enumerate((whole, own)):
            bundles[buffer.unit.removeprefix(FROZEN), bool(at)] += count
        trained |= {buffer.unit: (whole, own)} if buffer.trains else {}
    cuts = {name: (bundles[name, False], bundles[name, True]) for name, at in bundles if not at}
    rows += [*_windows(cuts, trained, plan, rank, width), *_of_messages(held, plan, rank)]
    rows += [_pulled(held, plan, rank), Held("staged", "host", BOTH, staged_bytes(plan, rank))]
    rows.append(Held("programs", "device", BOTH, staged_by_programs(plan, rank)))
    rows += [] if serves(plan.layout, rank) else _activations(plan, rank, kernels)
    total: dict[tuple[str, Home, tuple[Moment, ...]], int] = {}
    for name, home, moments, count in rows:
        total[name, home, moments] = total.get((name, home, moments), 0) + count
    return [Held(*key, count) for key, count in total.items() if count]


def kept_states(plan: Plan, rank: int) -> list[Held]:
    """What `rank` keeps of weights, gradients, masters and moments alone, which is quickly told."""
    width, rows = width_of(plan), list[Held]()
    for buffer in local_buffers(plan, rank):
        rows += states(*_cut(buffer, plan, rank), plan.layout, _kept(buffer, plan, rank, width))
    return rows


def states(whole: int, own: int, layout: Layout, width: Width) -> list[Held]:
    """Weights, gradients and optimizer states of `whole` elements; the rank's share has `own`."""
    sharded = own if layout.zero or layout.servers_update else whole
    parts = {
        "weights": (own if layout.zero == 3 else whole, layout.weights),
        "masters": (sharded, layout.optimizer),
        "gradients": (own if layout.accumulate == "shard" else whole, layout.gradients),
        "moments": (sharded, layout.optimizer),
    }
    return [
        Held(name, home, BOTH, count * getattr(width, name))
        for name, (count, home) in parts.items()
    ]


def peak(held: list[Held], home: Home = "device") -> int:
    """The most bytes that `home` holds at any moment."""
    return max(
        sum(row.bytes for row in held if row.home == home and moment in row.moments)
        for moment in BOTH
    )


# -- shares and windows ------------------------------------------------------------


def _cut(buffer: Buffer, plan: Plan, rank: int) -> tuple[int, int]:
    """Elements of a unit's buffer, and of the rank's share; a server has no more than its range."""
    if serves(plan.layout, rank):
        mine = held_length(buffer.length, plan.layout, rank, plan.method.sync, plan.comm)
        return mine, mine
    if plan.layout.server:
        start, stop = own_range(buffer, plan.layout, rank)
        return buffer.length, stop - start
    inside, _ = shard_axes(plan.layout, buffer.unit)
    start, stop = share(buffer.length, inside.size, inside.index_of(rank))
    return buffer.length, stop - start


def _kept(buffer: Buffer, plan: Plan, rank: int, width: Width) -> Width:
    """The formats of what a rank keeps of a unit."""
    if not buffer.trains:
        return FROZEN_WIDTH._replace(weights=width.weights)
    if not serves(plan.layout, rank):
        return width
    if not plan.layout.servers_update:  # it only adds
        return FROZEN_WIDTH._replace(gradients=width.gradients)
    narrow = plan.method.sync and width.masters  # those are made for each message
    return width._replace(weights=0) if narrow else width


def _pulled(held: Sequence[Buffer], plan: Plan, rank: int) -> Held:
    """What each worker has pulled from a server that corrects gradients for their delay."""
    sync, elements = plan.method.sync, 0
    if sync and sync.compensation and serves(plan.layout, rank):
        mine = (held_length(one.length, plan.layout, rank, sync, plan.comm) for one in held)
        elements = sync.workers * sum(mine)
    return Held("copies", "device", BOTH, elements * plan.master_bytes)


def _windows(
    cuts: Mapping[str, tuple[int, int]],
    trained: Mapping[str, tuple[int, int]],
    plan: Plan,
    rank: int,
    width: Width,
) -> list[Held]:
    """Full weights and gradients that are on the device for a time only, in the passes.

    cuts     by unit, (length of its buffer, length of the rank's share)
    trained  the same of what has gradients
    """
    layout = plan.layout
    whole = [cut for unit, cut in cuts.items() if unit != never_whole(plan)]
    gathered = _comes(whole, layout.weights, layout.zero == 3)
    if layout.release == "use":
        gathered = gathered[: plan.storage.window]
    summed = [cut for unit, cut in trained.items() if unit != rows_added(plan)[0]]
    reduced = _comes(summed, layout.gradients, shared_out=False)[:1]
    reduced = [max([prod(window_of(plan, rank)), *reduced])]
    return [
        Held("gathered", "device", PASSES, sum(gathered) * width.gathered),
        Held("reduced", "device", PASSES, sum(reduced) * width.reduced + _narrowed(plan, rank)),
    ]


def _of_messages(held: Sequence[Buffer], plan: Plan, rank: int) -> Iterator[Held]:
    """The second copy of weights that zero3 gathers, and room to restore a message of 8 bits."""
    if plan.layout.zero != 3:
        return
    width = 1 if plan.quantised else plan.compute_bytes
    kept = sum(stop - start for start, stop in (copied(plan, rank, one) for one in held))
    yield Held("copies", "device", BOTH, kept * width)
    cut = [one for one in held if shard_axes(plan.layout, one.unit)[0].size > 1]
    longest = max((message_bytes(one.length) for one in cut), default=0)
    yield Held("gathered", "device", PASSES, longest * plan.quantised)


def _narrowed(plan: Plan, rank: int) -> int:
    """Bytes of the bf16 copies of gradients that are sent as such: for each group of ranks, those
    of its largest operation (`comm/staging.py`, Scratch). In 4 bits, that of the largest bucket,
    and what was rounded away of all.
    """
    if plan.method.gradient_dtype == "int4":
        rows = [row for row in sums_of(plan, rank) if row.hops]
        longest = max((sum(row.messages) for row in rows), default=0)
        sizes = [len(ranks) for ranks in rows[0].hops] if rows else []
        found = reducing_bytes(longest, sizes, plan.master_bytes)
        if plan.method.gradient_feedback:
            lengths = [length for row in rows for length in row.messages]
            kept = sum(feedback_elements(length, sizes) for length in lengths)
            found += kept * plan.master_bytes
        return found
    most: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for row in sums_of(plan, rank) if plan.method.gradient_dtype == "bf16" else ():
        group = row.axis, tuple(row.ranks)
        most[group] = max(most[group], sum(row.messages) * (len(group[1]) > 1))
    return BYTES["bf16"] * most.total()


def _comes(cuts: Iterable[tuple[int, int]], home: Home, shared_out: bool) -> list[int]:
    """Lengths of the units that are not kept in full on the device, the largest first."""
    elsewhere = home != "device"
    found = [whole for whole, own in cuts if elsewhere or (shared_out and own < whole)]
    return sorted(found, reverse=True)


# -- activations -------------------------------------------------------------------


def _activations(plan: Plan, rank: int, kernels: Kernels) -> list[Held]:
    layout, of = plan.layout, local_of(plan, rank)
    mine = stages_of(plan.stages.where, axis(layout, "pp").index_of(rank))

    def kept(part: Part) -> int:
        recompute = plan.recompute.get(part, "none")
        return bytes_of(saved(plan.shape, part, kernels, recompute), of, compute=plan.compute_bytes)

    def recomputed(part: Part) -> int:
        recompute = plan.recompute.get(part, "none")
        return bytes_of(
            made_again(plan.shape, part, kernels, recompute), of, compute=plan.compute_bytes
        )

    def goes(part: Part) -> bool:
        return part.is_block and layout.activations != "device"

    def reads(block: Part) -> bool:
        """Whether a block keeps what an encoder has made: for its own matrices, or to run again."""
        asked = (plan.marks.asks(block, f"cross.{one}") for one in "kv")
        return any(asked) or plan.recompute[block] == "full"

    here, there = [0] * len(plan.stages.where), [0] * len(plan.stages.where)
    for stage in mine:
        parts = plan.stages.parts[stage]
        # an encoder keeps no output
        blocks = [p for p in parts if p.stack == "layers" and p not in plan.marks.still]
        once = shared(plan.shape, kernels, source=any(map(reads, blocks))) if blocks else ()
        here[stage] = sum(kept(part) for part in parts if not goes(part))
        here[stage] += bytes_of(once, of, compute=plan.compute_bytes)
        there[stage] = sum(kept(part) for part in parts if goes(part))

    again = max(
        recomputed(part) + goes(part) * BLOCKS * kept(part)
        for stage in mine
        for part in plan.stages.parts[stage]
    )
    return [
        Held("activations", "device", PASSES, _in_flight(plan, rank, here)),
        Held("activations", layout.activations, PASSES, _in_flight(plan, rank, there)),
        Held("recomputed", "device", PASSES, again),
    ]


def moved_activations(plan: Plan, rank: int, kernels: Kernels) -> int:
    """Bytes of one micro-batch that the blocks of `rank` keep off the device."""
    return sum(kept_elsewhere(plan, rank, kernels).values())


def kept_elsewhere(plan: Plan, rank: int, kernels: Kernels) -> dict[Part, int]:
    """By block of `rank`, the bytes of one micro-batch that it keeps off the device."""
    if plan.layout.activations == "device":
        return {}
    of, pp_index = local_of(plan, rank), axis(plan.layout, "pp").index_of(rank)
    parts = chain(*stage_parts(plan, pp_index).values())
    kept = {
        part: saved(plan.shape, part, kernels, plan.recompute.get(part, "none"))
        for part in parts
        if part.is_block
    }
    return {part: bytes_of(one, of, compute=plan.compute_bytes) for part, one in kept.items()}


def _in_flight(plan: Plan, rank: int, per_stage: list[int]) -> int:
    """The most bytes of activations that `rank` holds at once, by the schedule.

    per_stage  bytes of one micro-batch (and token slice) on each stage
    """
    if plan.layout.schedule is None:
        return sum(per_stage)
    pp_index = axis(plan.layout, "pp").index_of(rank)
    return peak_held(steady_schedule(plan), pp_index, sizes=per_stage)
