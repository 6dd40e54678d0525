"""The model against transformers, both ways."""

import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from hub_shapes import SHAPES, every_shape, their_model, their_tensors, write_folder
from random_model import (
    BERT,
    BLOOM,
    GPT2,
    LLAMA,
    model_of,
    random_tokens,
    random_weights,
)

from howdah.base.errors import UserError
from howdah.model.hub import read_hub
from howdah.model.hub_names import names
from howdah.shapes.huggingface import shape_from_config
from howdah.shapes.huggingface_written import config
from howdah.shapes.weights import weights

transformers = pytest.importorskip("transformers")


@pytest.fixture
def widened(monkeypatch):
    """transformers computes norms and angles in float32 always; here the word means float64."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    bloom = transformers.models.bloom.modeling_bloom  # its constant of GELU has 8 digits
    exact = partial(torch.nn.functional.gelu, approximate="tanh")
    monkeypatch.setattr(bloom, "bloom_gelu_forward", exact)


def logits_of(shape, tensors, tokens, positions, types):
    model = model_of(shape, tensors)
    return model.logits(model(tokens, positions, types=types))


@every_shape
def test_logits_equal_in_float32(shape, tmp_path):
    theirs = their_model(shape, dtype=torch.float32)
    theirs.save_pretrained(tmp_path)
    assert_equal_logits(theirs, tmp_path, shape, bound=1e-5)


@every_shape
def test_logits_equal_in_float64(shape, tmp_path, widened):
    theirs = their_model(shape, dtype=torch.float64)
    theirs.save_pretrained(tmp_path)
    dynamic = shape.rope_scaling is not None and shape.rope_scaling.kind == "dynamic"
    bound = 1e-7 if dynamic else 1e-10  # they grow θ in float32
    assert_equal_logits(theirs, tmp_path, shape, bound=bound)


def assert_equal_logits(theirs, folder, shape, *, bound):
    found, tensor = read_hub(folder)
    assert found == shape
    tokens, positions = random_tokens(shape, 2, shape.context)
    tokens, types = tokens.clamp(min=2), None  # RoBERTa takes a 1 for padding
    if shape.token_types:
        types = random_tokens(replace(shape, vocab=shape.token_types), 2, shape.context)[0]
    tensors = {weight.name: tensor(weight.name) for weight in weights(shape)}
    mine = logits_of(shape, tensors, tokens, positions, types)
    with torch.no_grad():
        expected = theirs(tokens, **({} if types is None else {"token_type_ids": types})).logits
    assert mine.dtype == expected.dtype
    assert (mine - expected).abs().max() < bound * max(1, expected.abs().max())


@pytest.mark.parametrize("window", [None, 12, 64])
def test_mistral_is_a_llama_up_to_its_window(window, tmp_path, widened):
    """Its tensors have Llama's names; a window that no sample leaves changes nothing."""
    sizes = config(LLAMA, end=0, dtype="float64") | {"sliding_window": window}
    made = transformers.MistralConfig(**sizes | {"architectures": None})
    theirs = transformers.MistralForCausalLM._from_config(made, attn_implementation="sdpa")
    theirs = theirs.to(torch.float64).eval()
    theirs.save_pretrained(tmp_path)
    shape = replace(LLAMA, context=min(LLAMA.context, window or LLAMA.context))
    assert_equal_logits(theirs, tmp_path, shape, bound=1e-10)


@every_shape
def test_config_and_shape_are_inverse(shape):
    sizes = json.loads(json.dumps(config(shape, end=3, dtype="bfloat16")))
    assert shape_from_config(sizes) == shape
    assert sizes["eos_token_id"] == sizes["bos_token_id"] == 3


def test_the_config_of_transformers_4_is_read_too():
    sizes = config(SHAPES["llama 3.2"], end=0, dtype="float32")
    del sizes["rope_parameters"]
    assert shape_from_config(sizes) == SHAPES["llama 3.2"]
    assert "rope_type" in sizes["rope_scaling"] and "rope_theta" in sizes


def test_gpt2_keeps_query_key_and_value_side_by_side_and_transposed():
    (joint,) = (t for t in names(GPT2) if t.name == "transformer.h.0.attn.c_attn.weight")
    assert joint.ours == tuple(f"layers.0.attention.{x}.weight" for x in "qkv")
    assert joint.shape == (16, 48) and joint.transposed
    (table,) = (t for t in names(GPT2) if t.name == "transformer.wte.weight")
    assert not table.transposed


def test_bloom_keeps_query_key_and_value_head_by_head():
    (joint,) = (t for t in names(BLOOM) if "layers.1.attention.k.bias" in t.ours)
    assert joint.name == "transformer.h.1.self_attention.query_key_value.bias"
    assert joint.shape == (54,) and joint.heads == 3 and not joint.transposed


def test_what_bert_has_beside_its_masked_language_model_is_left_out(tmp_path):
    """As in the folders of the hub: old names of norms, a pooler, next-sentence head, copies."""
    tensors = random_weights(BERT)
    stored = their_tensors(BERT, tensors)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for now, then in old.items():
        stored = {name.replace(now, then): value for name, value in stored.items()}
    stored |= {
        "bert.pooler.dense.weight": torch.ones(16, 16),
        "cls.seq_relationship.bias": torch.ones(2),
        "bert.embeddings.position_ids": torch.arange(32)[None],
        "cls.predictions.decoder.weight": tensors["embedding.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["head.bias"].clone(),
    }
    write_folder(tmp_path, BERT, tensors=stored)
    _, tensor = read_hub(tmp_path)
    assert all(torch.equal(tensor(name), value) for name, value in tensors.items())
    stored["cls.predictions.decoder.bias"] += 1
    write_folder(tmp_path, BERT, tensors=stored)
    with pytest.raises(UserError, match=r"decoder\.bias of its own, but config\.json ties it"):
        read_hub(tmp_path)


def test_each_weight_has_one_place():
    for shape in SHAPES.values():
        ours = [(name, theirs.expert) for theirs in names(shape) for name in theirs.ours]
        every = [
            (weight.name, expert)
            for weight in weights(shape)
            for expert in (range(weight.shape[0]) if weight.dims[0] == "expert" else [None])
        ]
        assert sorted(ours, key=str) == sorted(every, key=str)
