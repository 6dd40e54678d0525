"""The one device: the same training in plain PyTorch; of howdah's training code it uses only the
model.

There are no flat buffers, buckets, ranks, padding or chunks. Parameters are ordinary parameters,
the batch is processed sample by sample, the head is a matrix product and torch's cross-entropy, and
the norm and the optimizer are torch's. The results of `parallel` and `train` must agree with it.
"""

from typing import cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from howdah.base.seeds import key
from howdah.model.adapter import adapt
from howdah.model.blockwise import rounded
from howdah.model.islands import promoted
from howdah.model.noise import Noise, fill_even, fill_normal
from howdah.model.transformer import Transformer
from howdah.parallel.flat_params import DTYPES
from howdah.plan.batch import MASKED
from howdah.plan.method import Optimizer
from howdah.text.batches import Micro
from howdah.verify.case import Case
from howdah.verify.evidence import Evidence, global_batch, rate_of
from howdah.verify.routers import HeardRouters


def reference(case: Case, *, backwards: bool = False, wide: bool = False) -> Evidence:
    """Runs the case on one device. Both options change only the rounding:

    backwards  add up the samples in the opposite order
    wide       use the same weights, but compute everything in at least float32
    """
    dtype = DTYPES[case.method.precision]
    dtype = promoted(dtype) if wide else dtype
    drops = {name: getattr(case.method, name) for name in ("dropout", "attention_dropout")}
    model = Transformer(case.shape, **drops)
    adapt(model, case.plan.marks, case.method.adapter)
    model = model.to(dtype)
    masters, routers = _fill(model, case), HeardRouters(model, case.method.routing)
    optimizer = _optimizer(case, masters)
    losses, norms, gradients = [], [], {}
    late: dict[str, Tensor | None] = dict.fromkeys(masters)  # gradients that wait, with a delay
    for step in range(case.steps):
        loss = _accumulate(model, case, step, routers, backwards=backwards)
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad
        if step == 0:
            trained = [n for n, one in model.named_parameters() if one.requires_grad]
            gradients = {name: _array(masters[name].grad) for name in trained}
        limit = case.method.grad_clip or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), limit)))
        for group in optimizer.param_groups:
            group["lr"] = rate_of(case, step) * group["factor"]
        if case.method.optimizer.delay:
            for name, master in masters.items():
                waited, late[name] = late[name], torch.clone(cast(Tensor, master.grad))
                master.grad = waited  # torch leaves out what has none
        optimizer.step()
        routers.move_biases({name: masters[name] for name in trained})
        for name, parameter in model.named_parameters():
            _give(parameter, masters[name], case)
        losses.append(loss)
    return Evidence(losses, norms, gradients, {n: _array(m) for n, m in masters.items()})


def _fill(model: Transformer, case: Case) -> dict[str, Tensor]:
    """Fills the model with random weights. Returns their masters, by name, in at least float32."""
    masters = {}
    parameters = dict(model.named_parameters())
    for weight in case.plan.weights:
        parameter = parameters[weight.name]
        master = torch.empty(weight.elements, dtype=promoted(parameter.dtype))
        name = key(case.seed, "weight", weight.name)
        if weight.even:
            fill_even(master, key=name, reach=weight.spread)
        else:
            fill_normal(master, key=name, mean=weight.mean, spread=weight.spread)
        masters[weight.name] = master.view(weight.shape)
        parameter.requires_grad_(weight.rate > 0)
        _give(parameter, masters[weight.name], case)
        if parameter.dtype != master.dtype:
            parameter.grad_dtype = master.dtype
    return masters


def _give(parameter: Tensor, master: Tensor, case: Case) -> None:
    """Sets a parameter to its master, rounded as the method says of weights in use."""
    weight = master.to(DTYPES[case.method.precision])
    parameter.data.copy_(rounded(weight) if case.method.gather_dtype == "int8" else weight)


def _accumulate(
    model: Transformer, case: Case, step: int, routers: HeardRouters, *, backwards: bool
) -> float:
    """Computes the gradients of the mean loss over the batch's tokens, one sample at a time.
    Returns that loss.
    """
    batch = global_batch(case, step)
    valid = int((batch.labels != MASKED).sum())
    model.zero_grad()
    total = 0.0
    rows = range(len(batch.samples))
    for row in reversed(rows) if backwards else rows:
        loss = _sample_loss(model, case, batch, routers, (row, step))
        (loss / valid).backward()
        total += float(loss.detach())
    return total / valid


def _sample_loss(
    model: Transformer, case: Case, batch: Micro, routers: HeardRouters, of: tuple[int, int]
) -> Tensor:
    """The summed loss of one sample; `of` is its row of the batch, and the step."""
    row, step = of
    tokens, positions, labels, documents, samples = (
        torch.from_numpy(array[row : row + 1])
        for array in (batch.tokens, batch.positions, batch.labels, batch.documents, batch.samples)
    )
    noise, labelled = Noise(case.seed, step, samples), int((labels != MASKED).sum())
    asked = routers.balancing(labelled)
    more = {name: torch.from_numpy(array[row : row + 1]) for name, array in batch.more.items()}
    hidden = model(tokens, positions, documents, noise=noise, balancing=asked, **more)
    logits = model.logits(hidden)[0]  # with the bias of the head, if it has one
    wide = logits.to(promoted(logits.dtype))
    smoothing, z = case.method.label_smoothing, case.method.z_loss
    sizes = wide.logsumexp(-1).square()[labels[0] != MASKED]
    loss = F.cross_entropy(
        wide, labels[0], reduction="sum", ignore_index=MASKED, label_smoothing=smoothing
    )
    loss = loss + routers.losses(labelled)
    return loss + z * sizes.sum() if z else loss


def _optimizer(case: Case, masters: dict[str, Tensor]) -> torch.optim.Optimizer:
    settings = case.method.optimizer
    groups = [
        {
            "params": [masters[weight.name]],
            "weight_decay": settings.weight_decay if weight.decay else 0.0,
            "factor": weight.rate,
        }
        for weight in case.plan.weights
        if weight.rate
    ]
    return _torch_optimizer(settings, groups)


def _torch_optimizer(settings: Optimizer, groups: list[dict[str, object]]) -> torch.optim.Optimizer:
    if settings.name == "adamw":
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)
    if settings.name == "adam":
        return torch.optim.Adam(groups, betas=settings.betas, eps=settings.epsilon)
    if settings.name == "sgd":
        return torch.optim.SGD(groups, momentum=settings.momentum)
    return torch.optim.RMSprop(
        groups, alpha=settings.betas[1], eps=settings.epsilon, momentum=settings.momentum
    )


def _array(tensor: Tensor | None) -> npt.NDArray[np.float64]:
    assert tensor is not None
    return tensor.to(torch.float64).numpy().copy()
