"""Which weights a method trains: patterns, rates, frozen units, rows of adapters, mistakes."""

from dataclasses import replace

import pytest

from howdah.plan.batch import Batch
from howdah.plan.check import check_plan
from howdah.plan.flat_buffers import buffers
from howdah.plan.layout import parse_layout
from howdah.plan.method import Adapter, Method
from howdah.plan.plan import make_plan
from howdah.plan.sharding import summed_over_tp
from howdah.plan.trained import marks_of, table_of
from howdah.shapes.presets import preset
from howdah.shapes.products import conventions
from howdah.shapes.weights import weights
from howdah.sim.kernels import kernels_of
from howdah.sim.memory import memory
from howdah.sim.traffic import step_traffic

GPT2, LLAMA = preset("gpt2-124m"), preset("llama3-8b")


def plan_of(shape, layout, **method):
    return make_plan(shape, parse_layout(layout), Batch(8), sequence=64, method=Method(**method))


def test_the_last_pattern_that_matches_counts():
    method = Method(train=("layers.1?.*", "*.bias=0.5", "layers.11.attention.*=0"))
    rates = {row.name: row.rate for row in table_of(GPT2, method)}
    assert rates["layers.10.attention.q.weight"] == 1
    assert rates["layers.10.attention.q.bias"] == rates["layers.0.feedforward.up.bias"] == 0.5
    assert rates["layers.11.attention.q.bias"] == rates["layers.9.attention.q.weight"] == 0
    assert rates["layers.11.feedforward.up.weight"] == 1


def test_without_patterns_the_table_is_as_it_was():
    assert table_of(GPT2, Method()) == weights(GPT2)
    assert not marks_of(GPT2, Method()).frozen


def test_frozen_weights_are_a_unit_of_their_own_and_rates_are_runs():
    rows = table_of(GPT2, Method(train=("layers.0.attention.*.weight", "layers.0.*.bias=3")))
    by_unit = {buffer.unit: buffer for buffer in buffers(rows)}
    mine, rest = by_unit["layers.0"], by_unit["frozen.layers.0"]
    assert mine.trains and not rest.trains and "frozen.embedding" in by_unit
    assert [(run.decay, run.rate) for run in mine.runs] == [(True, 1.0), (False, 3.0)]
    assert mine.runs[0].stop == mine.runs[1].start == mine.decay_stop
    assert mine.runs[1].stop == mine.length
    assert {*mine.names, *rest.names} == {w.name for w in weights(GPT2) if w.unit == "layers.0"}


def test_a_backward_pass_ends_at_the_lowest_trained_weight():
    marks = marks_of(GPT2, Method(train=("layers.3.*",)))
    assert marks.still == {"embedding", "layers.0", "layers.1", "layers.2"}


def test_adapters_are_rows_beside_their_matrices():
    rows = {
        row.name: row for row in table_of(LLAMA, Method(adapter=Adapter(4, targets=("k", "o"))))
    }
    trained = [row.name for row in rows.values() if row.rate]
    assert len(trained) == 4 * LLAMA.layers
    a, b = (rows[f"layers.7.attention.k.lora_{one}.weight"] for one in "ab")
    assert (a.dims, a.shape, a.even, a.spread) == (("adapter", "width"), (4, 4096), True, 1 / 64)
    assert (b.dims, b.shape, b.spread, b.decay) == (("key", "adapter"), (1024, 4), 0.0, True)
    a, b = (rows[f"layers.7.attention.o.lora_{one}.weight"] for one in "ab")
    assert (a.dims, b.dims) == (("adapter", "query"), ("width", "adapter"))
    assert a.unit == "layers.7" and rows["layers.7.attention.k.weight"].unit == "frozen.layers.7"


def test_lengths_of_rows_are_rows_of_the_table():
    low = Adapter(4, targets=("k", "o"), kind="dora")
    rows = {row.name: row for row in table_of(LLAMA, Method(adapter=low))}
    k, o = (rows[f"layers.7.attention.{one}.lora_magnitude.weight"] for one in "ko")
    assert (k.dims, k.shape, k.decay, k.rate) == (("key",), (1024,), False, 1.0)
    assert (o.dims, o.shape, o.unit) == (("width",), (4096,), "layers.7")


def test_lengths_of_rows_send_a_number_for_each_row_that_is_cut():
    """GPT-2's o and down of 12 layers, of 8 micro-batches: forward, and again in recomputation."""
    low = Adapter(4, targets=("q", "o", "down"))
    for more, passes in (("", 1), (" recompute=full", 2)):
        sent = [
            sum(
                n
                for t, n in step_traffic(plan_of(GPT2, f"tp2 x8{more}", adapter=one), 0).items()
                if t.axis == "tp"
            )
            for one in (low, replace(low, kind="dora"))
        ]
        assert sent[1] - sent[0] == 12 * 2 * 8 * 4 * 768 * passes


def test_lengths_of_rows_keep_the_output_of_their_matrices():
    low = Adapter(4, targets=("q", "o"))
    kept = [
        sum(r.bytes for r in memory(plan, 0, kernels_of(plan)) if r.component == "activations")
        for plan in (
            plan_of(GPT2, "single x8", adapter=a) for a in (low, replace(low, kind="dora"))
        )
    ]
    assert kept[1] - kept[0] == 12 * 2 * 4 * 768 * (64 + 1)  # outputs, and the lengths they had


def test_a_whole_matrix_of_an_adapter_is_summed_over_tp():
    plan = plan_of(LLAMA, "tp4 sp", adapter=Adapter(4, targets=("q", "o")))
    summed = {
        name: len(summed_over_tp(plan.weight(f"layers.0.attention.{name}.weight"), plan, 1))
        for name in ("q.lora_a", "q.lora_b", "o.lora_a", "o.lora_b")
    }
    assert summed == {"q.lora_a": 4, "q.lora_b": 1, "o.lora_a": 1, "o.lora_b": 4}


def test_what_is_frozen_takes_weights_alone():
    """8B parameters in bf16 take 16 GB; trained whole with Adam 16 bytes more for each."""
    whole, low = (
        plan_of(LLAMA, "single", precision="bf16", **more)
        for more in ({}, {"adapter": Adapter(16)})
    )
    sums = [{}, {}]
    for plan, found in zip((whole, low), sums, strict=True):
        for row in memory(plan, 0, kernels_of(plan)):
            found[row.component] = found.get(row.component, 0) + row.bytes
    assert sums[0]["moments"] == 8 * (sums[0]["weights"] // 2)
    trained = sum(row.elements for row in low.weights if row.rate)
    assert sums[1]["moments"] == 8 * trained == 2 * sums[1]["gradients"]
    assert sums[1]["weights"] == sums[0]["weights"] + 2 * trained
    assert sums[1]["activations"] < sums[0]["activations"]


def test_bytes_and_flops_are_those_of_what_is_trained():
    plain, low = (plan_of(GPT2, "dp2 zero1", **m) for m in ({}, {"adapter": Adapter(8)}))
    trained = sum(row.elements for row in low.weights if row.rate)
    sent = step_traffic(low, 0)
    assert sum(n for t, n in sent.items() if t.operation != "scalars") == 4 * trained
    full, less = (conventions(GPT2, 64, marks=plan.marks).model for plan in (plain, low))
    assert 0.6 < less / full < 0.75  # two products in place of three, and those of the adapters
    frozen = plan_of(GPT2, "single", train=("layers.11.*",))
    assert conventions(GPT2, 64, marks=frozen.marks).model < full / 2


def test_a_stage_before_the_lowest_trained_weight_sends_no_gradient():
    plan = plan_of(GPT2, "pp2", train=("layers.11.*",))
    operations = [{t.axis for t in step_traffic(plan, rank)} for rank in (0, 1)]
    assert "pp" in operations[0] and "pp" not in operations[1]


MISTAKES = {
    "no weight is called 'posision.weight'; did you mean 'positions.weight'?": {
        "train": ("posision.weight",)
    },
    "no weight is called 'heads.*'; of 196 that are known the nearest are: ": {
        "train": ("heads.*",)
    },
    "method.train has 'head.*=fast'; write a pattern of names such as": {"train": ("head.*=fast",)},
    "method.train has '*=-1'; write": {"train": ("*=-1",)},
    "method.train freezes every weight, so that nothing is trained; name one": {"train": ("*=0",)},
    "method.adapter.targets 'embedding.weight' names embedding.weight, which cannot have an": {
        "adapter": Adapter(targets=("embedding.weight",))
    },
    "method.adapter.targets '*norm.weight' names layers.0.attention_norm.weight, which": {
        "adapter": Adapter(targets=("*norm.weight",))
    },
    "method.adapter.targets is empty, so that nothing has an adapter; name matrices": {
        "adapter": Adapter(targets=())
    },
    "method.adapter.targets: no weight is called 'gate'; ": {"adapter": Adapter(targets=("gate",))},
    "method.adapter.rank 800 is larger than layers.0.attention.q.weight, which is 768 x 768; use "
    "method.adapter.rank=768 at most": {"adapter": Adapter(rank=800)},
    "method.adapter with method.precision=fp8 is not there yet; use bf16": {
        "adapter": Adapter(),
        "precision": "fp8",
    },
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_mistakes_are_named(sentence):
    method = Method(**MISTAKES[sentence])
    found = check_plan(GPT2, parse_layout("single"), Batch(8), method, sequence=64)
    assert any(sentence in one for one in found), found


@pytest.mark.parametrize(
    ("shape", "layout", "word"),
    [
        ("gpt2-124m", "dp2 server1", "server1"),
    ],
)
def test_what_is_not_there_yet_is_refused(shape, layout, word):
    method = Method(adapter=Adapter())
    found = check_plan(preset(shape), parse_layout(layout), Batch(8), method, sequence=64)
    assert any("method.adapter" in one and word in one and "not there yet" in one for one in found)


@pytest.mark.parametrize(
    ("shape", "adapter", "sentence"),
    [
        (
            "mixtral-8x7b",
            Adapter(targets=("up",)),
            "names layers.0.experts.up.weight, and matrices",
        ),
        ("deepseek-v3", Adapter(targets=("o",), kind="dora"), "kind=dora is not there yet for lat"),
    ],
)
def test_what_a_family_has_no_adapter_for_is_a_sentence(shape, adapter, sentence):
    method, layout = Method(adapter=adapter), parse_layout("single")
    found = check_plan(preset(shape), layout, Batch(8), method, sequence=64)
    assert any(sentence in one for one in found), found


def test_adapters_of_an_encoder_decoder_are_in_both_stacks():
    rows = table_of(preset("t5-small"), Method(adapter=Adapter(4, targets=("q",))))
    trained = {row.name.split(".lora_")[0] for row in rows if row.rate}
    assert {"encoder.0.attention.q", "layers.5.attention.q", "layers.5.cross.q"} <= trained
    assert len(trained) == 3 * 6


def test_behind_a_frozen_encoder_a_backward_pass_ends_in_the_decoder():
    shape = preset("t5-small")
    plan = plan_of(shape, "single", train=("layers.2.*",))
    assert plan.starts == "layers.2" and "target" in plan.marks.still
    plan = plan_of(shape, "single", train=("encoder.5.*",))
    assert plan.starts == "encoder.5" and "target" not in plan.marks.still
