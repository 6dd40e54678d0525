"""config.json of published models gives their presets; what cannot be said is refused by name."""

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from released_configs import RELEASED

from howdah.base.errors import UserError
from howdah.config.drafts import Draft, draft
from howdah.shapes.check import check_shape
from howdah.shapes.huggingface import model_of, shape_from_config, sizes_of
from howdah.shapes.huggingface_names import MODEL_TYPES
from howdah.shapes.huggingface_written import config as written
from howdah.shapes.parameters import parameters
from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts, RopeScaling, stated


@pytest.mark.parametrize("name", RELEASED)
def test_the_released_config_of_a_model_gives_its_preset(name):
    assert stated(model_of(RELEASED[name])) == stated(preset(name))


def test_every_model_type_has_a_released_config_here():
    assert {config["model_type"] for config in RELEASED.values()} == set(MODEL_TYPES)


# -- against transformers ------------------------------------------------------

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 70,
    "max_position_embeddings": 40,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
CASES = {
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 70, "n_positions": 40},
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 70},
    "bert": SMALL | {"type_vocab_size": 3},
    "roberta": SMALL,
    "t5": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "vocab_size": 70,
        "feed_forward_proj": "gated-gelu",
    },
    "llama": GROUPED | {"attention_bias": True, "mlp_bias": True},
    "mistral": GROUPED | {"head_dim": 16},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "mixtral": GROUPED | {"num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": GROUPED
    | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": GROUPED
    | {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "decoder_sparse_step": 2,
    },
    "deepseek_v2": DEEPSEEK | {"q_lora_rank": None},
    "deepseek_v3": DEEPSEEK | {"q_lora_rank": 20},
}


@pytest.mark.parametrize("kind", CASES)
def test_transformers_builds_as_many_parameters_and_has_the_same_defaults(kind):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    full = transformers.AutoConfig.for_model(kind, **CASES[kind])
    classes = {"t5": "AutoModelForSeq2SeqLM"}
    classes |= dict.fromkeys(("bert", "roberta"), "AutoModelForMaskedLM")
    with torch.device("meta"):
        model = getattr(transformers, classes.get(kind, "AutoModelForCausalLM")).from_config(full)
    shape = shape_from_config(full.to_dict())
    assert parameters(shape).total == sum(weight.numel() for weight in model.parameters())
    assert shape_from_config({"model_type": kind, **CASES[kind]}) == shape


def test_an_untied_t5_is_known_by_what_transformers_5_writes():
    scaled = {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    assert not model_of(RELEASED["flan-t5-xl"] | scaled).tie_embeddings


# -- single settings -----------------------------------------------------------


def test_inside_the_window_of_mistral_attention_is_full():
    first = RELEASED["mistral-7b"] | {"sliding_window": 4096}
    assert model_of(first) == replace(preset("mistral-7b"), context=4096)


def test_experts_may_stand_in_every_second_block():
    shape = model_of(RELEASED["qwen3-30b-a3b"] | {"decoder_sparse_step": 2})
    assert shape.experts == Experts(128, 8, ffn_size=768, every=2, normalise=True)


def test_rotary_scaling_is_read_from_both_generations_of_config():
    old = RELEASED["llama3-1b"]
    new = {k: v for k, v in old.items() if not k.startswith("rope")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 500000.0}
    assert model_of(new) == model_of(old)
    assert model_of(old).rope_scaling == RopeScaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("settings", "scaling", "context"),
    [
        ({"rope_type": "linear"}, RopeScaling(4.0, kind="linear"), 131_072),
        # the setting is the context before the stretching
        ({"type": "dynamic"}, RopeScaling(4.0, context=131_072, kind="dynamic"), 524_288),
        ({"rope_type": "yarn"}, RopeScaling(4.0, 1.0, 32.0, 131_072, kind="yarn"), 131_072),
        (
            {"rope_type": "yarn", "beta_fast": 8, "attention_factor": 1.5, "truncate": False},
            RopeScaling(4.0, 1.0, 8.0, 131_072, kind="yarn", attention_factor=1.5, truncate=False),
            131_072,
        ),
    ],
)
def test_every_stretching_is_read_and_written(settings, scaling, context):
    shape = model_of(RELEASED["llama3-1b"] | {"rope_scaling": settings | {"factor": 4.0}})
    assert (shape.rope_scaling, shape.context) == (scaling, context)
    assert model_of(written(shape, end=0, dtype="float32")) == shape


def test_yarn_sharpens_by_its_factor_or_as_deepseek_says():
    """1.3688... is 0.1·ln 40 + 1; of DeepSeek-V3 cosines are kept, and latent logits sharpened."""
    assert RopeScaling(40.0, kind="yarn").turned == pytest.approx(1.3688879454)
    assert RopeScaling(40.0).turned == RopeScaling(1.0, kind="yarn").turned == 1.0
    deepseek = model_of(RELEASED["deepseek-v3"]).rope_scaling
    assert deepseek.turned == 1.0
    assert deepseek.latent_logits == pytest.approx(1.3688879454**2)


def test_activations_have_other_words():
    words = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu", "gelu": "gelu_exact"}
    for theirs, ours in words.items():
        config = RELEASED["gpt2-124m"] | {"activation_function": theirs}
        assert model_of(config).feedforward == ours


def test_whole_numbers_may_stand_for_fractions():
    assert model_of(RELEASED["qwen3-8b"]).rope_theta == 1_000_000.0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt2-124m", {"model_type": "mamba"}, "model_type 'mamba'; howdah reads gpt2, opt"),
        ("gpt2-124m", {"model_type": None}, "model_type None"),
        ("gpt2-124m", {"activation_function": "silu"}, "activation_function 'silu'"),
        ("gpt2-124m", {"add_cross_attention": True}, "add_cross_attention True"),
        ("opt-125m", {"do_layer_norm_before": False}, "do_layer_norm_before False"),
        ("opt-125m", {"word_embed_proj_dim": 512}, "word_embed_proj_dim 512"),
        ("bloom-176b", {"n_embed": None}, "no n_embed"),
        ("bert-base", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert-base", {"type_vocab_size": -1}, "model.token_types is -1"),
        ("bert-base", {"hidden_act": "silu"}, "hidden_act 'silu'"),
        ("bert-base", {"is_decoder": True}, "is_decoder True"),
        ("bert-base", {"tie_word_embeddings": False}, "tie_word_embeddings False"),
        ("roberta-base", {"hidden_act": "relu"}, "hidden_act 'relu'"),
        ("roberta-base", {"pad_token_id": 0}, "pad_token_id 0"),
        ("bloom-176b", {"apply_residual_connection_post_layernorm": True}, "post_layernorm True"),
        ("t5-small", {"feed_forward_proj": "gated-silu"}, "feed_forward_proj 'gated-silu'"),
        ("t5-small", {"num_layers": 0}, "model.layers is 0"),
        ("llama3-1b", {"attention_bias": True}, "mlp_bias False"),
        ("llama3-1b", {"mlp_bias": True}, "mlp_bias True"),
        ("llama3-1b", {"hidden_size": None}, "no hidden_size; give it as int"),
        ("llama3-1b", {"hidden_size": "2048"}, "'2048' for hidden_size; give it as int"),
        ("llama3-1b", {"vocab_size": True}, "True for vocab_size"),
        ("llama3-1b", {"num_key_value_heads": 5}, "model.kv_heads 5"),
        ("llama3-1b", {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope'"),
        ("llama3-1b", {"rope_scaling": {"rope_type": "yarn"}}, "no factor"),
        ("llama3-1b", {"rope_scaling": {"rope_type": "llama3"}}, "no factor"),
        ("llama3-1b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ("llama3-1b", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("qwen2.5-0.5b", {"use_sliding_window": True}, "use_sliding_window True"),
        ("qwen3-8b", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3-8b", {"attention_bias": True}, "attention_bias True"),
        ("mixtral-8x22b", {"num_local_experts": None}, "no num_local_experts"),
        ("mixtral-8x22b", {"num_experts_per_tok": 9}, "model.experts.top_k 9"),
        ("mixtral-8x22b", {"router_jitter_noise": 0.01}, "router_jitter_noise 0.01"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method 'greedy'"),
        ("qwen3-30b-a3b", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("llama3-1b", {"num_hidden_layers": 10**12}, "model.layers is 1000000000000; it must be"),
        ("llama3-1b", {"vocab_size": 10**400}, "it must be at most 16,777,216"),
        ("llama3-1b", {"rms_norm_eps": 10**400}, "for rms_norm_eps; give it as float"),
        ("llama3-1b", {"rms_norm_eps": -1.0}, "model.norm_eps is -1.0; it must be at least 0"),
        ("llama3-1b", {"rope_theta": float("inf")}, "model.rope_theta is inf; it must be at most"),
        ("llama3-1b", {"hidden_size": "x" * 5000}, "for hidden_size; give it as int"),
        ("llama3-1b", {"model_type": ["llama"]}, "model_type ['llama']; howdah reads gpt2"),
        ("deepseek-v3", {"kv_lora_rank": 0}, "model.latent.kv_rank is 0"),
        ("deepseek-v3", {"rope_scaling": {"type": "dynamic"}}, "no factor"),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(name, changes, words):
    with pytest.raises(UserError) as refusal:
        model_of(RELEASED[name] | changes)
    assert words in str(refusal.value) and len(str(refusal.value)) < 400


@given(st.data())
def test_whatever_a_config_holds_it_is_read_or_refused(data):
    config = dict(RELEASED[data.draw(st.sampled_from(sorted(RELEASED)))])
    strange = st.sampled_from([None, 0, -1, 3, 2.5, True, "x", "yarn", [], ["x"], {}, {"a": 1}])
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[name] = data.draw(strange)
    with suppress(UserError):
        assert check_shape(model_of(config)) == []


# -- for a plan ------------------------------------------------------------------


@pytest.mark.parametrize("form", ["longrope", "su"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_a_plan_needs_no_positions(tmp_path, form, place):
    """How rotary positions are stretched changes no size; a run still refuses it."""
    changes = {"rope_scaling": None, place: {"rope_type": form, "rope_theta": 1e4, "factor": 4.0}}
    (tmp_path / "config.json").write_text(json.dumps(RELEASED["qwen3-8b"] | changes))
    shape, (note,) = sizes_of(tmp_path)
    assert stated(replace(shape, rope_theta=1e6)) == stated(preset("qwen3-8b"))
    assert f"rope_type '{form}'" in note
    with pytest.raises(UserError, match=f"rope_type '{form}'"):
        model_of(tmp_path)


def test_a_plan_of_what_is_read_has_no_notes(tmp_path):
    for name in ("llama3-1b", "gpt2-124m"):
        (tmp_path / "config.json").write_text(json.dumps(RELEASED[name]))
        assert sizes_of(tmp_path) == (model_of(tmp_path), ())


def test_another_family_is_answered_with_a_llama_of_its_sizes(tmp_path):
    sizes = {"num_hidden_layers": 18, "hidden_size": 2048, "num_attention_heads": 8}
    gemma = {"model_type": "gemma", **sizes, "intermediate_size": 16384, "vocab_size": 256000}
    gemma |= {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    with pytest.raises(UserError) as refused:
        sizes_of(tmp_path)
    command = str(refused.value).partition("howdah plan ")[2]
    found = draft(command.split()[0], Draft(keys=tuple(command.split()[1:])), devices=None).shape
    assert (found.layers, found.width, found.heads) == (18, 2048, 8)
    assert (found.ffn_size, found.vocab, found.tie_embeddings) == (16384, 256000, True)
    for strange in ({"model_type": "mamba", "d_model": 8}, {"model_type": ["x"]}, {}):
        (tmp_path / "config.json").write_text(json.dumps(strange))
        with pytest.raises(UserError, match="choose one of these models"):
            sizes_of(tmp_path)


# -- files ---------------------------------------------------------------------


def test_a_model_is_read_from_its_folder_or_its_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASED["gpt2-124m"]))
    assert model_of(tmp_path) == model_of(tmp_path / "config.json") == preset("gpt2-124m")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read .*config.json .*name the folder of a Hugging Face model"),
        ("{", "config.json is not JSON"),
        ("[1]", "config.json holds no table"),
        ("[" * 100_000, "config.json is not JSON .its lists or tables are nested too deep"),
        ('{"a": ' + "9" * 5000 + "}", "config.json is not JSON .Exceeds the limit"),
        ('{"a": NaN}', "config.json is not JSON .NaN is no number"),
        (
            " " * (16 << 20) + " ",
            "cannot read .*config.json .it has more than the 16,777,216 bytes",
        ),
        ('{"model_type": "gpt2"}', "config.json: config.json has no n_embd; give it as int"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, text, words):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=words) as refusal:
        model_of(tmp_path)
    assert str(tmp_path) in str(refusal.value)
