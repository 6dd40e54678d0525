"""A model with all its weights on one device, for sampling: never in a wider format than asked for.

    own_model     of the tensors that a rank trains: nothing is copied
    loaded_model  from files, unit by unit: no more than the weights is ever held

A rank has all weights where its layout cuts none of them: with dp, zero1 and zero2. The layout of a
flat unit is the same in both, so both compute the same bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from howdah.model.transformer import Transformer
from howdah.parallel.apply import ParallelModel
from howdah.parallel.flat_params import Fill, FlatUnit
from howdah.plan.boxes import whole
from howdah.plan.flat_buffers import buffers, pieces
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights


def own_model(placed: ParallelModel) -> Transformer | None:
    """The model of the weights that this rank trains, in the run's precision and on its device;
    None if it does not have all of them. The weights must be those of the last update.
    """
    if placed.plan.method.adapter:  # its matrices are not merged
        return None
    units = list(placed.units.values())
    mine = {name for unit in units if _is_whole(unit) for name in unit.buffer.names}
    if mine != {weight.name for weight in placed.plan.weights}:
        return None
    return _model(placed.plan.shape, {n: v for u in units for n, v in u.views(u.weights).items()})


def _is_whole(unit: FlatUnit) -> bool:
    cut = any(segment.box != whole(segment.shape) for segment in unit.buffer.segments)
    return not (cut or unit.comes)


def loaded_model(
    fill: Fill, shape: ModelShape, *, dtype: torch.dtype, device: torch.device
) -> Transformer:
    """The model whose pieces `fill` writes, of a checkpoint that any layout may have saved or of a
    Hugging Face folder. Raises UserError.
    """
    views: dict[str, Tensor] = {}
    for buffer in buffers(weights(shape)):
        flat = torch.zeros(buffer.length, dtype=dtype, device=device)
        for piece, start, stop in pieces(buffer, 0, buffer.length):
            fill(piece, flat[start:stop])
        views |= {s.name: flat[s.start : s.stop].view(s.box.size) for s in buffer.segments}
    return _model(shape, views)


def _model(shape: ModelShape, values: Mapping[str, Tensor]) -> Transformer:
    with torch.device("meta"):
        model = Transformer(shape)
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, nn.Parameter(value))
    return model
