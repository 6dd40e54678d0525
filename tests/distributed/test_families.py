"""Parallel equals single: families beside the Llama-like decoders, on every form that they run on.

bloom     ALiBi, a norm behind the embedding, three heads: no power of two
encoder   BERT: both ways, norms behind, token types, a transform and a bias of the head, hidden
          tokens; padding is a document of its own
layouts   dp, ZeRO, tp with and without sp, pp, cp, recomputation
"""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from small_cases import case_of, prove

from howdah.comm.spawn import Workers
from howdah.config.recipe import Machine, load_run, resolve_run
from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method
from howdah.plan.support import unsupported
from howdah.shapes.presets import preset
from howdah.verify.case import miniature, small_shape
from howdah.verify.mutations import mutations
from howdah.verify.verify import report, verify

SHAPES = {
    "bloom": replace(
        small_shape(preset("bloom-176b"), context=16), heads=3, kv_heads=3, width=24, vocab=67
    ),
    "bert": small_shape(preset("bert-base"), context=16),
    "untied bloom": replace(small_shape(preset("bloom-176b"), context=16), tie_embeddings=False),
    "roberta": small_shape(preset("roberta-base"), context=16),
    "untied": replace(small_shape(preset("bert-base"), context=16), tie_embeddings=False),
}
TRADE = "context=all-to-all"
slow = pytest.mark.slow


def case_with(layout, form, *, attention_dropout=0.0, **of):
    case = case_of(layout, **of)
    method = replace(case.method, attention_dropout=attention_dropout)
    case = replace(case, shape=SHAPES[form], method=method)
    assert not unsupported(case.shape, case.layout)
    return case


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero3 x2",
        "tp3 sp x1",
        pytest.param("single x2", marks=slow),
        pytest.param("tp3 x1", marks=slow),
        "dp2 pp2 zero1 1f1b x2",
        "cp2 x2",
        pytest.param("dp2 zero1 x2", marks=slow),
        pytest.param("dp2 zero3 release=step x2", marks=slow),
        pytest.param("dp2 zero2 recompute=full x2", marks=slow),
        pytest.param("tp3 sp inputs=gathered recompute=selective x1", marks=slow),
        pytest.param("pp2 zb-h1 x2", marks=slow),
        pytest.param("pp2 interleaved v2 x4", marks=slow),
        pytest.param(f"cp3 x1 {TRADE}", marks=slow),
        pytest.param("cp2 pp2 recompute=selective x2", marks=slow),
        pytest.param("cp2 dp2 zero3 recompute=full x1", marks=slow),
    ],
)
def test_bloom_equals_one_device(workers, layout):
    prove(case_with(layout, "bloom"), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero3 x2",
        "tp2 sp x2",
        pytest.param("single x2", marks=slow),
        pytest.param("tp2 x2", marks=slow),
        "dp2 pp2 zero1 1f1b x2",
        f"cp2 x2 {TRADE}",
        "cp2 x2",
        pytest.param("cp3 recompute=selective x1", marks=slow),
        pytest.param("cp4 context=both x1", marks=slow),
        pytest.param("cp2 dp2 zero3 recompute=full x1", marks=slow),
        pytest.param("dp2 zero1 x2", marks=slow),
        pytest.param("dp2 zero2 recompute=full x2", marks=slow),
        pytest.param("tp2 sp inputs=gathered recompute=selective x1", marks=slow),
        pytest.param("pp2 zb-h1 x2", marks=slow),
        pytest.param("pp2 interleaved v2 x4", marks=slow),
        pytest.param(f"dp2 cp2 zero1 x1 {TRADE}", marks=slow),
        pytest.param("dp2 tp2 sp zero3 recompute=full x2", marks=slow),
    ],
)
def test_bert_equals_one_device(workers, layout):
    prove(case_with(layout, "bert"), workers)


@pytest.mark.parametrize(
    "form", ["untied bloom", *(pytest.param(form, marks=slow) for form in ("roberta", "untied"))]
)
@pytest.mark.parametrize("layout", ["dp2 zero3 x2", pytest.param("tp2 sp pp2 x2", marks=slow)])
def test_other_forms_of_them_equal_one_device(workers, layout, form):
    prove(case_with(layout, form), workers)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("tp2 sp x2", "bert"),
        ("pp2 recompute=selective x2", "bloom"),
        (f"cp2 x2 {TRADE}", "bert"),
        pytest.param(f"cp3 recompute=full x1 {TRADE}", "bloom", marks=slow),
        pytest.param("dp2 tp2 zero3 recompute=full x2", "bert", marks=slow),
        pytest.param("tp3 recompute=selective x1", "bloom", marks=slow),
    ],
)
def test_probabilities_are_dropped_as_on_one_device(workers, layout, form):
    prove(case_with(layout, form, dropout=0.1, attention_dropout=0.2), workers)


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        ("dp2 zero2 x2", "bert"),
        pytest.param("tp3 sp x1", "bloom", marks=slow),
        pytest.param(f"cp2 x2 {TRADE}", "bert", marks=slow),
        pytest.param("cp2 x2", "bert", marks=slow),
        pytest.param("cp2 pp2 x2", "bloom", marks=slow),
    ],
)
def test_every_break_is_noticed(workers, layout, form):
    case = case_with(layout, form)
    verdict = verify(case, workers)
    assert verdict.proved, "\n".join(report(verdict))
    names = [name for name, failing in verdict.controls if failing]
    assert names == [mutation.name for mutation in mutations(case.plan)]


@pytest.mark.parametrize("form", ["bloom", "bert"])
@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp2 x2", "bf16"), pytest.param("dp2 pp2 zero2 x2", "float32", marks=slow)],
)
def test_other_precisions(workers, layout, precision, form):
    prove(case_with(layout, form, precision=precision), workers)


@slow
def test_the_plan_of_bloom_in_small_is_proved_on_eight_processes():
    """The recipe's own plan, every axis shrunk to 2."""
    machine = Machine(world=None, local_world=None, cores=8, cuda=0, cache=Path("/cache"))
    job = resolve_run(load_run(Path("bloom-176b")), machine)
    blocks = [sum(part.is_block for part in parts) for parts in job.plan.stages.parts]
    assert job.layout.world == 384 and len(blocks) == 12 and sum(blocks) == 70
    case = miniature(job, precision="float64", steps=2)
    assert str(case.layout) == "pp2 dp2 tp2 zero1 1f1b x2 recompute=full"
    with closing(Workers(8)) as eight:
        prove(case, eight, controls=True)


@pytest.mark.parametrize("form", ["bert", "untied bloom"])
def test_probabilities_are_whole_where_some_are_dropped(form):
    method = Method("float64", attention_dropout=0.1)
    given = SHAPES[form], parse_layout("cp2 x2"), Batch(4), method
    (sentence,) = check_plan(*given, sequence=16)
    assert sentence == (
        "method.attention_dropout drops probabilities of whole samples and heads, and cp2 as a "
        "ring has none; use context=all-to-all, or method.dropout, which drops behind attention"
    )
    assert not check_plan(given[0], parse_layout(f"cp2 x2 {TRADE}"), *given[2:], sequence=16)
