"""Every number that a run can say has a least and a most, and a sentence for both."""

import re
from dataclasses import is_dataclass, replace
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from howdah.base.bounds import Length, Tokens
from howdah.base.tables import out_of_bounds
from howdah.config.recipe import Run
from howdah.plan.batch import Batch
from howdah.plan.method import LearningRate, Method, Optimizer
from howdah.shapes.check import check_shape
from howdah.shapes.presets import PRESETS


def numbers(hint, name=""):
    """(dotted name, limit or None) of all numbers in an annotation, lists of them included."""
    if is_dataclass(hint):
        for field, inner in get_type_hints(hint, include_extras=True).items():
            yield from numbers(inner, f"{name}.{field}".removeprefix("."))
    elif hint in (int, float):
        yield name, None
    elif get_origin(hint) is Annotated:
        yield name, get_args(hint)[1]
    else:
        for inner in get_args(hint):
            yield from numbers(inner, name)


def test_every_number_of_a_run_has_bounds():
    found = dict(numbers(Run))
    assert [name for name, limit in found.items() if limit is None] == []
    assert len(found) == 97 and found["model.latent.query_rank"].most == 1 << 17


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


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        (Batch(global_batch="3"), "batch.global_batch is '3'; it must be a whole number"),
        (Batch(micro_batch=1.5), "batch.micro_batch is 1.5; it must be a whole number"),
    ],
)
def test_what_a_program_hands_over_is_held_against_the_types_too(batch, sentence):
    assert out_of_bounds(batch, "batch") == [sentence]


def test_a_number_alone_has_the_bounds_of_its_annotation():
    assert out_of_bounds(0, "sequence", Tokens) == ["sequence is 0; it must be at least 1"]
    assert out_of_bounds(1, "sequence", Tokens) == []


@pytest.mark.parametrize(
    ("length", "value", "wanted"),
    [
        (Length(0, 3), "abc", ""),
        (Length(0, 3), "abcd", "a text in quotes of at most 3 characters, on one line"),
        (Length(0, 3), "a\n", "a text in quotes of at most 3 characters, on one line"),
        (Length(1, 3), (), "a list of 1 to 3"),
        (Length(1, 3), (0,) * 3, ""),
        (Length(0, 3), (0,) * 4, "a list of at most 3"),
    ],
)
def test_a_length_is_of_a_text_on_one_line_or_of_a_list(length, value, wanted):
    assert length.wanted(value) == wanted
