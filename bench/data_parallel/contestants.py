"""The contestants: four ways to do one step of the same training on this rank.

    howdah       flat gradients, summed bucket by bucket while backward runs
    DDP          torch's DistributedDataParallel over gloo, a plain training loop
    Accelerate   Hugging Face's Accelerator around the same model and optimizer, its own loop
    bound        howdah's step on each rank for itself: no gradient is exchanged, so nobody who
                 takes the same step can be faster

Each is a function that builds its model and returns the step. All start from equal weights. The
peers get what favours them: no all-reduce of token counts and losses, because here every
micro-batch has as many labels as any other.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from cases import RATE, SEED, Case, method
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from howdah.comm.transport import Alone, Transport
from howdah.model.loss import cross_entropy_sum
from howdah.model.transformer import Transformer
from howdah.parallel.apply import apply
from howdah.parallel.flatten import fresh
from howdah.parallel.mesh import connect_mesh
from howdah.plan.boxes import whole_piece
from howdah.plan.layout import Layout
from howdah.plan.sharding import weights
from howdah.text.batches import Micro
from howdah.train.step import Stepper, train_step

Step = Callable[[Sequence[Micro]], float]  # one step of this rank → its loss per token

CPU = torch.device("cpu")


# -- howdah, with and without an exchange -------------------------------------------


def howdah(case: Case, transport: Transport) -> Step:
    return _howdah(case, case.layout, transport)


def bound(case: Case, transport: Transport) -> Step:
    return _howdah(case, Layout(1, case.micros), Alone())


def _howdah(case: Case, layout: Layout, transport: Transport) -> Step:
    mesh, recipe = connect_mesh(layout, transport, CPU), method(case)
    fill = fresh(weights(case.shape), SEED)
    placed = apply(case.shape, mesh=mesh, method=recipe, fill=fill)
    stepper, done = Stepper(placed, mesh, recipe, SEED), 0

    def step(micros: Sequence[Micro]) -> float:
        nonlocal done
        done += 1
        return train_step(stepper, micros, step=done, rate=RATE).loss

    return step


# -- the peers ----------------------------------------------------------------------


class MeanLoss(nn.Module):
    """howdah's Transformer and loss as one module, which is what DDP wants to wrap.

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


def _peer(case: Case) -> tuple[MeanLoss, torch.optim.AdamW]:
    """The float32 model with howdah's start, and the fused AdamW that howdah uses too."""
    module = MeanLoss(case).to_empty(device=CPU)
    parameters = dict(module.model.named_parameters())
    table = weights(case.shape)
    fill = fresh(table, SEED)
    for weight in table:
        flat = parameters[weight.name].data.view(-1)
        fill(whole_piece(weight.name, weight.shape), flat)
    constants = method(case).optimizer
    groups = [
        {
            "params": [parameters[weight.name] for weight in table if weight.decay is decay],
            "weight_decay": constants.decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return module, torch.optim.AdamW(
        groups, lr=RATE, betas=constants.betas, eps=constants.epsilon, fused=True
    )


def _tensors(micro: Micro) -> list[Tensor]:
    arrays = (micro.tokens, micro.positions, micro.documents, micro.labels)
    return [torch.from_numpy(array) for array in arrays]


def ddp(case: Case, transport: Transport) -> Step:
    """gradient_as_bucket_view is the faster of DDP's two settings."""
    module, optimizer = _peer(case)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    limit = method(case).optimizer.clip

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for number, micro in enumerate(micros):
            last = number == len(micros) - 1
            with nullcontext() if last else model.no_sync():
                with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
                    loss = model(*_tensors(micro)) / len(micros)
                loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def accelerate(case: Case, transport: Transport) -> Step:
    """The loop of Accelerate's documentation, with its default settings."""
    # it learns its place from what torchrun sets, and takes the process group that is there
    place = {"RANK": transport.rank, "LOCAL_RANK": transport.rank, "OMP_NUM_THREADS": 1}
    place |= {"WORLD_SIZE": transport.size, "LOCAL_WORLD_SIZE": transport.size}
    os.environ.update({name: str(number) for name, number in place.items()})
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.precision == "bf16" else "no",
        gradient_accumulation_steps=case.micros,
    )
    assert accelerator.num_processes == transport.size
    model, optimizer = accelerator.prepare(*_peer(case))
    limit = method(case).optimizer.clip

    def step(micros: Sequence[Micro]) -> float:
        total = 0.0
        for micro in micros:
            with accelerator.accumulate(model):
                loss = model(*_tensors(micro))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), limit)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item()
        return total / len(micros)

    return step


CONTESTANTS: dict[str, Callable[[Case, Transport], Step]] = {
    "howdah": howdah,
    "DDP": ddp,
    "Accelerate": accelerate,
    "bound": bound,
}
