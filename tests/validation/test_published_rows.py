"""Published runs are read from a CSV and said as plans, in whatever words they are published."""

import csv
from collections import Counter
from pathlib import Path

import pytest
from made_up_rows import row

from howdah.base.errors import UserError
from howdah.shapes.parameters import parameters
from howdah.validation.models import _billions, shape_of
from howdah.validation.plans import UNSTATED, Answer, answer, said
from howdah.validation.rows import NEEDED, published_rows
from howdah.validation.words import precision_of, recompute_of

RUNS = Path(__file__).parents[3] / "shared" / "data" / "published" / "runs.csv"


def told(**changes):
    found = answer(row(**changes))
    assert isinstance(found, Answer), found
    return found


# -- the file --------------------------------------------------------------------------


def written(tmp_path, columns, *rows):
    path = tmp_path / "runs.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        out = csv.DictWriter(file, columns, restval="")
        out.writeheader()
        out.writerows(rows)
    return path


def test_a_file_is_read_in_its_order(tmp_path):
    path = written(tmp_path, NEEDED, {"id": "r2", "tp": " 4 "}, {"id": "r1"})
    rows = published_rows(path)
    assert [one["id"] for one in rows] == ["r2", "r1"]
    assert (rows[0]["tp"], rows[0]["no such column"]) == ("4", "")


def test_missing_columns_are_named(tmp_path):
    path = written(tmp_path, [one for one in NEEDED if one not in ("tp", "gbs")])
    with pytest.raises(UserError, match=r"runs\.csv has no column tp, gbs; its first line names"):
        published_rows(path)
    with pytest.raises(UserError, match=r"none\.csv \(No such file or directory\)"):
        published_rows(tmp_path / "none.csv")
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is no CSV in UTF-8"):
        published_rows(path)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *[
            ("8", 8),
            ("8.0", 8),
            ("8,192", 8192),
            ("~8", 8),
            ("1e999", None),
            ("4k", 4000),
            ("1.5e3", 1500),
        ],
        *[("", None), ("unstated", None), ("4M tokens", 4e6), (">1", None)],
    ],
)
def test_numbers_in_many_spellings(text, number):
    assert row(gbs=text).number("gbs") == number


# -- words -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "means"),
    [
        *[("fp16", "fp16"), ("fp16/bf16", "bf16"), ("BF16", "bf16"), ("", "bf16")],
        *[("bf16 compute, fp32 master (amp, DEFAULT)", "bf16"), ("bf16 (PURE)", "bf16")],
        *[("FP8", "fp8"), ("FP8-CS", "fp8"), ("fp8 (TE)", "fp8"), ("float8 (linear)", "fp8")],
        *[("MXFP8", "mxfp8"), ("FP8-MX", "mxfp8"), ("NVFP4", "nvfp4"), ("fp32", "fp32")],
        *[("bfloat16", "bf16"), ("float16", "fp16"), ("half", "fp16"), ("TF32", "fp32")],
    ],
)
def test_precisions(text, means):
    assert precision_of(row(precision=text)) == means


def test_a_v100_has_no_bf16():
    assert precision_of(row(precision="fp16/bf16", gpu="Tesla V100-SXM2-16GB")) == "fp16"
    assert told(precision="fp16").plan.method.precision == "fp16"


@pytest.mark.parametrize(
    ("text", "means"),
    [
        *[("none", "none"), ("No", "none"), ("full (use_checkpoint=true in repo)", "full")],
        *[("", "unstated"), ("unstated (see recipe scripts)", "unstated"), ("yes", "full")],
        *[("selective", "selective"), ("core attention", "selective"), ("full 4 layers", "full")],
    ],
)
def test_recomputation(text, means):
    assert recompute_of(row(recompute=text)) == means


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        *[({"flash_attn": "1"}, True), ({"flash_attn": "0"}, False), ({"flash_attn": ""}, True)],
        ({"flash_attn": "", "gpu": "V100-32GB", "precision": "fp16"}, False),
        ({"flash_attn": "", "framework": "Megatron-LM", "gpu": "A100"}, False),
        ({"flash_attn": "", "framework": "ROCm Megatron-LM", "gpu": "MI300X"}, True),
    ],
)
def test_whether_attention_is_one_kernel(changes, fused):
    assert told(**changes).flash == fused


def test_recomputation_of_some_blocks_is_of_the_first_of_each_stage():
    assert told(recompute="full, 4 layers").plan.layout.recompute_blocks == 4
    assert told(recompute="full, 32 layers").plan.layout.recompute_blocks is None
    chosen = said(row(recompute="selective", framework="torchtitan FSDP2"))
    assert (chosen.recompute, chosen.plan.layout.recompute) == ("operators", "selective")


# -- layouts ---------------------------------------------------------------------------


def test_a_layout():
    found = told()
    assert str(found.plan.layout) == "pp2 dp16 tp2 zero1 sp 1f1b x8"
    assert (found.plan.micro_batch, found.plan.batch.global_batch, found.notes) == (1, 128, ())
    assert (found.published, found.flash, found.framework) == (4.5, True, "NeMo")


@pytest.mark.parametrize("left", ["mbs", "ga", "gbs", "dp", "gpu_count"])
def test_two_of_three_give_the_third(left):
    assert told(**{left: ""}).plan == told().plan


def test_a_rough_number_of_devices():
    found = told(gpu_count="66", dp="", mbs="1", ga="8", gbs="")
    assert found.plan.layout.world == 64
    assert "66 devices do not divide into tp2 pp2 cp1; 64 do" in found.notes


def test_words_for_shards():
    whole = {"tp": "1", "pp": "1", "dp": "64", "sp": "", "gpus_per_node": "8"}
    for text, layout in (
        ("FULL_SHARD", "dp64 zero3 x2"),
        ("SHARD_GRAD_OP", "dp64 zero2 x2"),
        ("HSDP", "dp64 zero3 shard8 x2"),
        ("dist optimizer", "dp64 zero1 x2"),
    ):
        assert str(told(**whole, zero=text, ga="").plan.layout) == layout


def test_the_sequence_is_divided_on_later_devices_if_nothing_is_said():
    assert told(sp="").plan.layout.sp and not told(sp="0").plan.layout.sp
    assert not told(sp="", gpu="A100").plan.layout.sp


def test_a_pipeline_gathers_and_reduces_once_a_step():
    assert "zero3 sp 1f1b x8 accumulate=whole release=step" in str(told(zero="FSDP").plan.layout)
    assert "zero2 sp 1f1b x8 accumulate=whole" in str(told(zero="2").plan.layout)


def test_a_pipeline_that_would_wait_much_has_virtual_stages_if_none_are_stated():
    long = {"tp": "1", "sp": "0", "pp": "16", "dp": "4", "ga": "", "framework": "somebody's"}
    found = told(**long, vpp="", gbs="128", layers="80")
    assert found.plan.layout.virtual == 5
    assert "virtual stages not published; 5 taken" in found.notes
    assert told(**long, vpp="1", gbs="128", layers="80").plan.layout.virtual == 1
    assert told(**long, vpp="", gbs="256", layers="80").plan.layout.virtual == 1


def test_a_release_that_only_the_source_names():
    assert told(source="a summary 26.06.01").framework == "NeMo 26.06"
    assert told(source="a summary 26.06.01", framework="NeMo 2.0").framework == "NeMo 2.0"
    assert told(source="arXiv 2104.04473").framework == "NeMo"


def test_megatron_lm_on_a_later_device_is_a_later_one():
    assert told(framework="Megatron-LM").framework == "Megatron-LM 2024"
    assert told(framework="Megatron-LM", gpu="A100").framework == "Megatron-LM"


def test_dropped_tokens_are_a_capacity():
    experts = {"moe_experts": "8", "moe_topk": "2", "ep": "8", "notes": "tokendrop; FP8"}
    assert told(**experts).plan.method.routing.capacity == 1
    assert told(**{**experts, "notes": "dropless"}).plan.method.routing.capacity == 0
    assert told(notes="tokendrop").plan.method.routing.capacity == 0


def test_gradients_are_summed_as_the_framework_does():
    assert told(framework="Megatron-DeepSpeed").plan.sent_gradient_bytes == 2
    assert told(framework="torchtitan FSDP2").plan.sent_gradient_bytes == 4


def test_parameters_are_read_off_a_name():
    for name, billions in (("Jurassic-1 178B", 178), ("Pangu-alpha 200B", 200), ("13b-chat", 13)):
        assert _billions(row(model=name, params_b=""), name) == billions
    assert _billions(row(model="Some-30B-A3B", params_b=""), "") == 0


def test_what_is_left_open_is_said():
    for changes, reason in (
        (dict.fromkeys(("dp", "tp", "pp", "zero"), ""), "layout not published"),
        ({"gpu_count": "", "dp": ""}, "number of devices not published"),
        ({"mbs": "", "ga": "", "gbs": ""}, "batch not published"),
        ({"iter_time_s": ""}, "no time published"),
        ({"gpu": ""}, "device not published"),
        ({"model": ""}, "sizes of the model not published: layers, hidden, heads"),
        ({"gpu_count": "3"}, "3 devices do not divide into tp2 pp2 cp1"),
    ):
        assert answer(row(**changes)) == reason


def test_times_are_of_a_step():
    assert told(iter_time_s="", tokens_s_gpu="4096").published == 128 * 8192 / 4096 / 64
    assert told(iter_time_s="", iter_time_s_derived="3").published == 3
    assert told(gbs=f"{128 * 8192}", mbs="1").plan.batch.global_batch == 128  # tokens


def test_virtual_stages_need_not_divide_the_blocks():
    stages = told(vpp="3").plan.stages
    assert stages.where == (0, 1) * 3
    assert {sum(part.is_block for part in parts) for parts in stages.parts} == {5, 6}
    found = told(vpp="", notes="interleaved schedule", framework="Megatron-LM")
    assert found.plan.layout.virtual == 2
    assert found.notes == ("virtual stages not published; 2 taken",)
    assert told(vpp="").plan.layout.virtual == 8  # NeMo
    assert told(vpp="", framework="Megatron-LM").plan.layout.virtual == 1


@pytest.mark.parametrize(
    ("pp", "dp", "total", "micro"),
    [(1, 32, 512, 16), (2, 32, 1536, 4), (8, 24, 2304, 2), (16, 15, 2160, 1), (64, 6, 3072, 1)],
)
def test_a_tuned_micro_batch_is_that_of_megatrons_script(pp, dp, total, micro):
    sizes = {"layers": "128", "mbs": "", "ga": "", "gbs": str(total), "gpu_count": ""}
    assert told(pp=str(pp), dp=str(dp), **sizes).plan.micro_batch == micro


def test_torchtitan_cuts_its_local_batch_for_the_pipeline():
    local = {"framework": "torchtitan FSDP2", "pp": "8", "dp": "4", "mbs": "32", "ga": ""}
    assert told(**local, vpp="1").plan.micros == 8
    found = told(**local, vpp=">1")
    assert (found.plan.micros, found.plan.layout.virtual) == (8, 2)
    assert found.notes == (
        "virtual stages not published; 2 taken",
        "the local batch is cut into micro-batches of 4",
    )


def test_stages_as_a_string():
    found = told(layers="15", vpp="layout Et*3|(tt|)*6mL")
    sizes = [sum(part.is_block for part in parts) for parts in found.plan.stages.parts]
    assert sizes == [3, 2, 2, 2, 2, 2, 2, 0]
    assert found.plan.layout.virtual == 4
    assert found.plan.stages.parts[0][0] == "embedding"
    assert found.plan.stages.parts[-1] == ("head",)
    assert found.notes == ("the module that predicts a second token is left out",)
    odd = told(layers="16", vpp="layout Et*3|(tt|)*6mL")
    assert odd.notes == ("stages layout Et*3|(tt|)*6mL do not fit; cut evenly",)


def test_a_first_stage_that_megatron_is_told():
    told_first = 'args: {"--decoder-first-pipeline-num-layers": 12}'
    sizes = [
        sum(part.is_block for part in parts) for parts in told(notes=told_first).plan.stages.parts
    ]
    assert sizes == [12, 20]


def test_one_copy_of_the_states_in_a_group():
    assert told(notes="zero1 shard group=8").plan.layout.shard == 8
    assert told(notes="zero1 shard group=-1").plan.layout.shard is None


def test_experts_over_more_ranks_than_replicas():
    experts = {"model": "Qwen3-30B-A3B", "seq": "4096"}
    assert told(**experts, ep="8").plan.layout.ep == 8
    found = told(**experts, ep="32", tp="4", dp="8")
    assert found.plan.layout.ep == 8
    assert found.notes == ("experts over 8 ranks in place of 32",)


def test_one_layer_is_a_plan_and_the_same_with_one_less():
    alone = {"notes": "ONE transformer LAYER, one microbatch", "tp": "4"}
    found = told(pp="1", **alone)
    assert (found.plan.shape.layers, found.fewer.shape.layers) == (2, 1)
    assert "one layer alone" in answer(row(**alone))


# -- models ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("LLAMA3.1-405B", (126, 16384, 128, 8)),
        ("Llama 2 70B", (80, 8192, 64, 8)),
        ("LLaMA-7B", (32, 4096, 32, 32)),
        ("llama3-70b truncated", (80, 8192, 64, 8)),
        ("Mixtral 8x22B", (56, 6144, 48, 8)),
        ("Qwen2.5-72B", (80, 8192, 64, 8)),
        ("qwen3_235b_a22b", (94, 4096, 64, 4)),
        ("GPT3-175B", (96, 12288, 96, 96)),
        ("DeepSeek-V3", (61, 7168, 128, 128)),
        ("BLOOM 176B", (70, 14336, 112, 112)),
    ],
)
def test_models_by_name(model, sizes):
    shape = shape_of(row(model=model))
    assert (shape.layers, shape.width, shape.heads, shape.k) == sizes


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        *[("GPT-3 13B", 12.9), ("Falcon-40B", 41.4), ("Nemotron-4 340B", 341.2), ("DBRX", 131.6)],
        *[("Grok-1", 316.5), ("GLM-130B", 130.5), ("Qwen2.5-14B", 14.8), ("BloombergGPT", 50.6)],
        *[("MPT-30B", 30.0), ("T5-11B", 11.3), ("gpt-oss-20b", 20.9)],
    ],
)
def test_models_that_are_no_presets(model, billions):
    found = parameters(shape_of(row(model=model, framework="", tp=""))).total
    assert found / 1e9 == pytest.approx(billions, abs=0.1)


@pytest.mark.parametrize("billions", [1, 8, 32, 128, 1024])
def test_sizes_are_guessed_from_the_number_of_parameters(billions):
    found = told(model="Something", params_b=str(billions), seq="2048", tp="2")
    assert parameters(found.plan.shape).total / 1e9 == pytest.approx(billions, rel=0.3)
    assert found.notes == (f"sizes not published; those of a usual model of {billions}B taken",)


def test_a_model_whose_size_is_not_known_is_not_another():
    for model in ("Qwen3-Next-80B-A3B", "Mistral Large", "Llama 5", "MoE 8x3B"):
        told = shape_of(row(model=model))
        assert told.startswith(f"the model {model} is not known here, and its row does not say lay")
        assert not UNSTATED.search(told), "it counts as refused"


def test_stated_sizes_count():
    shape = shape_of(
        row(model="my model", layers="4", hidden="512", heads="8", kv_heads="2", ffn="1000")
    )
    assert (shape.layers, shape.width, shape.k, shape.ffn_size) == (4, 512, 2, 1000)
    assert shape.feedforward == "swiglu" and not shape.tie_embeddings
    plain = shape_of(row(model="GPT 4B", layers="4", hidden="512", heads="8", gated_ffn="0"))
    assert (plain.ffn_size, plain.feedforward, plain.tie_embeddings) == (2048, "gelu", True)


def test_experts_and_latent_attention():
    sparse = {"moe_experts": "64", "moe_topk": "8", "moe_ffn": "2048", "layers": "14"}
    shape = shape_of(row(model="deepseekv3_proxy", **sparse))
    assert shape.latent is not None and shape.layers == 14
    assert (shape.experts.count, shape.experts.top_k, shape.experts.shared) == (64, 8, 2048)
    sizes = {"layers": "36", "hidden": "2880", "heads": "64", "kv_heads": "8", "gated_ffn": "1"}
    other = shape_of(row(model="GPT-OSS-120B", **sizes | {"moe_experts": "128", "moe_ffn": "2880"}))
    assert (other.d, other.experts.count, other.bias) == (64, 128, False)


def test_the_vocabulary_is_padded_as_the_framework_pads():
    assert shape_of(row(vocab="50257", tp="8", framework="Megatron-LM")).vocab == 51200
    assert shape_of(row(vocab="50257", tp="8", framework="torchtitan")).vocab == 50257


# -- all of the table ------------------------------------------------------------------


@pytest.fixture(scope="module")
def published():
    if not RUNS.is_file():
        pytest.skip("the published runs are not beside the repository")
    return published_rows(RUNS)


@pytest.mark.slow
def test_nearly_all_rows_are_answered(published):
    rows = [one for one in published if one["quality"] in ("A", "B")]
    found = [answer(one) for one in rows]
    reasons = Counter(one for one in found if isinstance(one, str))
    assert set(reasons) <= {
        "no time published",
        "number of devices not published",
        "layout not published",
    }
    assert len(rows) == 1957 and reasons.total() == 38
