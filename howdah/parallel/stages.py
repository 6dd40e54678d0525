"""Cuts a model into pipeline stages: which parts of it a pipeline rank builds, and how a stage
runs.

    stage 0   embedding layers.0 layers.1       tokens → hidden     rank 0 builds these parts
    stage 1   layers.2 layers.3                 hidden → hidden     rank 1
    stage 2   layers.4 head                     hidden → loss       rank 2

A boundary between two stages is a set of named tensors. Of a decoder that is the residual stream
alone, `hidden` [b, s, h]; behind an encoder also what that has made, `source` [b, t, h], which
rides through all stages of the decoder. The other inputs of the blocks (positions, documents,
angles, masks, noise) follow from the batch, which every stage reads itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from howdah.model.block import BlockContext
from howdah.model.moe import Balancing
from howdah.model.noise import Noise
from howdah.model.transformer import Transformer
from howdah.plan.flat_buffers import share
from howdah.plan.mesh_axes import axis
from howdah.plan.plan import Plan
from howdah.plan.program import stage_parts
from howdah.shapes.part import Part

Boundary = Mapping[str, Tensor]


@dataclass(frozen=True)
class Given:
    """The inputs that every stage has, for a micro-batch of b rows of s positions.

    tokens, labels, positions  [b, s], on the device
    documents                  [b, s] on a CPU. On a GPU the starts of `documents.Cuts`, or None if
                               each row is one document
    noise                      the noise of dropout; None turns dropout off
    labelled                   [b] labelled tokens of whole samples, if the rank has a part of them
    more                       further arrays of the batch by name, [b, s], such as token_types; for
                               an encoder in front `source`, and of whole samples what is `seen` of
                               it (`model/transformer.py`)
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    documents: Tensor | None
    noise: Noise | None
    labelled: Tensor | None = None
    more: Mapping[str, Tensor] = field(default_factory=dict)


def own_parts(plan: Plan, rank: int) -> tuple[Part, ...]:
    """The parts of the model that `rank` runs, in forward order."""
    mine = stage_parts(plan, axis(plan.layout, "pp").index_of(rank))
    return tuple(part for parts in mine.values() for part in parts)


def run_stage(  # noqa: PLR0913 (facts that have nothing in common, most by keyword)
    model: Transformer,
    parts: tuple[Part, ...],
    inputs: Boundary,
    given: Given,
    await_weights: Callable[[Part], None] = lambda part: None,
    *,
    balancing: Balancing | None = None,
    starts: Part | None = None,
) -> Boundary:
    """Runs `parts` of the model on what the stage before has made; returns what they make. For the
    head that is its input.

    await_weights  called before each part with weights: they may be on their way from other ranks
    balancing      what training asks of the routers of experts
    starts         the part at whose input a backward pass ends, as all before it is frozen. In a
                   decoder it also ends at the encoder's output; and where it starts in the encoder,
                   at the target's embedding, which is frozen, too
    """
    x, source = inputs.get("hidden"), inputs.get("source")
    context: BlockContext | None = None
    blocks = {block.part: block for block in model.blocks}
    for part in parts:
        await_weights(part)
        if part == "embedding":
            tokens, types = given.more.get("source", given.tokens), given.more.get("token_types")
            x = model.embed(tokens, given.positions, types, noise=given.noise)
            continue
        assert x is not None, f"{part} needs what the part before it makes"
        if part == starts:
            x = _rooted(x)
            source = None if source is None else _rooted(source)
            context = context and replace(context, source=source)
        if part == "target":
            source, context = x, None
            x = model.embed(given.tokens, given.positions, noise=given.noise, place="target")
            x = _rooted(x) if starts and starts.stack == "encoder" else x
            continue
        if part == "head":
            x = model.final_norm(x, given.noise)
            continue
        if context is None:
            context = _context(model, part, x, source, given)
            context = replace(context, balancing=balancing)
        x = blocks[part](x, context)
        if part == model.last_of_encoder:
            x = model.encoder_norm(x)
    assert x is not None
    return {"hidden": x} if source is None else {"hidden": x, "source": source}


def _rooted(x: Tensor) -> Tensor:
    """x, with a gradient: a graph begins there, if one does not pass through it."""
    return x if x.requires_grad or not torch.is_grad_enabled() else x.detach().requires_grad_()


def _context(
    model: Transformer, part: Part, x: Tensor, source: Tensor | None, given: Given
) -> BlockContext:
    """The context of the blocks of a stack, of which `part` is the first here."""
    if not model.shape.encoder_layers:
        return model.context(x, given.positions, given.documents, noise=given.noise)
    seen, length = given.more["seen"], model.length or given.tokens.shape[1]
    if part.stack == "encoder":
        return model.source_context(x.device, length, seen, noise=given.noise)
    assert source is not None, f"{part} needs what the encoder makes"
    return model.target_context(source, length, seen, noise=given.noise)


def boundary(plan: Plan, rank: int, stage: int, given: Given) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that a stage sends to the next on `rank`; under sp, of this rank's
    positions.
    """
    rows, positions = given.tokens.shape
    if plan.layout.sp:
        tp = axis(plan.layout, "tp")
        start, stop = share(positions, tp.size, tp.index_of(rank))
        positions = stop - start
    return dict.fromkeys(plan.boundary(stage), (rows, positions, plan.shape.width))
