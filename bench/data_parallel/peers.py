"""The peers that come with torch, and Accelerate: plain training loops as their pages show them.

    DDP          DistributedDataParallel over gloo
    Accelerate   Hugging Face's Accelerator around the same model and optimizer, its own loop
    FSDP2        fully_shard on every block and on the root; weights stay whole from the forward
                 pass to the update, which makes it ZeRO-2, or, reducing once per step, ZeRO-1

Each function builds its model and returns the step. All start from howdah's weights. They get
what favours them: no all-reduce of token counts and losses, because here every micro-batch has
as many labels as any other.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from cases import RATE, SEED, Case, method
from howdahs import CPU, Place
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from howdah.model.loss import cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import random_init
from howdah.plan.boxes import whole_piece
from howdah.shapes.weights import weights
from howdah.text.batches import Micro

# One step of this rank → its loss per token, None where only other ranks have one.
Step = Callable[[Sequence[Micro]], float | None]


class MeanLoss(nn.Module):
    """howdah's Transformer and loss as one module, which is what the peers want to wrap.

    Under autocast the head is cast by hand: autocast does not reach into the backward pass of
    howdah's loss, and the peers would multiply there in float32.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        with torch.device("meta"):
            self.model = Transformer(case.shape)
        self.dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32

    def forward(
        self, tokens: Tensor, positions: Tensor, documents: Tensor, labels: Tensor
    ) -> Tensor:
        hidden = self.model(tokens, positions, documents).to(self.dtype)
        head = self.model.head_weight.to(self.dtype)
        return cross_entropy_sum(hidden, head, labels) / labels.numel()


def filled(case: Case) -> MeanLoss:
    """The model in float32, with howdah's start."""
    module = MeanLoss(case).to_empty(device=CPU)
    fill(case, module.model)
    return module


def fill(case: Case, model: nn.Module) -> None:
    """Gives the parameters of a model, or of a part of it, howdah's start."""
    parameters, table = dict(model.named_parameters()), weights(case.shape)
    filling = random_init(table, SEED)
    for weight in table:
        if weight.name in parameters:
            flat = parameters[weight.name].data.view(-1)
            filling(whole_piece(weight.name, weight.shape), flat)


def adamw(case: Case, model: nn.Module) -> torch.optim.AdamW:
    """The fused AdamW that howdah uses too, on the same two decay groups of a model, or of a part
    of it.
    """
    parameters, constants = dict(model.named_parameters()), method(case).optimizer
    groups = [
        {
            "params": [
                parameters[w.name]
                for w in weights(case.shape)
                if w.decay is decay and w.name in parameters
            ],
            "weight_decay": constants.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(
        groups, lr=RATE, betas=constants.betas, eps=constants.epsilon, fused=True
    )


def tensors(micro: Micro) -> list[Tensor]:
    """What MeanLoss takes."""
    arrays = (micro.tokens, micro.positions, micro.documents, micro.labels)
    return [torch.from_numpy(array) for array in arrays]


def ddp(case: Case, place: Place) -> Step:
    """gradient_as_bucket_view is the faster of DDP's two settings."""
    module = filled(case)
    optimizer = adamw(case, module.model)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    limit = method(case).grad_clip

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                    loss = model(*tensors(micro)) / len(micros)
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def launched(place: Place) -> None:
    """Sets what torchrun sets, for peers that learn their place from it."""
    numbers = {"RANK": place.rank, "LOCAL_RANK": place.rank, "OMP_NUM_THREADS": 1}
    numbers |= {"WORLD_SIZE": place.size, "LOCAL_WORLD_SIZE": place.size}
    os.environ.update({name: str(number) for name, number in numbers.items()})


def accelerate(case: Case, place: Place) -> Step:
    """The loop of Accelerate's documentation, with its default settings."""
    launched(place)
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.precision == "bf16" else "no",
        gradient_accumulation_steps=case.micros,
    )
    assert accelerator.num_processes == place.size
    module = filled(case)
    model, optimizer = accelerator.prepare(module, adamw(case, module.model))
    limit = method(case).grad_clip

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for micro in micros:
            with accelerator.accumulate(model):
                loss = model(*tensors(micro))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        return total / len(micros)

    return step


def fsdp2(case: Case, place: Place, *, once: bool, release: bool = False) -> Step:
    """bf16 is FSDP2's own mixed precision: float32 shards, bf16 weights, float32 reduction.

    once     gradients are kept whole and reduced with the last micro-batch alone
    release  a block's weights are let go after each of its passes, which makes it ZeRO-3
    """
    module = filled(case)
    precision = MixedPrecisionPolicy()
    if case.precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in module.model.layers.values():
        fully_shard(block, reshard_after_forward=release, mp_policy=precision)
    model = fully_shard(module, reshard_after_forward=False, mp_policy=precision)
    assert isinstance(model, FSDPModule)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo refuses the average
    optimizer, limit = adamw(case, module.model), method(case).grad_clip

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            model.set_is_last_backward(last)
            if not release:
                model.set_reshard_after_backward(last)  # weights are gathered once per step
            if once:
                model.set_requires_gradient_sync(last)
            loss = module(*tensors(micro)) / len(micros)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step
