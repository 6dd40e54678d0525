"""What a task asks of a model that reads a text as a whole, on one device or on several ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from howdah.generate.placed import PlacedModel
from howdah.model.transformer import Transformer


class WholeModel:
    """A model on one device, with what `PlacedModel` has for texts that are read."""

    def __init__(self, model: Transformer) -> None:
        self._model, self.device = model, model.embedding.weight.device

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Tensor:
        """The last hidden states [b, s, h] of tokens [b, s], in front of the head; of an
        encoder-decoder those of the encoder.
        """
        model = self._model
        if model.shape.encoder_layers:
            return model.encode(tokens, None)
        x = self._read(tokens)
        return model.norm(x) if model.shape.norm_at == "before" else x

    @torch.no_grad()
    def scores(self, tokens: Tensor, places: Sequence[int]) -> Tensor:
        """What the head says [n, V] of some places of a text [1, s]."""
        return self._model.logits(self._model.final_norm(self._read(tokens)[0, places]))

    def _read(self, tokens: Tensor) -> Tensor:
        """What the last block makes [b, s, h] of tokens [b, s]."""
        positions = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        x = self._model.embed(tokens, positions)
        context = self._model.context(x, positions, None)
        for block in self._model.layers.values():
            x = block(x, context)
        return x


Reader = WholeModel | PlacedModel


def reader(model: Transformer | PlacedModel) -> Reader:
    """A model as one that reads."""
    return model if isinstance(model, PlacedModel) else WholeModel(model)
