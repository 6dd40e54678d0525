"""Folders of transformers' models: what is read of them, and those that cannot be read."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_shapes import every_shape, their_model, their_tensors, write_folder
from random_model import (
    GPT2,
    LLAMA,
    random_weights,
)
from safetensors.torch import load_file

from howdah.base.errors import UserError
from howdah.model.hub import READ, read_hub

transformers = pytest.importorskip("transformers")


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


@pytest.mark.parametrize("other", ["opt", "gemma2", "gemma3_text", "phi", "phi3", "llama4"])
def test_a_model_of_another_type_is_told_which_are_run(other, tmp_path):
    write_folder(tmp_path, LLAMA)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": other}))
    with pytest.raises(UserError, match=f"of type '{other}', which howdah does not run") as refused:
        read_hub(tmp_path)
    assert str(refused.value).endswith(f"; it runs {', '.join(READ)}")


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


def test_a_file_that_may_not_be_read_is_not_missing(tmp_path, monkeypatch):
    write_folder(tmp_path, LLAMA)
    plain = Path.open

    def closed(self, *how):
        if self.suffix != ".safetensors":
            return plain(self, *how)
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "open", closed)  # root may read everything
    with pytest.raises(UserError, match=r"safetensors \(Permission denied\); make it readable"):
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
