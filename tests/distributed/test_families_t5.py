"""Parallel equals single: an encoder with a decoder behind it, on every form that it runs on.

t5     relative positions, ReLU, a tied head that is divided by √width
flan   GEGLU, a head of its own
wide   four heads, which two ranks of tp and two of cp can share out
"""

from dataclasses import replace

import pytest
from small_cases import case_of, prove

from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.layout import parse_layout
from howdah.plan.method import Method, Spans
from howdah.plan.plan import make_plan
from howdah.plan.program import tied_stages
from howdah.plan.support import unsupported
from howdah.shapes.presets import preset
from howdah.verify.case import small_shape
from howdah.verify.mutations import mutations
from howdah.verify.verify import report, verify

SHAPES = {
    "t5": replace(small_shape(preset("t5-small"), context=16), vocab=67),
    "flan": small_shape(preset("flan-t5-base"), context=16),
    "wide": small_shape(preset("flan-t5-base"), context=16, times=2),
}
TRADE = "context=all-to-all"
slow = pytest.mark.slow


def case_with(layout, form="t5", **of):
    case = case_of(layout, **of)
    shape = SHAPES[form]
    deep = case.layout.pp * case.layout.virtual > 4
    case = replace(case, shape=replace(shape, layers=4 if deep else 2))
    assert not unsupported(case.shape, case.layout)
    return case


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "layout",
    [
        "tp2 sp x2",
        "dp2 pp2 zero1 1f1b x2",
        "dp2 zero3 recompute=full x2",
        "cp2 x2",
        f"cp2 x2 {TRADE}",
        pytest.param("cp3 recompute=selective x1", marks=slow),
        pytest.param("cp4 context=both x1", marks=slow),
        pytest.param("cp2 pp2 zb-v x2", marks=slow),
        pytest.param(f"cp2 recompute=selective x1 {TRADE}", marks=slow),
        pytest.param(f"cp2 dp2 zero3 recompute=full x1 {TRADE}", marks=slow),
        pytest.param(f"cp2 pp2 1f1b x2 {TRADE}", marks=slow),
        pytest.param("single x2", marks=slow),
        pytest.param("dp2 zero1 x2", marks=slow),
        pytest.param("dp2 zero2 recompute=selective x2", marks=slow),
        pytest.param("dp4 zero2 shard2 x1", marks=slow),
        pytest.param("dp2 zero3 release=step x2", marks=slow),
        pytest.param("dp2 server2 x2", marks=slow),
        pytest.param("tp2 x2", marks=slow),
        pytest.param("tp2 sp recompute=full x1", marks=slow),
        pytest.param("pp3 1f1b x2", marks=slow),
        pytest.param("pp4 gpipe x4", marks=slow),
        pytest.param("pp2 zb-h1 x2", marks=slow),
        pytest.param("pp2 zb-h2 x4", marks=slow),
        pytest.param("pp2 zb-v x2", marks=slow),
        pytest.param("pp2 interleaved v2 x4", marks=slow),
        pytest.param("dp2 pp2 zero2 zb-h1 x2", marks=slow),
        pytest.param("dp2 pp2 zero3 1f1b x2", marks=slow),
        pytest.param("dp2 tp2 sp zero3 recompute=full x2", marks=slow),
        pytest.param("tp2 pp2 sp recompute=full 1f1b x2", marks=slow),
    ],
)
def test_t5_equals_one_device(workers, layout):
    prove(case_with(layout), workers)


@slow
@pytest.mark.parametrize("layout", [f"cp2 tp2 sp x2 {TRADE}", "cp2 tp2 recompute=full x1"])
def test_heads_of_a_bias_are_shared_out_twice(workers, layout):
    prove(case_with(layout, "wide"), workers)


@slow
@pytest.mark.parametrize(
    "layout",
    ["dp2 zero3 x2", "tp2 sp pp2 1f1b x2", "pp4 1f1b x4", "pp2 zb-v x2", f"cp2 x2 {TRADE}"],
)
def test_flan_equals_one_device(workers, layout):
    prove(case_with(layout, "flan"), workers)


@slow
@pytest.mark.parametrize(
    "layout", ["tp2 sp x2", "pp2 recompute=full 1f1b x2", "dp2 zero2 x2", f"cp2 x2 {TRADE}"]
)
def test_dropout_is_that_of_one_device(workers, layout):
    case = case_with(layout, "flan", dropout=0.1)
    prove(case, workers)
    prove(replace(case, method=replace(case.method, attention_dropout=0.2)), workers)


@slow
@pytest.mark.parametrize("precision", ["bf16", "float32"])
@pytest.mark.parametrize("layout", ["dp2 x2", "dp2 pp2 zero2 1f1b x2"])
def test_other_precisions(workers, layout, precision):
    prove(case_with(layout, precision=precision), workers)


@slow
@pytest.mark.parametrize(
    "layout",
    [
        "dp2 zero3 x2",
        "pp3 1f1b x2",
        "tp2 sp x2",
        "pp2 recompute=full 1f1b x2",
        f"cp2 x2 {TRADE}",
        "cp2 x2",
    ],
)
def test_every_break_is_noticed(workers, layout):
    case = case_with(layout)
    verdict = verify(case, workers)
    assert verdict.proved, "\n".join(report(verdict))
    names = [name for name, failing in verdict.controls if failing]
    assert names == [mutation.name for mutation in mutations(case.plan)]


def test_what_stages_send_and_share():
    """The encoder's output rides through the decoder; tables and embedding are on several ranks."""
    shape = replace(SHAPES["flan"], layers=3, encoder_layers=3)
    plan = make_plan(
        shape, parse_layout("pp4 x4 1f1b"), Batch(4), sequence=16, method=Method("float64")
    )
    assert [parts[0] for parts in plan.stages.parts] == [
        "embedding",
        "encoder.2",
        "layers.1",
        "layers.2",
    ]
    assert [plan.boundary(stage) for stage in range(3)] == [
        ("hidden",),
        ("hidden", "source"),
        ("hidden", "source"),
    ]
    shared = {unit: ranks for unit, ranks in plan.ranks_of_unit.items() if len(ranks) > 1}
    assert shared == {
        "embedding": (0, 1),
        "relative.encoder": (0, 1),
        "relative.decoder": (1, 2, 3),
    }
    assert tied_stages(plan) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("words", "of", "said"),
    [
        ("activations=host", {}, "activations=host with an encoder-decoder"),
        ("tp2 sp inputs=gathered", {}, "inputs=gathered with an encoder-decoder"),
        ("single", {"compiled": True}, "compile=true with an encoder-decoder"),
        ("single", {"precision": "fp8"}, "method.precision=fp8 with an encoder-decoder"),
    ],
)
def test_what_cannot_run_yet_is_refused_by_name(words, of, said):
    sentences = unsupported(SHAPES["t5"], parse_layout(f"{words} x2"), **of)
    assert any(sentence.startswith(said) for sentence in sentences)


@pytest.mark.parametrize(
    "other",
    [
        {"norm": "layernorm"},
        {"norm_at": "after"},
        {"positions": "rotary"},
        {"kv_heads": 1},
        {"bias": True},
        {"qk_norm": True},
        {"embedding_norm": True},
        {"token_types": 2},
        {"transform": True},
    ],
)
def test_an_encoder_decoder_that_is_no_t5_is_refused(other):
    (sentence,) = unsupported(replace(SHAPES["t5"], **other), parse_layout("single"))
    assert sentence.startswith("a model with family encoder-decoder and ")
    assert sentence.endswith("can be planned, but not built yet")


def test_what_a_method_cannot_ask_of_it():
    def problems(shape, method, sequence=16):
        shape = replace(shape, context=max(sequence, 16))
        layout, batch = parse_layout("single x1"), Batch(2)
        return check_plan(shape, layout, batch, method, sequence=sequence)

    assert not problems(SHAPES["t5"], Method(attention_dropout=0.1))
    (told,) = problems(preset("laptop"), Method(spans=Spans(0.3)))
    assert told.startswith("method.spans leaves tokens out for a decoder behind an encoder")
    (told,) = problems(SHAPES["t5"], Method(spans=Spans(0.5, 1.0)), 400)
    assert "leaves 200 spans out of 400 tokens, and 100" in told and "length=2 or more" in told
    assert not problems(SHAPES["t5"], Method(spans=Spans(0.5, 2.0)), 400)
