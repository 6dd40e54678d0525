"""Every number that cannot work is told, in a sentence that names it; all in one go."""

from dataclasses import replace

import pytest

from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.method import Method, Optimizer, Rate
from howdah.plan.shapes import ModelShape

SHAPE = ModelShape(layers=2, width=32, heads=2, ffn=64, vocab=300, context=32)


def problems(shape=SHAPE, method=None, *, sequence=32):
    return check_plan(shape, method or Method(), Batch(global_batch=4), sequence=sequence)


def test_a_sound_plan_has_no_problems():
    assert problems() == []
    edge = Method(
        optimizer=Optimizer(betas=(0.0, 0.0), momentum=0.0, epsilon=0.0, decay=0.0, clip=0.0),
        rate=Rate(floor=1.0),
    )
    assert problems(method=edge) == []


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (Method(dropout=1.0), "method.dropout is 1.0; it must be in [0, 1)"),
        (Method(dropout=-0.1), "method.dropout is -0.1; "),
        (Method(optimizer=Optimizer(betas=(1.0, 0.9))), "method.optimizer.betas[0] is 1.0; "),
        (Method(optimizer=Optimizer(betas=(0.9, -1))), "method.optimizer.betas[1] is -1; "),
        (Method(optimizer=Optimizer(momentum=2.0)), "method.optimizer.momentum is 2.0; "),
        (Method(optimizer=Optimizer(epsilon=-1e-8)), "method.optimizer.epsilon is -1e-08; "),
        (Method(optimizer=Optimizer(decay=-0.1)), "method.optimizer.decay is -0.1; "),
        (Method(optimizer=Optimizer(clip=float("nan"))), "method.optimizer.clip is nan; "),
        (Method(rate=Rate(peak=0.0)), "method.rate.peak is 0.0; it must be above 0"),
        (Method(rate=Rate(peak=float("nan"))), "method.rate.peak is nan; "),
        (Method(rate=Rate(peak=float("inf"))), "method.rate.peak is inf; "),
        (Method(rate=Rate(floor=1.5)), "method.rate.floor is 1.5; it is a share of the peak"),
        (Method(rate=Rate(warmup=-1)), "method.rate.warmup is -1 steps; "),
        (Method(rate=Rate(decay=-1)), "method.rate.decay is -1 steps; "),
    ],
)
def test_a_method_that_cannot_work_is_named(method, name):
    (problem,) = problems(method=method)
    assert problem.startswith(name)


def test_a_sequence_must_fit_the_context():
    (problem,) = problems(sequence=64)
    assert problem == (
        "data.sequence 64 is over the model's context 32; use data.sequence=32, "
        "or a larger model.context"
    )
    assert problems(sequence=0) == ["data.sequence is 0; it must be at least 1"]


def test_all_problems_are_told_at_once():
    method = Method(dropout=2.0, rate=Rate(peak=-1.0))
    found = problems(replace(SHAPE, heads=5), method, sequence=64)
    assert len(found) == 4
    assert found[0].startswith("model.width 32 does not divide into 5 heads; use 4 heads")
