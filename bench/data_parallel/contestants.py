"""Who takes part, as a table, and at which stage of ZeRO each is compared.

    stage 0   howdah   howdah over gloo                      DDP    Accelerate           bound
    stage 1   howdah zero1                                   FSDP2  DeepSpeed ZeRO-1     bound
    stage 2   howdah zero2   howdah zero2 accumulate=whole   FSDP2  DeepSpeed ZeRO-2     bound

A stage is judged by its first contestant. FSDP2 is its own stage 2; told to reduce once per step
it does what stage 1 does. With one micro-batch per step that is the same program, which then
runs once and stands in both tables; so are howdah's two ways to accumulate.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any, Literal

from cases import Case
from deepspeed_peer import AVAILABLE, deepspeed_zero
from howdahs import Place, alone, on_engine, over_gloo, silent
from peers import Step, accelerate, ddp, fsdp2

Kind = Literal["ours", "variant", "peer", "bound"]


@dataclass(frozen=True)
class Contestant:
    """One way to take the step.

    kind    ours: what users get by the stage's word; variant: howdah in another way; peer; bound
    stages  the tables in which it stands, by stage of ZeRO or by another name
    build   makes the step of a case on this rank
    """

    name: str
    kind: Kind
    stages: tuple[int | str, ...]
    build: Callable[[Case, Place], Step]


def contestants(case: Case) -> list[Contestant]:
    """Those of a case, in the order of the first repeat."""
    one = case.micros == 1
    some = [
        _one("howdah", "ours", 0, on_engine, words=""),
        _one("howdah over gloo", "variant", 0, over_gloo, words=""),
        _one("DDP", "peer", 0, ddp),
        _one("Accelerate", "peer", 0, accelerate),
        _one("bound", "bound", 0, alone),
        _one("howdah zero1", "ours", 1, on_engine, words="zero1"),
        _one("howdah zero2", "ours", 2, on_engine, words="zero2"),
        Contestant("bound of shares", "bound", (1, 2), silent),
    ]
    if one:
        some.append(Contestant("FSDP2", "peer", (1, 2), partial(fsdp2, once=True)))
    else:
        words = "zero2 accumulate=whole"
        some += [
            _one(f"howdah {words}", "variant", 2, on_engine, words=words),
            _one("FSDP2, reducing once", "peer", 1, fsdp2, once=True),
            _one("FSDP2", "peer", 2, fsdp2, once=False),
        ]
    if AVAILABLE:
        some += [
            _one(f"DeepSpeed ZeRO-{stage}", "peer", stage, deepspeed_zero, stage=stage)
            for stage in (1, 2)
        ]
    return some


def _one(name: str, kind: Kind, at: int, build: Callable[..., Step], **more: Any) -> Contestant:
    return Contestant(name, kind, (at,), partial(build, **more))


def installed(*names: str) -> str:
    """The peers that are no part of torch, in a sentence; `names` beside DeepSpeed."""
    names = (*names, "deepspeed") if AVAILABLE else names
    found = " and ".join(f"{name} {version(name)}" for name in names) or "none"
    return f"Peers beside torch: {found}." + (
        "" if AVAILABLE else " DeepSpeed is not installed here and did not take part."
    )
