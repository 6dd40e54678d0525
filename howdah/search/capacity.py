"""Whether this machine can hold a run, before anything of it is started.

Ranks on a CPU share the machine's memory: each holds what the plan says, the interpreter with its
libraries, and while it saves a copy of what it saves. A machine that runs out of memory ends
processes, and not always those that took it; one with many more ranks than cores crawls.
"""

from dataclasses import dataclass, replace

from howdah.base.errors import UserError, several
from howdah.base.quantities import spell
from howdah.plan.layout import Layout
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan, make_plan
from howdah.plan.support import unsupported
from howdah.search.closest import closest
from howdah.shapes.shape import parameters
from howdah.sim.memory import Held, memory, peak
from howdah.sim.predict import kernels_of

PROCESS = 220 << 20  # bytes of a rank before its first weight
SAVED = ("weights", "masters", "moments")  # components of which a checkpoint takes a copy
RANKS_PER_CORE = 16


@dataclass(frozen=True)
class Room:
    """What a machine has for a run.

    memory  bytes that are free on the host; None where the system does not tell
    cores   that may be used
    device  bytes of an accelerator, which hold the tensors in the host's place; 0 has none
    ranks   of the run that are on this machine
    """

    memory: int | None
    cores: int
    ranks: int
    device: int = 0


def refuse_too_large(plan: Plan, room: Room) -> None:
    """Raises UserError when a machine cannot hold its ranks of `plan`."""
    if problems := lacks(plan, room):
        raise UserError(f"{several(problems)}; or try all the same with --force")


def lacks(plan: Plan, room: Room) -> list[str]:
    """Why a machine cannot hold its ranks of `plan`, and what it could; empty when it can."""
    problems = []
    if room.ranks > RANKS_PER_CORE * room.cores:
        problems.append(
            f"{room.ranks} ranks on {room.cores} cores would wait for each other; this machine "
            f"takes {RANKS_PER_CORE * room.cores} at most"
        )
    each = max(_rank_bytes(plan, stage, on_host=not room.device) for stage in _stages(plan))
    if room.device and each > room.device:
        problems.append(_too_little(plan, each, room.device, "its accelerator has"))
    if not room.device and room.memory is not None and each * room.ranks > room.memory:
        ranks = "rank" if room.ranks == 1 else "ranks"
        where = f"this machine has free for {room.ranks} {ranks}"
        problems.append(_too_little(plan, each, room.memory // room.ranks, where))
    return problems


def _stages(plan: Plan) -> list[int]:
    """One rank of each pipeline stage."""
    return list(axis(plan.layout, "pp").group(0))


def _takes(plan: Plan, layout: Layout) -> int:
    """Bytes of the fullest rank on another layout with the same micro-batch."""
    batch = replace(plan.batch, global_batch=None)
    other = make_plan(plan.shape, layout, batch, sequence=plan.sequence, method=plan.method)
    return max(_rank_bytes(other, stage, on_host=True) for stage in _stages(other))


def _rank_bytes(plan: Plan, rank: int, *, on_host: bool) -> int:
    held = memory(plan, rank, kernels_of(plan))
    return peak(held) + (PROCESS + _copied(held) if on_host else 0)


def _copied(held: list[Held]) -> int:
    return sum(one.bytes for one in held if one.component in SAVED)


def _too_little(plan: Plan, each: int, there: int, where: str) -> str:
    return (
        f"{plan.layout} takes about {spell(each, 'bytes')} a rank, and {where} "
        f"{spell(there, 'bytes')} each; "
        f"{_what_would(plan, each, there)}"
    )


def _what_would(plan: Plan, each: int, there: int) -> str:
    other = closest(plan, max(there - PROCESS, 0) / 2)  # half: a save takes a copy of most of it
    if other and not unsupported(plan.shape, other) and _takes(plan, other) <= there:
        return f"layout='{other}' would fit"
    fitting = parameters(plan.shape).total * max(there - PROCESS, 0) / each / 1e6
    if fitting < 1:
        return "stop what else takes memory here, or take another machine"
    return f"of this kind a model of about {fitting:,.0f} million parameters would fit"
