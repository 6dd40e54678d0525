"""`howdah.verify_step`: one step of a job beside the same step of plain torch on one process.

Every process takes the whole weights, states and buffers, and computes the step of the whole batch
by itself: torch's own backward pass, torch's clipping, the user's optimizer on whole parameters.
Then all processes make the step of the layout from the same state, and compare gradients and
weights of every parameter. At the end weights, states and buffers are as before.

A batch norm in training mode normalises the rows that it sees, so its loss depends on how rows are
dealt. Such a model is compared with one process that runs the same groups of rows one after
another; every other model with one that runs the whole batch at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn

from howdah.base.errors import UserError
from howdah.foreign import rows as dealt
from howdah.foreign.job import Job

BatchNorm = nn.modules.batchnorm._BatchNorm
DROPOUT = nn.modules.dropout._DropoutNd
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-4}  # of other dtypes as many epsilons of them
FLOOR = 1e-3  # of the largest norm of a tensor: what a difference is relative to at least


@dataclass(frozen=True)
class Verdict:
    """How a layout's step differs from that of one process; `str` prints it.

    gradients, weights  the largest ‖Δ‖ / ‖reference‖ of a parameter, and its name
    bound    what they may be
    groups   groups of rows that the one process has run; 1: the whole batch at once
    """

    layout: str
    gradients: tuple[float, str]
    weights: tuple[float, str]
    bound: float
    groups: int

    @property
    def equal(self) -> bool:
        """Whether both are within the bound."""
        return self.gradients[0] <= self.bound and self.weights[0] <= self.bound

    def __str__(self) -> str:
        how = "" if self.groups == 1 else f" that runs the same {self.groups} groups of rows"
        said = "equals" if self.equal else "DIFFERS from"
        (gradient, first), (weight, second) = self.gradients, self.weights
        return (
            f"{self.layout} {said} one process{how}: gradients to {gradient:.1e} ({first}), "
            f"weights to {weight:.1e} ({second}), bound {self.bound:.0e}"
        )


def verify_step(job: Job, loss_of: Callable[..., Any], batch: Any) -> Verdict:
    """Compares one step of `job` with one process on the same whole batch; all processes call
    together. The job is then as it was, but for torch's random numbers.

    loss_of, batch  those of `Job.step`

    Raises UserError for a model with dropout that is on, whose noise differs between processes. The
    model has to fit into the memory of one process; otherwise torch's own error is raised.
    """
    if not isinstance(job, Job):
        raise UserError("verify_step takes the job that howdah.distribute has returned")
    _require_comparable(job.model)
    laid, layout = job.laid, job.layout
    micros = (layout.micros or 1) * layout.replicas
    normalises = any(isinstance(m, BatchNorm) and m.training for m in job.model.modules())
    micros = micros if normalises else 1
    with _as_it_was(job):
        gradients, weights = _alone(job, loss_of, batch, groups=micros)
    with _as_it_was(job):
        job.step(loss_of, batch)
        found = job.whole_weights("gradients"), job.whole_weights("masters")
    wide = max(laid.table.buffers, key=lambda dtype: torch.finfo(dtype).eps)
    bound = BOUNDS.get(wide, 32 * torch.finfo(wide).eps)
    return Verdict(
        str(layout),
        _largest(found[0], gradients),
        _largest(found[1], weights),
        bound=bound,
        groups=micros,
    )


def _require_comparable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, DROPOUT) and module.p > 0 and module.training:
            raise UserError(
                f"{name} drops elements by torch's random numbers, which differ between processes; "
                "compare with model.eval(), or with p = 0"
            )


def _alone(
    job: Job, loss_of: Callable[..., Any], batch: Any, *, groups: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The gradients, clipped, and the weights after a step of this process alone."""
    laid, rows = job.laid, dealt.count_rows(batch)
    whole = job.whole_weights()
    masters = {name: nn.Parameter(x) for name, x in job.whole_weights("masters").items()}
    parameters = {n: p for n, p in job.model.named_parameters() if n in whole}
    numbers = 0.0
    laid.weights.whole_again = True
    laid.weights.put_whole(whole)
    for parameter in parameters.values():
        parameter.grad = None
    try:
        for first, last in dealt.micros_of(rows, groups):
            found = loss_of(*dealt.as_arguments(dealt.cut(batch, first, last)))
            if isinstance(found, tuple | list):
                numbers += float(found[1])
                found[0].backward()
            else:
                (found * ((last - first) / rows)).backward()
        for name, parameter in parameters.items():
            given = torch.zeros_like(masters[name]) if parameter.grad is None else parameter.grad
            masters[name].grad = (given / numbers if numbers else given).to(masters[name].dtype)
            parameter.grad = None
    finally:
        laid.weights.whole_again = False
        laid.weights.put_views()
    if job.clip:
        nn.utils.clip_grad_norm_(masters.values(), job.clip, foreach=False)
    optimizer = laid.states.on_whole(masters, job.whole_states())
    optimizer.step()
    gradients = {name: x.grad for name, x in masters.items() if x.grad is not None}
    return gradients, {name: x.detach() for name, x in masters.items()}


@contextmanager
def _as_it_was(job: Job) -> Iterator[None]:
    """Puts everything back behind the block that a step changes."""
    laid = job.laid
    numbers = job.steps, job.skipped, job.seen, job.norm
    masters = [unit.masters.clone() for unit in laid.units.values()]
    states, buffers = laid.states.copied(), laid.statistics.copied()
    yield
    with torch.no_grad():
        for unit, then in zip(laid.units.values(), masters, strict=True):
            unit.masters.copy_(then)
            unit.copy_to_weights()
    laid.weights.updated()
    laid.states.put_back(states)
    laid.statistics.put_back(buffers)
    job.steps, job.skipped, job.seen, job.norm = numbers


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest difference of a tensor, relative to its norm, and its name."""
    most = max(float(x.norm()) for x in expected.values())
    differences = {}
    for name, tensor in expected.items():
        least = max(float(tensor.norm()), FLOOR * most, 1e-300)
        difference = float((found[name] - tensor).norm()) / least
        differences[name] = inf if isnan(difference) else difference
    name = max(differences, key=differences.__getitem__)
    return differences[name], name
