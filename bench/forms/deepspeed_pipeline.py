"""DeepSpeed's pipeline over gloo: 1F1B over the same two stages.

    layers   embedding | blocks of stage 0 ‖ blocks of stage 1, norm | embedding, as the head

The embedding is its TiedLayerSpec, whose gradients it sums over the stages. What every block needs
beside the hidden states cannot travel with them, so each stage makes it once, before the clock:
positions are the same in every row here.

Its own clipping is off: without ZeRO it clips each stage by the norm of that stage (losses then
differ by 1e-4 after a dozen steps). Gradients are clipped in front of the optimizer by the norm of
all, as for torch's schedules.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from cases import method
from deepspeed_peer import begun
from howdahs import CPU, Place
from layouts import Form
from ours import plan_of
from peers import Step, adamw, fill
from pipelining_peer import clip_stage
from torch import Tensor, nn

from howdah.model.block import BlockContext
from howdah.model.embedding import Embedding
from howdah.model.loss import cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.text.batches import Micro


class Tied(nn.Module):
    """The embedding under the name that it has in the model."""

    def __init__(self, case: Form) -> None:
        super().__init__()
        self.embedding = Embedding(case.shape.vocab, case.shape.width)
        fill(case, self)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)


class Blocks(nn.Module):
    """The blocks of a stage; behind the last, the norm."""

    def __init__(self, case: Form, stage: int) -> None:
        super().__init__()
        parts = plan_of(case).stages.parts[stage]
        self.last = "head" in parts
        with torch.device("meta"):
            model = Transformer(case.shape, parts=parts)
            if hasattr(model, "embedding"):
                del model.embedding
        self.model = model.to_empty(device=CPU)
        fill(case, self.model)
        rows = case.rows // case.micros
        positions = torch.arange(case.sequence).expand(rows, -1)
        x = torch.empty(rows, case.sequence, case.shape.width)
        self.context: BlockContext = model.context(x, positions, torch.zeros_like(positions))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.model.layers.values():
            x = block(x, self.context)
        return self.model.final_norm(x) if self.last else x


def deepspeed_pipeline(case: Form, place: Place) -> Step:
    deepspeed = begun(place)
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        head = net.tied_modules["embedding"].embedding.weight
        return cross_entropy_sum(hidden, head, labels) / labels.numel()

    weight = "embedding.weight"
    net = PipelineModule(
        [
            TiedLayerSpec("embedding", Tied, case, tied_weight_attr=weight),
            LayerSpec(Blocks, case, 0),
            LayerSpec(Blocks, case, 1),
            TiedLayerSpec(
                "embedding", Tied, case, forward_fn=lambda _, x: x, tied_weight_attr=weight
            ),
        ],
        num_stages=place.size,
        loss_fn=loss,
        partition_method="uniform",
        activation_checkpoint_interval=0,
    )
    own, limit = _Named(net), method(case).grad_clip
    twice = own.embedding.weight if place.rank else None
    optimizer = adamw(case, own)
    optimizer.register_step_pre_hook(lambda *_: clip_stage(own, limit, counted_elsewhere=twice))
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=_settings(case))

    def step(micros: Sequence[Micro]) -> float:
        return float(engine.train_batch(_pairs(micros)))

    return step


class _Named(nn.Module):
    """The weights of this rank, under the names that they have in the model."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        for part in net.modules():
            if isinstance(part, Tied):
                self.embedding = part.embedding
            if isinstance(part, Blocks):
                self.layers = part.model.layers
                if part.last:
                    self.norm = part.model.norm


def _pairs(micros: Sequence[Micro]) -> Iterator[tuple[Tensor, Tensor]]:
    for micro in micros:
        yield torch.from_numpy(micro.tokens), torch.from_numpy(micro.labels)


def _settings(case: Form) -> dict[str, Any]:
    micro = case.rows // case.micros
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": case.micros,
        "train_batch_size": case.rows,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
