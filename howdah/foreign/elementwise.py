"""Which optimizers may update a range of elements without the rest of their parameter.

Shares of flat buffers are cut at any element. An optimizer that treats each element by itself (and
counts its steps) updates a share as it would the whole. One that looks at rows, matrices or the
whole model does not, and is refused by name. A class that is not torch's is tried: three updates of
a small matrix, whole and in two parts, have to give equal bits.
"""

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from howdah.base.errors import UserError, brief, shown

ELEMENTWISE = (
    *("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop"),
    *("Rprop", "ASGD"),
)
REFUSED = {
    "LBFGS": "searches along a direction of all parameters, and calls the loss several times",
    "Adafactor": "keeps sums over rows and columns of each matrix",
    "Muon": "makes each matrix orthogonal",
    "SparseAdam": "takes sparse gradients, and flat buffers are dense",
}
OTHERS = "take one that treats each element by itself, such as AdamW or SGD"


def require_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raises UserError when the optimizer cannot update shares of parameters."""
    kind = type(optimizer)
    name, torchs = kind.__name__, kind.__module__.startswith("torch.optim")
    if torchs and name in REFUSED:
        raise UserError(f"{name} {REFUSED[name]}; a process has a share of elements: {OTHERS}")
    if torchs and name in ELEMENTWISE:
        return
    try:
        whole, parts = _updated(optimizer, cut=False), _updated(optimizer, cut=True)
    except Exception as error:  # of somebody else's class
        raise UserError(
            f"{name} could not be tried on shares of a parameter ({shown(brief(error))}); {OTHERS}"
        ) from None
    if not torch.equal(whole, parts):
        raise UserError(
            f"{name} updates a part of a matrix in another way than the whole; a process has a "
            f"share of elements: {OTHERS}"
        )


def _updated(optimizer: torch.optim.Optimizer, *, cut: bool) -> Tensor:
    """A matrix of 4 rows after three updates, of the whole or of parts of 5 and 11 elements."""
    generator = torch.Generator().manual_seed(1)
    start, *gradients = torch.randn(4, 16, generator=generator, dtype=torch.float64).unbind()
    parts = (start[:5], start[5:]) if cut else (start.view(4, 4),)
    parameters = [nn.Parameter(part.clone()) for part in parts]
    fresh = another(optimizer, parameters)
    for gradient in gradients:
        given = (gradient[:5], gradient[5:]) if cut else (gradient.view(4, 4),)
        for parameter, part in zip(parameters, given, strict=True):
            parameter.grad = part.clone()
        fresh.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in parameters])


def another(optimizer: torch.optim.Optimizer, parameters: Any) -> torch.optim.Optimizer:
    """An optimizer of the same class and settings with other parameters, or groups of them."""
    kind: Any = type(optimizer)
    takes = signature(kind.__init__).parameters
    found: torch.optim.Optimizer = kind(
        parameters, **{key: value for key, value in optimizer.defaults.items() if key in takes}
    )
    return found


def groups_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """By name of a trained parameter, the number of its group of the optimizer. Raises UserError
    unless the optimizer has these parameters and no others.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    groups: dict[str, int] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise UserError(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is none "
                    "of this model's; build it from model.parameters(), after the model has its "
                    "dtype and device"
                )
            if parameter.requires_grad:
                groups[names[id(parameter)]] = number
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in groups:
            raise UserError(
                f"the optimizer lacks the parameter {name}; give it, or freeze it with "
                "requires_grad_(False)"
            )
    if not groups:
        raise UserError("no parameter of the model is trained: all have requires_grad=False")
    return {name: groups[name] for name, _ in model.named_parameters() if name in groups}
