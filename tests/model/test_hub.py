"""The model against transformers, both ways, and folders that cannot be read."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

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
    model_of,
    random_tokens,
    random_weights,
)
from safetensors.torch import load_file, save_file

from howdah.base.errors import UserError
from howdah.model.hub import read_hub
from howdah.model.hub_names import names
from howdah.shapes.huggingface import shape_from_config
from howdah.shapes.huggingface_written import config
from howdah.shapes.shape import Experts, RopeScaling
from howdah.shapes.weights import weights

transformers = pytest.importorskip("transformers")

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


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def widened(monkeypatch):
    """transformers computes norms and angles in float32 always; here the word means float64."""
    for name in ("float", "float32"):
        monkeypatch.setattr(torch, name, torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    bloom = transformers.models.bloom.modeling_bloom  # its constant of GELU has 8 digits
    exact = partial(torch.nn.functional.gelu, approximate="tanh")
    monkeypatch.setattr(bloom, "bloom_gelu_forward", exact)


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


# -- folders -------------------------------------------------------------------


def write_folder(folder, shape, *, changes=None, tensors=None):
    """A folder with the sizes of `shape` and its weights, or others."""
    sizes = config(shape, end=0, dtype="float64") | (changes or {})
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file(tensors or their_tensors(shape, random_weights(shape)), folder / "model.safetensors")


@every_shape
def test_a_folder_gives_back_what_was_written(shape, tmp_path):
    tensors = random_weights(shape)
    write_folder(tmp_path, shape, tensors=their_tensors(shape, tensors))
    found, tensor = read_hub(tmp_path)
    assert found == shape
    assert all(torch.equal(tensor(name), value) for name, value in tensors.items())


def test_shards_are_read(tmp_path):
    theirs = their_model(LLAMA, dtype=torch.float32)
    theirs.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    _, tensor = read_hub(tmp_path)
    expected = theirs.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert torch.equal(tensor("layers.1.feedforward.up.weight"), expected)
    next(tmp_path.glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(UserError, match="00002"):
        read_hub(tmp_path)


def test_names_without_a_stem_and_old_buffers_are_read(tmp_path):
    """As the first GPT-2 files on the hub are."""
    tensors = random_weights(GPT2)
    stored = {
        name.removeprefix("transformer."): value
        for name, value in their_tensors(GPT2, tensors).items()
    }
    stored["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    write_folder(tmp_path, GPT2, tensors=stored)
    _, tensor = read_hub(tmp_path)
    assert all(torch.equal(tensor(name), value) for name, value in tensors.items())


def test_a_missing_tensor_is_named(tmp_path):
    tensors = their_tensors(LLAMA, random_weights(LLAMA))
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_folder(tmp_path, LLAMA, tensors=tensors)
    with pytest.raises(UserError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        read_hub(tmp_path)


def test_a_tensor_of_other_sizes_is_named(tmp_path):
    write_folder(tmp_path, LLAMA, changes={"vocab_size": 41})
    with pytest.raises(UserError, match=r"embed_tokens\.weight is \[40, 16\].*\[41, 16\]"):
        read_hub(tmp_path)


def test_a_weight_that_would_not_be_computed_with_is_refused(tmp_path):
    """Biases that config.json does not mention, as Qwen 2 has them."""
    tensors = their_tensors(LLAMA, random_weights(LLAMA))
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(16)
    write_folder(tmp_path, LLAMA, tensors=tensors)
    with pytest.raises(UserError, match=r"q_proj\.bias"):
        read_hub(tmp_path)


def test_a_tied_head_may_be_stored_but_not_differ(tmp_path):
    shape = replace(LLAMA, tie_embeddings=True)
    tensors = their_tensors(shape, random_weights(shape))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    write_folder(tmp_path, shape, tensors=tensors)
    assert read_hub(tmp_path)[0] == shape
    tensors["lm_head.weight"][0, 0] += 1
    write_folder(tmp_path, shape, tensors=tensors)
    with pytest.raises(UserError, match="tie_word_embeddings"):
        read_hub(tmp_path)


def test_quantised_weights_are_refused(tmp_path):
    tensors = their_tensors(LLAMA, random_weights(LLAMA))
    tensors["model.norm.weight"] = torch.ones(16, dtype=torch.int8)
    write_folder(tmp_path, LLAMA, tensors=tensors)
    with pytest.raises(UserError, match="I8"):
        read_hub(tmp_path)


def test_pickle_is_refused_unread(tmp_path):
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even pickle")
    with pytest.raises(UserError, match="pickle"):
        read_hub(tmp_path)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path):
    inside = tmp_path / "inside"
    inside.mkdir()
    write_folder(inside, LLAMA)
    (inside / "model.safetensors").rename(tmp_path / "model.safetensors")
    places = dict.fromkeys(load_file(tmp_path / "model.safetensors"), "../model.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match="no weight_map of file names"):
        read_hub(inside)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("config.json", None, "cannot read"),
        ("config.json", b"{", "not JSON"),
        ("config.json", b"[]", "no table"),
        ("config.json", b'{"model_type": ["llama"]}', "of type .'llama'., which howdah does not"),
        ("config.json", b"[" * 100_000, "nested too deep"),
        ("model.safetensors", None, r"no model\.safetensors"),
        ("model.safetensors", b"short", "download it again"),
    ],
)
def test_a_damaged_folder_gets_a_sentence(name, content, sentence, tmp_path):
    write_folder(tmp_path, LLAMA)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read_hub(tmp_path)


@pytest.mark.parametrize("places", [3, ["a"], {"a": 1}, {"a": ["b"]}, {"a": "a\0b"}, {"a": ""}])
def test_an_index_names_files_or_is_refused(tmp_path, places):
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match="no weight_map of file names; download the folder again"):
        read_hub(tmp_path)


def test_a_pipe_holds_no_weights(tmp_path):
    write_folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "part")
    places = {"weight_map": {"a": "part"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(UserError, match="part is a pipe, a socket or a device, and not a file"):
        read_hub(tmp_path)


def test_a_truncated_file_gets_a_sentence(tmp_path):
    write_folder(tmp_path, LLAMA)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="download it again"):
        read_hub(tmp_path)


def test_a_name_of_the_hub_is_answered_with_a_download(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^meta-llama/Llama does not exist; if it is a model of"):
        read_hub(Path("meta-llama/Llama"))
    told = "download it first: hf download meta-llama/Llama --local-dir DIR, then init_from=DIR"
    with pytest.raises(UserError, match=told):
        read_hub(Path("meta-llama/Llama").absolute())
    told = r"typo does not exist; init_from names the folder of .*: `hf download OWNER/NAME"
    with pytest.raises(UserError, match=told):
        read_hub(tmp_path / "typo")
    with pytest.raises(
        UserError, match=r"^gpt2 does not exist; .*`howdah export RUN --to DIR` wri"
    ):
        read_hub(Path("gpt2"))


def test_what_is_no_model_says_how_to_get_one(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"safetensors is a file; init_from names the folder of a"):
        read_hub(tmp_path / "model.safetensors")
    (tmp_path / "run.toml").touch()
    with pytest.raises(UserError, match=rf"{tmp_path} is a run folder; export it first: howdah e"):
        read_hub(tmp_path)
