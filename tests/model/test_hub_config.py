"""What config.json can say, what it cannot, and what is refused because it is not computed."""

from dataclasses import replace

import pytest
from random_model import GPT2, LLAMA, QWEN3

from howdah.model.hub_config import config, kind, shape_from_config
from howdah.plan.presets import PRESETS, preset
from howdah.plan.problems import BadInput


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_class_and_comes_back(name):
    shape = preset(name)
    assert kind(shape) == {"gpt": "gpt2", "qwe": "qwen3"}.get(name[:3], "llama")
    found = shape_from_config(config(shape, end=0, dtype="float32"))
    assert (found.k, found.d) == (shape.k, shape.d)
    assert replace(found, kv_heads=shape.kv_heads, head_size=shape.head_size) == shape


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        (replace(LLAMA, norm_at="after"), "norm_at"),
        (replace(LLAMA, norm="layernorm"), "norm"),
        (replace(LLAMA, feedforward="relu"), "feedforward"),
        (replace(QWEN3, bias=True), "bias"),
        (replace(GPT2, bias=False), "bias"),
        (replace(GPT2, norm="rmsnorm"), "norm"),
        (replace(GPT2, feedforward="swiglu"), "feedforward"),
        (replace(GPT2, query_key_norm=True), "query_key_norm"),
        (replace(GPT2, kv_heads=2), "kv_heads"),
        (replace(GPT2, head_size=8), "head_size"),
        (replace(LLAMA, heads=6, head_size=4), "width"),
    ],
)
def test_a_shape_without_a_class_is_refused_by_its_field(shape, field):
    with pytest.raises(BadInput, match=rf"model\.{field} ") as refusal:
        config(shape, end=0, dtype="float32")
    assert "not exported" in str(refusal.value)


LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("shape", "changes", "word"),
    [
        (LLAMA, {"model_type": "mamba"}, "mamba"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA, {"attention_bias": True}, "mlp_bias"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias"),
        (LLAMA, {"rope_parameters": LINEAR}, "linear"),
        (LLAMA, {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "dynamic"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA, {"rope_parameters": {"rope_type": "llama3"}}, "no factor"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA, {"hidden_size": None}, "no hidden_size"),
        (LLAMA, {"hidden_size": "16"}, "'16' for hidden_size"),
        (LLAMA, {"vocab_size": True}, "vocab_size"),
        (LLAMA, {"num_attention_heads": 0}, "at least 1"),
        (LLAMA, {"num_key_value_heads": 3}, "kv_heads"),
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN3, {"attention_bias": True}, "attention_bias"),
        (GPT2, {"activation_function": "gelu"}, "activation_function"),
        (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    ],
)
def test_a_setting_that_is_not_computed_is_refused_by_name(shape, changes, word):
    with pytest.raises(BadInput, match=word):
        shape_from_config(config(shape, end=0, dtype="float32") | changes)


def test_what_config_json_leaves_out_has_transformers_defaults():
    sizes = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 40,
        "max_position_embeddings": 32,
    }
    assert shape_from_config(sizes) == replace(LLAMA, kv_heads=None, epsilon=1e-6)
    transformers = pytest.importorskip("transformers")
    full = transformers.AutoConfig.for_model(**sizes).to_dict()
    assert shape_from_config(full) == shape_from_config(sizes)
    small = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 4}
    full = transformers.AutoConfig.for_model(**small).to_dict()
    assert shape_from_config(full) == replace(GPT2, vocab=50257, context=1024)


def test_whole_numbers_may_stand_for_fractions():
    sizes = config(LLAMA, end=0, dtype="float32")
    sizes["rope_parameters"]["rope_theta"] = 10000
    assert shape_from_config(sizes).rotary_base == 10_000.0
