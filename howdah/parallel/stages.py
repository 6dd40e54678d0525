"""Cuts a model into pipeline stages: which parts of it a pipeline rank builds, and how a stage
runs.

    stage 0   embedding layers.0 layers.1       tokens → x          rank 0 builds these parts
    stage 1   layers.2 layers.3                      x → x          rank 1
    stage 2   layers.4 head                          x → loss       rank 2

Only the residual stream x [b, s, h] is sent from stage to stage. The other inputs of the blocks
(positions, documents, angles, masks, noise) follow from the batch, which every stage reads itself.
"""

from dataclasses import dataclass
from typing import cast

from torch import Tensor

from howdah.model.noise import Noise
from howdah.model.transformer import Block, Transformer
from howdah.plan.flat_buffers import share
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts
from howdah.shapes.part import Part


@dataclass(frozen=True)
class Given:
    """The inputs that every stage has, for a micro-batch of b rows of s positions.

    tokens, labels, positions  [b, s], on the device
    documents                  [b, s], on the host
    noise                      the noise of dropout; None turns dropout off
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    noise: Noise | None


def own_parts(plan: Plan, rank: int) -> tuple[Part, ...]:
    """The parts of the model that `rank` runs, in forward order."""
    mine = stage_parts(plan, axis(plan.layout, "pp").index_of(rank))
    return tuple(part for parts in mine.values() for part in parts)


def run_stage(
    model: Transformer, parts: tuple[Part, ...], x: Tensor | None, given: Given
) -> Tensor:
    """Runs `parts` of the model and returns the hidden states [b, s, h] after them.

    x  the hidden states before `parts`; None for the first stage, which starts from the tokens
    """
    if "embedding" in parts:
        x = model.embed(given.tokens, given.positions, noise=given.noise)
    assert x is not None, f"{parts[0]} needs what the stage before makes"
    blocks = [str(part.layer) for part in parts if part.is_block]
    if blocks:
        context = model.context(x, given.positions, given.documents, noise=given.noise)
        for name in blocks:
            x = cast(Block, model.layers[name])(x, context)
    assert x is not None
    return model.final_norm(x) if "head" in parts else x


def boundary(plan: Plan, rank: int, given: Given) -> tuple[int, ...]:
    """The shape of x between stages on `rank`; under sp, of this rank's positions only."""
    rows, positions = given.tokens.shape
    if plan.layout.sp:
        tp = axis(plan.layout, "tp")
        start, stop = share(positions, tp.size, tp.index_of(rank))
        positions = stop - start
    return rows, positions, plan.shape.width
