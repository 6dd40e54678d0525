"""Who takes part, by layout; a table is judged by its first contestant.

    tp2              howdah            DTensor                                bound: parts alone
    pp2    gpipe     howdah gpipe      torch GPipe                            bound: stages alone
           1f1b      howdah 1f1b       torch 1F1B          DeepSpeed 1F1B     bound: stages alone
    dp2 zero3        howdah            FSDP2               DeepSpeed ZeRO-3   bound: replicas alone
    dp2 tp2          howdah            DTensor and DDP     DTensor and FSDP2  bound: parts alone
    cp2              howdah, ring and  all-gather          DeepSpeed Ulysses  bound: half the rows
                     all-to-all        ring-attention-pytorch
    dp2 ep2          howdah            all-to-all          DeepSpeed-MoE      bound: half of experts

Everywhere howdah stands once more over gloo.
"""

from functools import partial

from contestants import Contestant
from context_peers import RING, all_gather, ring, ulysses
from deepspeed_experts import deepspeed_experts
from deepspeed_peer import AVAILABLE, deepspeed_zero
from deepspeed_pipeline import deepspeed_pipeline
from dtensor_peer import dtensor
from expert_peers import all_to_all
from howdahs import silent
from layouts import Form
from ours import experts_alone, half_alone, on_engine, over_gloo, part_alone, stages_alone
from peers import fsdp2
from pipelining_peer import pipelining


def entrants(case: Form) -> list[Contestant]:
    """Those of a case, in the order of the first repeat. All start from the same weights."""
    made = {
        "tp2": _tp,
        "pp2": _pp,
        "dp2 zero3": _zero3,
        "dp2 tp2": _dp_tp,
        "cp2": _cp,
        "dp2 ep2": _ep,
    }
    return made[case.layout]()


def tables(case: Form) -> tuple[str, ...]:
    """The tables of a case: its schedules, where it has stages."""
    return ("gpipe", "1f1b") if case.layout == "pp2" else (case.layout,)


def _tp() -> list[Contestant]:
    at = ("tp2",)
    return [
        Contestant("howdah", "ours", at, on_engine),
        Contestant("howdah over gloo", "variant", at, over_gloo),
        Contestant("DTensor", "peer", at, dtensor),
        Contestant("bound", "bound", at, part_alone),
    ]


def _pp() -> list[Contestant]:
    some = []
    for words, torchs in (("gpipe", "torch GPipe"), ("1f1b", "torch 1F1B")):
        at = (words,)
        some += [
            Contestant(f"howdah {words}", "ours", at, partial(on_engine, words=words)),
            Contestant(f"howdah {words} over gloo", "variant", at, partial(over_gloo, words=words)),
            Contestant(torchs, "peer", at, partial(pipelining, schedule=words)),
        ]
    if AVAILABLE:
        some.append(Contestant("DeepSpeed 1F1B", "peer", ("1f1b",), deepspeed_pipeline))
    return [*some, Contestant("bound", "bound", ("gpipe", "1f1b"), stages_alone)]


def _zero3() -> list[Contestant]:
    at = ("dp2 zero3",)
    some = [
        Contestant("howdah", "ours", at, on_engine),
        Contestant("howdah over gloo", "variant", at, over_gloo),
        Contestant("FSDP2", "peer", at, partial(fsdp2, once=False, release=True)),
    ]
    if AVAILABLE:
        some.append(Contestant("DeepSpeed ZeRO-3", "peer", at, partial(deepspeed_zero, stage=3)))
    return [*some, Contestant("bound", "bound", at, silent)]


def _dp_tp() -> list[Contestant]:
    at = ("dp2 tp2",)
    return [
        Contestant("howdah", "ours", at, on_engine),
        Contestant("howdah over gloo", "variant", at, over_gloo),
        Contestant("DTensor and DDP", "peer", at, partial(dtensor, over="DDP")),
        Contestant("DTensor and FSDP2", "peer", at, partial(dtensor, over="FSDP2")),
        Contestant("bound", "bound", at, part_alone),
    ]


def _cp() -> list[Contestant]:
    at, trade = ("cp2",), "context=all-to-all"
    some = [
        Contestant("howdah", "ours", at, on_engine),
        Contestant("howdah all-to-all", "variant", at, partial(on_engine, words=trade)),
        Contestant("howdah over gloo", "variant", at, over_gloo),
        Contestant("all-gather by torch", "peer", at, all_gather),
    ]
    if AVAILABLE:
        some.append(Contestant("DeepSpeed Ulysses", "peer", at, ulysses))
    if RING:
        some.append(Contestant("ring-attention-pytorch, mended", "peer", at, ring))
    return [*some, Contestant("bound", "bound", at, half_alone)]


def _ep() -> list[Contestant]:
    at = ("dp2 ep2",)
    some = [
        Contestant("howdah", "ours", at, on_engine),
        Contestant("howdah over gloo", "variant", at, over_gloo),
        Contestant("all-to-all by torch", "peer", at, all_to_all),
    ]
    if AVAILABLE:
        some.append(Contestant("DeepSpeed-MoE", "peer", at, deepspeed_experts))
    return [*some, Contestant("bound", "bound", at, experts_alone)]
