"""The shapes of transformers' models, small, and folders with their tensors."""

import json
from dataclasses import replace

import pytest
import torch
from random_model import (
    BERT,
    BLOOM,
    GPT2,
    LATENT,
    LLAMA,
    QWEN3,
    STRETCHED,
    random_weights,
)
from safetensors.torch import save_file

from howdah.model.hub_names import names
from howdah.shapes.huggingface_written import config
from howdah.shapes.shape import Experts, RopeScaling

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

YARN = RopeScaling(4.0, low=1.0, high=8.0, context=16, kind="yarn")
SHAPES = {
    "llama": LLAMA,
    "llama with biases": replace(LLAMA, bias=True, kv_heads=None),
    "llama 3.2": replace(
        LLAMA,
        head_size=8,
        rope_theta=100.0,
        rope_scaling=STRETCHED,
        tie_embeddings=True,
        norm_eps=1e-6,
    ),
    "llama with yarn": replace(LLAMA, head_size=8, rope_scaling=YARN),
    "llama with mscale": replace(
        LLAMA,
        head_size=16,
        rope_scaling=replace(YARN, mscale=0.7, mscale_all_dim=1.1, truncate=False),
    ),
    "llama with linear positions": replace(LLAMA, rope_scaling=RopeScaling(2.5, kind="linear")),
    "llama with dynamic positions": replace(  # its samples are longer than 16
        LLAMA, head_size=8, rope_scaling=RopeScaling(2.0, context=16, kind="dynamic")
    ),
    "gpt2": GPT2,
    "gpt2 with relu": replace(GPT2, feedforward="relu", tie_embeddings=False, ffn_size=20),
    "bloom": BLOOM,
    "bloom untied": replace(BLOOM, tie_embeddings=False, heads=6),
    "bert": BERT,
    "bert with relu": replace(BERT, feedforward="relu", token_types=1),
    "bert with tanh": replace(BERT, feedforward="gelu", norm_eps=1e-5),
    "roberta": replace(BERT, first_position=2, token_types=1, norm_eps=1e-5),
    "qwen3": QWEN3,
    "qwen3 tied": replace(
        QWEN3, tie_embeddings=True, heads=3, kv_heads=None, rope_scaling=STRETCHED
    ),
    "qwen2": replace(LLAMA, qkv_bias=True, norm_eps=1e-6),
    "mixtral": replace(LLAMA, experts=Experts(4, 2, 24)),
    "qwen2 moe": replace(
        LLAMA,
        qkv_bias=True,
        experts=Experts(5, 2, 12, shared=20, every=2, normalise=False, shared_gate=True),
    ),
    "qwen3 moe": replace(QWEN3, experts=Experts(6, 3, 12)),
    "deepseek-v2": replace(
        LATENT, experts=Experts(6, 2, 12, shared=24, first_dense=1, normalise=False, scale=3.0)
    ),
    "deepseek-v2 in groups": replace(
        LATENT,
        latent=replace(LATENT.latent, query_rank=0),
        experts=Experts(8, 3, 12, shared=12, normalise=False, scale=2.0, groups=4, top_groups=2),
    ),
    "deepseek-v3": replace(
        LATENT,
        rope_scaling=replace(YARN, mscale=1.0, mscale_all_dim=1.0),
        experts=Experts(
            8,
            3,
            12,
            shared=12,
            first_dense=1,
            scores="sigmoid",
            scale=2.5,
            groups=4,
            top_groups=2,
            group_best=2,
            bias=True,
        ),
    ),
}


every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def their_tensors(shape, tensors):
    """Their names → tensors, by the table of names."""
    found = {}
    for theirs in names(shape):
        whole = torch.cat([tensors[name] for name in theirs.ours])
        if theirs.expert is not None:
            whole = whole[theirs.expert]
        if theirs.heads:  # q, k and v of the first head, then of the second
            parts = [tensors[name].chunk(theirs.heads) for name in theirs.ours]
            whole = torch.cat([part for head in zip(*parts, strict=True) for part in head])
        found[theirs.name] = (whole.T if theirs.transposed else whole).contiguous()
    return found


def their_model(shape, *, dtype):
    """transformers' model of a shape, with random weights that are its own."""
    sizes = config(shape, end=0, dtype="float32")
    made = transformers.AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    made._experts_implementation = "eager"  # the grouped product refuses float64
    auto = transformers.AutoModelForCausalLM if shape.causal else transformers.AutoModelForMaskedLM
    kernel = "eager" if shape.positions == "alibi" else "sdpa"
    model = auto.from_config(made, attn_implementation=kernel)
    model = model.to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def write_folder(folder, shape, *, changes=None, tensors=None):
    """A folder with the sizes of `shape` and its weights, or others."""
    sizes = config(shape, end=0, dtype="float64") | (changes or {})
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file(tensors or their_tensors(shape, random_weights(shape)), folder / "model.safetensors")
