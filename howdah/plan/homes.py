"""Homes: which of a rank's tensors are kept off its device, and what moves there and back.

    kind          home of          moves in a step, of the rank's own range of each unit
    weights       weights=         fetched whenever a unit is used; of a table of tokens on the
                                   host perhaps its rows, one for each token (`gather_order.py`)
    gradients     gradients=       each micro-batch adds its share there; to a table that is read
                                   by its rows, a row for each token
    masters       optimizer=       disk: fetched for the update, and evicted after it
    moments       optimizer=       likewise
    activations   activations=     evicted behind a block's forward, fetched for its backward

The update of what is not on the device runs on the host (https://arxiv.org/abs/2101.06840): there
gradients go down and weights come up, and masters and moments on the host do not move at all. The
device and the host may be one memory, as on a CPU; what moves is copied all the same.

    link   what passes over it
    host   between device and host
    disk   between the disk and memory

Masters are tensors of their own where weights are narrower, or have another home. An update takes
the units in turn through sets of buffers in the memory of the host: while one unit is updated, the
next one comes and the last one goes.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from howdah.plan.flat_buffers import Buffer
from howdah.plan.gather_order import gather_counts, rows_added, rows_read
from howdah.plan.layout import Home, Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.sharding import local_buffers, own_range
from howdah.plan.storage import SETS
from howdah.shapes.part import Part
from howdah.shapes.weights import FROZEN

AXIS = "home"  # under which moves are counted
Way = Literal["fetch", "evict"]
WAYS: tuple[Way, Way] = ("fetch", "evict")
When = Literal["passes", "norm", "update"]
NAMES = ("weights", "gradients", "optimizer", "activations")  # the words of a layout
ROOM = 16 << 20  # bytes of a room through which a GPU's moves go
ROOMS = 2  # of a direction


class Move(NamedTuple):
    """What moves in a step: so many bytes of `what`, over a link, so many times.

    when  in the passes; for the norm of the gradient, before the update; in the update
    unit  whose tensors they are
    """

    what: str
    way: Way
    link: str
    bytes: int
    times: int
    when: When = "passes"
    unit: str = ""

    @property
    def update(self) -> bool:
        """Whether it is behind the passes."""
        return self.when != "passes"

    @property
    def operation(self) -> str:
        """How the counters call it."""
        return f"{self.way} {self.what}"


def homes(layout: Layout) -> set[Home]:
    """The homes of the layout."""
    return {getattr(layout, name) for name in NAMES}


def states_away(layout: Layout) -> bool:
    """Whether weights, gradients or the optimizer's states are kept off the device."""
    return any(getattr(layout, name) != "device" for name in NAMES[:3])


def masters_apart(plan: Plan) -> bool:
    """Whether masters are tensors of their own, and not the weights themselves."""
    apart = plan.layout.weights != plan.layout.optimizer
    return apart or plan.compute_bytes != plan.master_bytes


def away_problems(layout: Layout) -> Iterator[str]:
    """Why homes of a layout cannot be run together, as sentences."""
    later = "can be planned, but not run yet"
    for name in ("weights", "gradients"):
        home = getattr(layout, name)
        if home != "device" and layout.optimizer == "device":
            yield f"{name}={home} with optimizer=device {later}; add optimizer={home}"
    if layout.server and homes(layout) != {"device"}:
        yield f"homes beside server{layout.server} {later}: the servers keep the states; drop them"
    if layout.dp is None or layout.replicas == 1:
        return
    if layout.weights != "device" and layout.zero in (1, 2):
        yield f"weights={layout.weights} with zero{layout.zero} {later}; use zero3"
    if layout.gradients != "device" and (layout.zero < 2 or layout.accumulate == "whole"):
        yield (
            f"gradients={layout.gradients} {later} where each replica keeps whole gradients; use "
            "zero2 or zero3, without accumulate=whole"
        )
    if layout.gradients == "disk" and layout.sharers < layout.replicas:
        yield f"gradients=disk with shard{layout.shard} {later}; use gradients=host"


def own_length(buffer: Buffer, plan: Plan, rank: int) -> int:
    """Elements of a unit that `rank` updates, or of one that is frozen keeps."""
    start, stop = own_range(buffer, plan.layout, rank)
    return stop - start


def set_width(plan: Plan) -> dict[str, int]:
    """Bytes of an element in each buffer of a set through which an update moves a unit."""
    layout, wide = plan.layout, plan.master_bytes
    if not states_away(layout):
        return {}
    late = plan.method.optimizer.delay  # gradients go to the state in which they wait
    found = {"gradients": wide} if layout.gradients != "host" and not late else {}
    if layout.optimizer == "disk":
        found |= dict.fromkeys(("masters", *plan.method.optimizer.states), wide)
    if layout.weights == "disk" and plan.compute_bytes != wide:
        found["weights"] = plan.compute_bytes
    return found


def sets_of(plan: Plan, rank: int) -> tuple[int, int]:
    """The sets of buffers of an update on `rank`: their number, and the elements of each buffer."""
    lengths = [n for b in _trained(plan, rank) if (n := own_length(b, plan, rank))]
    width, longest = sum(set_width(plan).values()), max(lengths, default=0)
    if not width or not longest:
        return 0, 0
    count, pool = min(SETS, len(lengths)), plan.storage.pool
    return (min(count, pool // (width * longest)) if pool else count), longest


def staged_bytes(plan: Plan, rank: int) -> int:
    """Bytes of the host's memory through which states move: the sets of an update, what a
    micro-batch is added through, and the rooms of a GPU's moves.
    """
    count, longest = sets_of(plan, rank)
    sets = count * longest * sum(set_width(plan).values())
    rooms = 2 * ROOMS * ROOM if plan.on_gpus and homes(plan.layout) != {"device"} else 0
    return sets + adding_room(plan, rank) * plan.master_bytes + rooms


def adding_room(plan: Plan, rank: int) -> int:
    """Elements through which a micro-batch is added to gradients in their home: the share of one on
    the disk; for a table that is read by its rows the sums of these rows, and the rows themselves
    where they are narrower, or on a GPU.
    """
    if plan.layout.gradients == "disk":
        return longest_share(plan, rank)
    copied = plan.compute_bytes != plan.master_bytes or plan.on_gpus
    rows = rows_added(plan)[1] if _embeds(plan, rank) else 0
    return rows * plan.shape.width * (1 + copied)


def longest_share(plan: Plan, rank: int) -> int:
    """Elements of the longest range that `rank` updates."""
    return max((own_length(b, plan, rank) for b in _trained(plan, rank)), default=0)


def _trained(plan: Plan, rank: int) -> list[Buffer]:
    return [buffer for buffer in local_buffers(plan, rank) if buffer.trains]


def pool_problem(plan: Plan, rank: int) -> str | None:
    """Why the pool of buffers is too small for `rank`; None if it is not."""
    count, longest = sets_of(plan, rank)
    if count or not longest:
        return None
    need = longest * sum(set_width(plan).values())
    largest = max(_trained(plan, rank), key=lambda b: own_length(b, plan, rank))
    return (
        f"storage.pool {plan.storage.pool:,} bytes is too small for the largest unit, "
        f"{largest.unit}, which takes {need:,}; use storage.pool={need} or more, or 0"
    )


def moves(plan: Plan, rank: int) -> Iterator[Move]:
    """The moves of weights, gradients and optimizer states of `rank` in a step."""
    if not states_away(plan.layout):
        return
    gathers = gather_counts(plan, rank) if plan.layout.weights != "device" else {}
    added, _ = rows_added(plan)
    if _embeds(plan, rank):
        yield from _of_rows(plan)
    for buffer in local_buffers(plan, rank):
        if own := own_length(buffer, plan, rank):
            times = gathers.get(buffer.unit.removeprefix(FROZEN), 0)
            for move in unit_moves(plan, own, gathers=times, micros=plan.micros):
                if not buffer.trains and (move.update or move.what != "weights"):
                    continue  # what is frozen comes, and has not changed
                if buffer.unit != added or (move.what, move.when) != ("gradients", "passes"):
                    yield move._replace(unit=buffer.unit)


def _embeds(plan: Plan, rank: int) -> bool:
    """Whether `rank` has the embedding."""
    return plan.rank_of_part[Part("embedding")] == axis(plan.layout, "pp").index_of(rank)


def _of_rows(plan: Plan) -> Iterator[Move]:
    """The moves of single rows of a table, for each micro-batch."""
    ways: dict[Way, tuple[str, int]] = {"fetch": rows_read(plan), "evict": rows_added(plan)}
    for way, (table, rows) in ways.items():
        if table:
            size = rows * plan.shape.width * plan.compute_bytes
            yield Move("rows", way, "host", size, plan.micros, unit=table)


def unit_moves(plan: Plan, own: int, *, gathers: int, micros: int) -> Iterator[Move]:
    """The moves of a unit of which a rank has `own` elements. All bytes are multiples of these.

    gathers  how often its weights come in a step
    """
    layout, wide, link = plan.layout, plan.master_bytes, plan.layout.gradients
    if layout.weights != "device":
        yield Move("weights", "fetch", layout.weights, own * plan.compute_bytes, gathers)
    if link != "device":
        yield Move("gradients", "evict", link, own * wide, micros)
    if link == "disk":  # for the sum of the micro-batches, for the norm, and for the update
        yield Move("gradients", "fetch", link, own * wide, micros - 1)
        yield Move("gradients", "fetch", link, own * wide, 1, "norm")
        yield Move("gradients", "fetch", link, own * wide, 1, "update")
    yield from _of_update(plan, own)


def _of_update(plan: Plan, own: int) -> Iterator[Move]:
    """The moves of an update of `own` elements."""
    layout, wide, narrow = plan.layout, plan.master_bytes, plan.compute_bytes
    if layout.gradients == "device":
        yield Move("gradients", "evict", "host", own * wide, 1, "update")
    if layout.optimizer == "disk":
        states = own * wide * (1 + len(plan.method.optimizer.states))
        yield Move("optimizer", "fetch", "disk", states, 1, "update")
        yield Move("optimizer", "evict", "disk", states, 1, "update")
    if layout.weights == "device":
        yield Move("weights", "fetch", "host", own * narrow, 1, "update")
    elif layout.weights == "disk" and masters_apart(plan):
        yield Move("weights", "evict", "disk", own * narrow, 1, "update")
