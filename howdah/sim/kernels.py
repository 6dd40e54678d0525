"""What the operations of howdah's own model keep, for a plan: the kernels its memory counts."""

from dataclasses import replace
from typing import Literal

from howdah.plan.plan import Plan
from howdah.shapes.activations import howdah
from howdah.shapes.kept import Kernels


def kernels_of(plan: Plan) -> Kernels:
    """What the operations of howdah's own model save for the backward pass under `plan`: those of a
    GPU, if the plan is one for GPUs (`for_gpus`).
    """
    noise, card = plan.method.dropout > 0, plan.on_gpus
    kept = howdah(compute=plan.compute_bytes, dropout=noise, packed=True, card=card)
    if plan.method.attention_dropout:  # attention as matrices, which shares key-value heads
        kept = replace(kept, flash=False, repeats=False)
    gathered, balanced = plan.layout.inputs == "gathered", plan.method.routing.adds_loss
    shared = plan.layout.cp > 1
    context: Literal["", "ring", "all-to-all", "both"] = plan.layout.context if shared else ""
    return replace(kept, gathered=gathered, balanced=balanced, context=context, marks=plan.marks)
