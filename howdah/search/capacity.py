"""Whether a machine can hold a run, checked before any process of the run starts.

Ranks on a CPU share the machine's memory. Each rank needs the memory that the plan predicts, the
interpreter with its libraries, and, while it saves a checkpoint, a copy of what it saves. A machine
that runs out of memory kills processes, and not always those that used it. A machine with many more
ranks than cores becomes very slow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from howdah.base.errors import UserError, named, several
from howdah.base.quantities import spell
from howdah.plan.homes import homes, pool_problem
from howdah.plan.layout import Home, Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan, beside, make_plan
from howdah.plan.support import unsupported
from howdah.search.closest import closest
from howdah.shapes.parameters import parameters
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import Held, memory, peak

PROCESS = 220 << 20  # bytes of a rank's process before its first weight
SAVED = ("weights", "masters", "moments")  # components that a checkpoint copies while it is saved
RANKS_PER_CORE = 16


@dataclass(frozen=True)
class Room:
    """The resources that one machine has for a run.

    memory  free bytes of the host's memory; None if the system does not report them
    cores   CPU cores that the run may use
    ranks   number of the run's ranks on this machine
    device  bytes of one accelerator, which then holds the tensors; 0 without an accelerator
    disk    free bytes of the disk that is a home; None if no home is, or it is not known
    """

    memory: int | None
    cores: int
    ranks: int
    device: int = 0
    disk: int | None = None


def refuse_too_large(plan: Plan, room: Room) -> None:
    """Raises UserError if a machine cannot hold its ranks of `plan`."""
    if problems := lacks(plan, room):
        raise UserError(f"{several(problems)}; or try all the same with --force")


def holds(plan: Plan, room: Room) -> bool:
    """Whether a machine can hold its ranks of `plan`: `lacks`, without a word."""
    fits = not room.device or _takes(plan, on_host=False) <= room.device
    there = room.memory is None or _of_host(plan, room) <= room.memory
    return fits and there and room.ranks <= RANKS_PER_CORE * room.cores


def lacks(plan: Plan, room: Room) -> list[str]:
    """Why a machine cannot hold its ranks of `plan`, and what would fit; empty if it can."""
    problems = []
    if room.ranks > RANKS_PER_CORE * room.cores:
        problems.append(
            f"{room.ranks} ranks on {room.cores} cores would wait for each other; this machine "
            f"takes {RANKS_PER_CORE * room.cores} at most"
        )
    each = _takes(plan, on_host=not room.device)
    if room.device and each > room.device:
        problems.append(_too_little(plan, room, each, room.device, "its accelerator has"))
    if not room.device and room.memory is not None and _of_host(plan, room) > room.memory:
        ranks = "rank" if room.ranks == 1 else "ranks"
        where = f"this machine has free for {room.ranks} {ranks}"
        problems.append(_too_little(plan, room, each, room.memory // room.ranks, where))
    return [*problems, *_lacks_of_homes(plan, room)]


def _of_host(plan: Plan, room: Room) -> int:
    """Bytes of the host's memory that the ranks of a machine need; with accelerators those of
    homes, which a save does not copy.
    """
    if not room.device:
        return _together(
            plan, room, [_rank_bytes(plan, rank, on_host=True) for rank in _stages(plan)]
        )
    if "host" not in homes(plan.layout):
        return 0
    return _together(plan, room, [PROCESS + kept for kept in _kept(plan, "host")])


def _kept(plan: Plan, home: Home) -> list[int]:
    """Bytes that one rank of each stage keeps in a home."""
    return [peak(memory(plan, rank, kernels_of(plan)), home) for rank in _stages(plan)]


def _together(plan: Plan, room: Room, each: Sequence[int]) -> int:
    """What all ranks of a machine need of that; of one that has some of the ranks alone, as if all
    of them were of the fullest stage.
    """
    if room.ranks == plan.layout.world:
        return room.ranks * sum(each) // len(each)
    return room.ranks * max(each)


def _lacks_of_homes(plan: Plan, room: Room) -> Iterator[str]:
    """Yields why the homes of a layout are too small: the pool of buffers, or the disk."""
    ranks = _stages(plan)
    yield from list(filter(None, (pool_problem(plan, rank) for rank in ranks)))[:1]
    need = _of_host(plan, room) if room.device else 0
    if room.memory is not None and need > room.memory:
        yield (
            f"{plan.layout} keeps {spell(need, 'bytes')} in the memory of this host, which has "
            f"{spell(room.memory, 'bytes')} free, {spell(need - room.memory, 'bytes')} too little; "
            "use the disk for a part (optimizer=disk), or more hosts"
        )
    need = _together(plan, room, _kept(plan, "disk"))
    if room.disk is not None and need > room.disk:
        yield (
            f"{plan.layout} keeps {spell(need, 'bytes')} on the disk of "
            f"{named(plan.storage.folder)}, which has {spell(room.disk, 'bytes')} free, "
            f"{spell(need - room.disk, 'bytes')} too little; name a folder with room by "
            "storage.folder=PATH, or use the host for a part"
        )


def _stages(plan: Plan) -> list[int]:
    """One rank of each pipeline stage."""
    return list(axis(plan.layout, "pp").group(0))


def _with_batch(plan: Plan, layout: Layout) -> Plan | None:
    """The plan on another layout, with as many micro-batches as the batch then makes, and without
    the zero that one replica has no use for; None if it cannot run.
    """
    if layout.replicas == 1:
        layout = replace(layout, zero=0, shard=None, accumulate=None, release="use")
    layout = replace(layout, micros=None)
    try:
        other = make_plan(
            plan.shape, layout, plan.batch, sequence=plan.sequence, method=plan.method
        )
    except UserError:
        return None
    runs = not unsupported(other.shape, other.layout)
    return beside(plan, other) if runs else None


def _takes(plan: Plan, *, on_host: bool) -> int:
    """Bytes of the rank that needs most."""
    return max(_rank_bytes(plan, stage, on_host=on_host) for stage in _stages(plan))


def _rank_bytes(plan: Plan, rank: int, *, on_host: bool) -> int:
    held = memory(plan, rank, kernels_of(plan))
    return peak(held) + (peak(held, "host") + PROCESS + _copied(held) if on_host else 0)


def _copied(held: list[Held]) -> int:
    """What a save copies; states on the disk are not."""
    return sum(one.bytes for one in held if one.component in SAVED and one.home != "disk")


def _too_little(plan: Plan, room: Room, each: int, there: int, where: str) -> str:
    return (
        f"{plan.layout} takes about {spell(each, 'bytes')} a rank{_at_home(plan)}, and {where} "
        f"{spell(there, 'bytes')} each, {spell(each - there, 'bytes')} too little; "
        f"{_what_would(plan, room, each, there)}"
    )


def _at_home(plan: Plan) -> str:
    """What of it the host is the home of, where it is the home of anything."""
    kept = max(_kept(plan, "host")) if "host" in homes(plan.layout) else 0
    return f", {spell(kept, 'bytes')} of it in its home on the host" if kept else ""


def _what_would(plan: Plan, room: Room, each: int, there: int) -> str:
    most = room.device or max(there - PROCESS, 0) / 2  # half: a save copies most of it
    other = closest(plan, most, lambda one: room.device and not holds(one, room))
    fits = _with_batch(plan, other) if other else None
    if fits and holds(fits, room):
        return f"layout='{fits.layout}' would fit"
    fitting = parameters(plan.shape).total * max(there - PROCESS, 0) / each / 1e6
    if fitting < 1:
        return "stop what else takes memory here, or take another machine"
    return f"of this kind a model of about {fitting:,.0f} million parameters would fit"
