"""Everything wrong with a plan, as sentences, all at once, before any device is touched."""

from math import inf

from howdah.plan.batch import Batch
from howdah.plan.method import Method, Optimizer, Rate
from howdah.plan.shapes import ModelShape, check_shape


def check_plan(shape: ModelShape, method: Method, batch: Batch, *, sequence: int) -> list[str]:
    """The problems of a run's model, method and batch; empty when it can start."""
    problems = check_shape(shape)
    if sequence < 1:
        problems.append(f"data.sequence is {sequence}; it must be at least 1")
    if sequence > shape.context:
        problems.append(
            f"data.sequence {sequence} is over the model's context {shape.context}; "
            f"use data.sequence={shape.context}, or a larger model.context"
        )
    return [*problems, *_check_method(method), *_check_rate(method.rate)]


def _check_method(method: Method) -> list[str]:
    problems = []
    if not 0 <= method.dropout < 1:
        problems.append(f"method.dropout is {method.dropout}; it must be in [0, 1)")
    optimizer = method.optimizer
    betas = {f"betas[{i}]": beta for i, beta in enumerate(optimizer.betas)}
    for name, share in {**betas, "momentum": optimizer.momentum}.items():
        if not 0 <= share < 1:
            problems.append(f"method.optimizer.{name} is {share}; it must be in [0, 1)")
    return problems + _check_signs(optimizer)


def _check_signs(optimizer: Optimizer) -> list[str]:
    return [
        f"method.optimizer.{name} is {number}; it must not be negative"
        for name, number in (
            ("epsilon", optimizer.epsilon),
            ("decay", optimizer.decay),
            ("clip", optimizer.clip),
        )
        if not number >= 0
    ]


def _check_rate(rate: Rate) -> list[str]:
    problems = []
    if not 0 < rate.peak < inf:
        problems.append(f"method.rate.peak is {rate.peak}; it must be above 0, and finite")
    if not 0 <= rate.floor <= 1:
        problems.append(f"method.rate.floor is {rate.floor}; it is a share of the peak, in [0, 1]")
    for name, steps in (("warmup", rate.warmup), ("decay", rate.decay)):
        if steps < 0:
            problems.append(f"method.rate.{name} is {steps} steps; it must not be negative")
    return problems
