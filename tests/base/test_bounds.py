"""Every number that a run can say has a least and a most, and a sentence for both."""

import re
from dataclasses import is_dataclass, replace
from typing import get_args, get_type_hints

import pytest

from howdah.base.bounds import BOUNDS, out_of_bounds
from howdah.config.recipe import Run
from howdah.plan.method import LearningRate, Method, Optimizer
from howdah.shapes.check import check_shape
from howdah.shapes.presets import PRESETS


def numbers(kind, prefix=""):
    """The dotted names of all numbers of a dataclass, lists of them included."""
    for name, hint in get_type_hints(kind).items():
        for inner in (hint, *get_args(hint)):
            if isinstance(inner, type) and is_dataclass(inner):
                yield from numbers(inner, f"{prefix}{name}.")
            if inner in (int, float):
                yield prefix + name


def test_every_number_of_a_run_has_bounds_and_no_other():
    assert set(numbers(Run)) == set(BOUNDS)


def test_every_preset_is_in_bounds():
    assert all(check_shape(shape) == [] for shape in PRESETS.values())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layers": 2**63 - 1}, "model.layers is 9223372036854775807; it must be at most 1,000"),
        ({"layers": 0}, "model.layers is 0; it must be at least 1"),
        ({"vocab": 10**400}, "it must be at most 16,777,216"),
        ({"norm_eps": float("nan")}, "model.norm_eps is nan; it must be a number"),
        ({"rope_theta": 0.0}, "model.rope_theta is 0.0; it must be above 0"),
        ({"rope_theta": float("inf")}, "model.rope_theta is inf; it must be at most 1e+12"),
        (
            {"width": 1 << 17, "ffn_size": 1 << 20, "layers": 1000},
            "parameters; at most 1e+14 are planned for",
        ),
    ],
)
def test_a_size_out_of_bounds_is_named(changes, sentence):
    (problem,) = check_shape(replace(PRESETS["laptop"], **changes))
    assert sentence in problem and len(problem) < 200


def test_all_that_are_out_of_bounds_are_told_each_by_its_place():
    method = Method(
        dropout=1.0,
        optimizer=Optimizer(betas=(0.9, -1.0)),
        grad_clip=1e10,
        lr=LearningRate(peak=0.0),
    )
    found = [re.sub(r" is .* must", " must", text) for text in out_of_bounds(method, "method")]
    assert found == [
        "method.optimizer.betas[1] must be at least 0",
        "method.lr.peak must be above 0",
        "method.grad_clip must be at most 1e+09",
        "method.dropout must be below 1",
    ]


def test_the_bounds_themselves_are_in_bounds():
    edge = Method(
        optimizer=Optimizer(betas=(0.0, 0.0)), grad_clip=1e9, lr=LearningRate(min_ratio=1.0)
    )
    assert list(out_of_bounds(edge, "method")) == []
