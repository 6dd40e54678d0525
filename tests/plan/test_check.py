"""Every number that cannot work is told, in a sentence that names it; all in one go."""

from dataclasses import replace

import pytest

from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.layout import parse_layout
from howdah.plan.method import LearningRate, Method, Optimizer
from howdah.shapes.shape import Experts, ModelShape

SHAPE = ModelShape(layers=2, width=32, heads=2, ffn_size=64, vocab=300, context=32)


def problems(shape=SHAPE, method=None, *, sequence=32, layout="single"):
    return check_plan(
        shape, parse_layout(layout), Batch(global_batch=24), method or Method(), sequence=sequence
    )


def test_a_sound_plan_has_no_problems():
    assert problems() == []
    edge = Method(
        optimizer=Optimizer(betas=(0.0, 0.0), momentum=0.0, epsilon=0.0, weight_decay=0.0),
        grad_clip=0.0,
        lr=LearningRate(min_ratio=1.0),
    )
    assert problems(method=edge) == []


@pytest.mark.parametrize(
    ("method", "name"),
    [
        (Method(dropout=1.0), "method.dropout is 1.0; it must be below 1"),
        (Method(dropout=-0.1), "method.dropout is -0.1; "),
        (Method(optimizer=Optimizer(betas=(1.0, 0.9))), "method.optimizer.betas[0] is 1.0; "),
        (Method(optimizer=Optimizer(betas=(0.9, -1))), "method.optimizer.betas[1] is -1; "),
        (Method(optimizer=Optimizer(momentum=2.0)), "method.optimizer.momentum is 2.0; "),
        (Method(optimizer=Optimizer(epsilon=-1e-8)), "method.optimizer.epsilon is -1e-08; "),
        (Method(optimizer=Optimizer(weight_decay=-0.1)), "method.optimizer.weight_decay is -0.1; "),
        (Method(grad_clip=float("nan")), "method.grad_clip is nan; "),
        (Method(lr=LearningRate(peak=0.0)), "method.lr.peak is 0.0; it must be above 0"),
        (Method(lr=LearningRate(peak=float("nan"))), "method.lr.peak is nan; "),
        (Method(lr=LearningRate(peak=float("inf"))), "method.lr.peak is inf; "),
        (
            Method(lr=LearningRate(min_ratio=1.5)),
            "method.lr.min_ratio is 1.5; it must be at most 1",
        ),
        (
            Method(lr=LearningRate(warmup_steps=-1)),
            "method.lr.warmup_steps is -1; it must be at least 0",
        ),
        (
            Method(lr=LearningRate(decay_steps=-1)),
            "method.lr.decay_steps is -1; it must be at least 0",
        ),
    ],
)
def test_a_method_that_cannot_work_is_named(method, name):
    (problem,) = problems(method=method)
    assert problem.startswith(name)


def test_a_shared_expert_may_be_what_tp_cannot_cut():
    shape = replace(SHAPE, experts=Experts(count=2, top_k=1, ffn_size=8, shared=1))
    (problem,) = problems(shape, layout="tp2")
    assert problem.endswith(": tp2 is over the 1 rows of ffn; use tp1 at most")


def test_chosen_stages_must_have_the_blocks_of_the_model():
    assert problems(layout="pp2 stages=0,2") == []
    (problem,) = problems(layout="pp2 stages=2,2")
    assert problem.endswith(": stages=2,2 has 4 blocks, and the model has 2")


def test_a_sequence_must_fit_the_context():
    (problem,) = problems(sequence=64)
    assert problem == (
        "data.sequence_length 64 is over the model's context 32; use data.sequence_length=32, "
        "or a larger model.context"
    )
    assert problems(sequence=0) == ["data.sequence_length is 0; it must be at least 1"]


def test_a_step_has_bounds():
    shape = replace(SHAPE, context=1 << 20)
    batch = Batch(global_batch=1 << 11)
    found = check_plan(shape, parse_layout("single"), batch, Method(), sequence=1 << 20)
    assert found == []
    batch = Batch(global_batch=(1 << 11) + 1)
    (problem,) = check_plan(shape, parse_layout("single"), batch, Method(), sequence=1 << 20)
    assert problem.startswith(
        "a step of 2,049 samples of 1,048,576 tokens is too large; at most 2,"
    )


def test_all_problems_are_told_at_once():
    method = Method(dropout=2.0, lr=LearningRate(peak=-1.0))
    found = problems(replace(SHAPE, heads=5), method, sequence=64)
    assert len(found) == 4
    assert found[0].startswith("model.width 32 does not divide into 5 heads; use 4 heads")


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("pp5", "pp5 makes 5 stages, but the model has 4 parts (embedding, blocks, head); use pp4"),
        (
            "pp2 v3",
            "pp2 with 3 stages each makes 6 stages, but the model has 4 parts (embedding, "
            "blocks, head); use v2",
        ),
        (
            "pp3 zb-v",
            "pp3 with 2 stages each makes 6 stages, but the model has 4 parts (embedding, "
            "blocks, head); use pp2",
        ),
        (
            "pp3 v3",
            "pp3 with 3 stages each makes 9 stages, but the model has 4 parts (embedding, "
            "blocks, head); use pp3 with one stage each, such as 1f1b",
        ),
        ("tp3", "tp3 does not divide 2 heads; 2 ways would"),
        ("cp3 context=all-to-all", "cp3 context=all-to-all does not divide 2 heads; 2 ways would"),
        ("cp4 tp2 context=all-to-all", "on tp rank 0 does not divide 1 heads; 1 ways would"),
        ("dp2 ep2", "ep2 shares out experts, but the model has no experts; use ep1 at most"),
        ("cp17", "cp17 cuts a sequence into 34 chunks, but it has 32 tokens; use cp16"),
        ("pp2 slices33", "slices33 is over the 32 tokens; use slices32 at most"),
        ("pp2 cp2 slices2", "token slices and cp2 both cut the sequence; drop one of them"),
    ],
)
def test_a_layout_that_leaves_a_rank_without_a_part_is_told(layout, sentence):
    (problem,) = problems(layout=layout)
    assert problem.startswith(f"layout '{parse_layout(layout)}': ")
    assert sentence in problem


def test_heads_and_experts_that_do_not_divide():
    shape = replace(SHAPE, heads=12, kv_heads=4, head_size=4)
    assert problems(shape, layout="tp6") == [
        "layout 'tp6': tp6 does not divide 12 heads of 4 key-value heads; 4 ways would"
    ]
    assert problems(shape, layout="tp12") == []
    mixture = replace(SHAPE, experts=Experts(count=3, top_k=1, ffn_size=8))
    assert problems(mixture, layout="dp4 ep4") == [
        "layout 'dp4 ep4': ep4 shares out experts, but the model has 3 experts; use ep3 at most"
    ]


def test_slices_of_the_sequence_have_tokens():
    assert problems(layout="tp2 sp", sequence=2) == []
    assert problems(layout="tp2 sp", sequence=1) == [
        "layout 'tp2 sp': sp cuts 1 tokens between 2 ranks; drop sp or use "
        "data.sequence_length=2 or more"
    ]


def test_those_of_the_layout_are_among_them():
    found = problems(method=Method(dropout=2.0), layout="tp3 cp17 x2", sequence=20)
    assert len(found) == 3
