"""Which class of Hugging Face describes a shape, and what is refused because none does."""

from dataclasses import replace

import pytest
from random_model import BERT, BLOOM, GPT2, LATENT, LLAMA, QWEN3

from howdah.base.errors import UserError
from howdah.shapes.huggingface import shape_from_config
from howdah.shapes.huggingface_written import config, kind
from howdah.shapes.presets import preset
from howdah.shapes.shape import Experts

CLASS = {
    "laptop": "llama",
    "gpt2-124m": "gpt2",
    "gpt3-175b": "gpt2",
    "bloom-176b": "bloom",
    "bert-base": "bert",
    "roberta-base": "roberta",
    "llama2-70b": "llama",
    "llama3-8b": "llama",
    "qwen3-8b": "qwen3",
    "qwen2.5-7b": "qwen2",
    "mixtral-8x7b": "mixtral",
    "qwen1.5-moe-a2.7b": "qwen2_moe",
    "qwen3-30b-a3b": "qwen3_moe",
    "deepseek-v2": "deepseek_v2",
    "deepseek-v2-lite": "deepseek_v2",
    "deepseek-v3": "deepseek_v3",
}


@pytest.mark.parametrize("name", CLASS)
def test_a_preset_has_a_class_and_comes_back(name):
    shape = preset(name)
    assert kind(shape) == CLASS[name]
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
        (replace(GPT2, qk_norm=True), "qk_norm"),
        (replace(GPT2, kv_heads=2), "kv_heads"),
        (replace(GPT2, head_size=8), "head_size"),
        (replace(LLAMA, heads=6, head_size=4), "width"),
        (replace(LLAMA, experts=Experts(count=4, top_k=2, ffn_size=8)), "experts.ffn_size"),
        (replace(LLAMA, experts=Experts(4, 2, ffn_size=24, shared=8)), "experts.shared"),
        (replace(QWEN3, experts=Experts(4, 2, ffn_size=24, scale=2.0)), "experts.scale"),
        (replace(LATENT, experts=Experts(4, 2, ffn_size=24, shared=30)), "experts.shared"),
        (replace(GPT2, qkv_bias=True, bias=False), "bias"),
        (replace(GPT2, first_position=2), "first_position"),
        (replace(BLOOM, ffn_size=48), "ffn_size"),
        (replace(BLOOM, embedding_norm=False), "embedding_norm"),
        (replace(BERT, transform=False), "transform"),
        (replace(BERT, tie_embeddings=False), "tie_embeddings"),
        (replace(BERT, positions="rotary"), "positions"),
        (replace(BERT, first_position=1), "first_position"),
        (replace(BERT, first_position=2, feedforward="relu"), "feedforward"),
    ],
)
def test_a_shape_without_a_class_is_refused_by_its_field(shape, field):
    with pytest.raises(UserError, match=rf"model\.{field} ") as refusal:
        config(shape, end=0, dtype="float32")
    assert "not exported" in str(refusal.value)
