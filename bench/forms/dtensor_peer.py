"""torch's tensor parallelism: DTensor and `parallelize_module`, as its pages and torchtitan do it.

    q, k, v, gate, up   ColwiseParallel; their input becomes a DTensor once for each sub-layer
                        (PrepareModuleInput), so that one all-reduce serves them all in backward
    o, down             RowwiseParallel
    embedding           RowwiseParallel: by rows of the vocabulary
    head and loss       the embedding's rows; cross_entropy under `loss_parallel`: no logits travel
    norms               plain tensors

The model is howdah's Transformer with one change: its embedding is torch's nn.Embedding, because
RowwiseParallel takes no other. Gradients are clipped by their local pieces and one scalar sum;
`clip_grad_norm_` refuses a mixture of DTensors and plain tensors.

With replicas as well, on a mesh of two dims: DistributedDataParallel over the first, or FSDP2
on every block and on the root, with weights that stay whole until the backward pass is done.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from cases import method
from howdahs import Place
from layouts import Form
from peers import Step, adamw, filled, tensors
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from howdah.model.transformer import Transformer
from howdah.text.batches import Micro

Over = Literal["", "DDP", "FSDP2"]
UNCUT = ("norm",)  # what the name of a weight holds that every part has whole


class PartLoss(nn.Module):
    """Model and loss; the logits of each token are cut by rows of the vocabulary."""

    def __init__(self, model: Transformer, mesh: DeviceMesh) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, labels: Tensor
    ) -> Tensor:
        hidden = self.model(tokens, positions, documents).flatten(0, 1)
        states = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        logits = F.linear(states, self.model.head_weight)
        loss = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        assert isinstance(loss, DTensor)
        return loss.to_local() / labels.numel()


def dtensor(case: Form, place: Place, *, over: Over = "") -> Step:
    """Tensor parallelism, and replicas `over` one of torch's two ways."""
    layout = case.parsed
    mesh = init_device_mesh("cpu", (layout.replicas, layout.tp), mesh_dim_names=("dp", "tp"))
    model = filled(case).model
    model.embedding = nn.Embedding(  # type: ignore[assignment]
        case.shape.vocab, case.shape.width, _weight=model.embedding.weight.detach()
    )
    parallelize_module(model, mesh["tp"], _styles(case))
    module = PartLoss(model, mesh["tp"])
    outside: nn.Module = module
    if over == "DDP":
        outside = DistributedDataParallel(
            module, device_mesh=mesh["dp"], gradient_as_bucket_view=True
        )
    elif over == "FSDP2":
        _shard(module, mesh["dp"])
    optimizer, limit = adamw(case, model), method(case).grad_clip
    parameters = dict(model.named_parameters())  # DDP puts others in the model in each pass
    summed = dist.group.WORLD if over == "FSDP2" else mesh.get_group("tp")

    def step(micros: Sequence[Micro]) -> float:
        (micro,) = micros
        with loss_parallel():
            loss = outside(*tensors(micro))
            loss.backward()
        _clip(parameters, limit, parts=layout.tp, summed=summed)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _styles(case: Form) -> dict[str, ParallelStyle]:
    """The plan of `parallelize_module`."""
    styles: dict[str, ParallelStyle] = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    for number in range(case.shape.layers):
        for name, columns, rows, arguments in (
            ("attention", ("q", "k", "v"), "o", 4),
            ("feedforward", ("gate", "up"), "down", 1),
        ):
            path = f"layers.{number}.{name}"
            first = (Replicate(), *[None] * (arguments - 1))
            styles[path] = PrepareModuleInput(
                input_layouts=first, desired_input_layouts=first, use_local_output=False
            )
            styles |= {f"{path}.{column}": ColwiseParallel() for column in columns}
            styles[f"{path}.{rows}"] = RowwiseParallel()
    return styles


def _shard(module: PartLoss, mesh: DeviceMesh) -> None:
    for block in module.model.layers.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo refuses the average


@torch.no_grad()
def _clip(
    parameters: dict[str, nn.Parameter],
    limit: float,
    *,
    parts: int,
    summed: dist.ProcessGroup | None,
) -> None:
    """To the norm of the whole gradient: what all parts hold alike counts once.

    summed  the ranks that hold different pieces of one gradient
    """
    local = {n: _local(p.grad) for n, p in parameters.items() if p.grad is not None}
    norms = torch.stack(torch._foreach_norm(list(local.values())))
    once = torch.tensor([parts if any(u in n for u in UNCUT) else 1 for n in local])
    square = (norms.square() / once).sum()
    dist.all_reduce(square, group=summed)
    scale = (limit / (square.sqrt() + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(list(local.values()), scale)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
