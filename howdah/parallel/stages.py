"""Cutting a model into stages: what a pipeline's rank builds, and what it runs for one of them.

    stage 0   embedding layers.0 layers.1       tokens → x          rank 0 builds these parts
    stage 1   layers.2 layers.3                      x → x          rank 1
    stage 2   layers.4 head                          x → loss       rank 2

From stage to stage goes the residual stream x [b, s, h] and nothing else. What all blocks need
beside it (positions, documents, angles, masks, noise) follows from the batch, which every stage
reads for itself.
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
    """What every stage is given of a micro-batch of b rows of s positions.

    tokens, labels, positions  [b, s], on the device
    documents                  [b, s], on the host
    noise                      turns dropout on
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor
    noise: Noise | None


def own_parts(plan: Plan, rank: int) -> tuple[Part, ...]:
    """The parts of the model that `rank` runs, in forward order."""
    mine = stage_parts(plan, axis(plan.layout, "pp").place(rank))
    return tuple(part for parts in mine.values() for part in parts)


def run_stage(
    model: Transformer, parts: tuple[Part, ...], x: Tensor | None, given: Given
) -> Tensor:
    """Hidden states [b, s, h] behind `parts`, from those in front of them; the first stage has
    none, and begins with the tokens.
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
    """The shape of x between stages on `rank`; under sp, its part of the positions."""
    rows, positions = given.tokens.shape
    if plan.layout.sp:
        tp = axis(plan.layout, "tp")
        start, stop = share(positions, tp.size, tp.place(rank))
        positions = stop - start
    return rows, positions, plan.shape.width
