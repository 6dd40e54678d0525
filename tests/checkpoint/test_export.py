"""Exports: what Hugging Face's libraries load, how much memory it takes, what is not harmed."""

import json
import resource
import weakref
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from howdah.base.errors import UserError
from howdah.checkpoint.export import export, plan_shards
from howdah.model.hub import names, read_hub
from howdah.model.transformer import Transformer
from howdah.shapes.shape import ModelShape, RopeScaling
from howdah.shapes.weights import weights
from howdah.text import tokenizer as tokenizers

LLAMA = ModelShape(layers=2, width=16, heads=4, kv_heads=2, ffn_size=24, vocab=300, context=32)
GPT2 = replace(
    LLAMA, kv_heads=None, feedforward="gelu", norm="layernorm", positions="learned", bias=True
)
SHAPES = {
    "llama": LLAMA,
    "llama 3.2": replace(
        LLAMA, rope_scaling=RopeScaling(4.0, context=28), tie_embeddings=True, head_size=8
    ),
    "gpt2": GPT2,
    "gpt2 tied": replace(GPT2, tie_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_size=6, norm_eps=1e-6),
}


def random_weights(shape, dtype=torch.float32):
    draw = torch.Generator().manual_seed(0)
    return {
        weight.name: (weight.mean + 0.2 * torch.randn(weight.shape, generator=draw)).to(dtype)
        for weight in weights(shape)
    }


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level tokenizer.json whose token 0 ends a document."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the quick brown fox, 12 foxes\n\n"] * 3, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


def export_to(to, tokenizer, *, shape=LLAMA, **changes):
    tensors = random_weights(shape)
    arguments = {"tensor": tensors.__getitem__, "end": 0, "dtype": torch.float32} | changes
    export(shape=shape, tokenizer=tokenizer, to=to, **arguments)
    return tensors


@pytest.fixture
def transformers():
    library = pytest.importorskip("transformers")
    library.utils.logging.disable_progress_bar()
    return library


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 20_000])
def test_transformers_computes_the_same_logits(
    shape, shard_bytes, tmp_path, tokenizer, transformers
):
    tensors = export_to(tmp_path / "out", tokenizer, shape=shape, shard_bytes=shard_bytes)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(report.values())
    with torch.device("meta"):
        model = Transformer(shape)
    model.load_state_dict(tensors, assign=True)
    tokens = torch.randint(0, shape.vocab, (2, shape.context))
    with torch.no_grad():
        mine = model.logits(model(tokens, torch.arange(shape.context).expand_as(tokens)))
        theirs = loaded(tokens).logits
    assert (mine - theirs).abs().max() < 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_transformers_reads_the_same_tokens_and_ends(shape, tmp_path, tokenizer, transformers):
    export_to(tmp_path / "out", tokenizer, shape=shape)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "the  foxes' 21\n quïck 🦊"
    ids = Tokenizer.from_file(str(tokenizer)).encode(text).ids
    assert loaded(text).input_ids == ids
    assert loaded.decode(ids) == text
    assert (loaded.bos_token_id, loaded.eos_token_id) == (0, 0)
    assert loaded.model_max_length == shape.context
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.generation_config.eos_token_id == 0
    assert model.config.max_position_embeddings == shape.context


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_our_reader_gives_back_every_weight(shape, tmp_path, tokenizer):
    tensors = export_to(tmp_path / "out", tokenizer, shape=shape, shard_bytes=20_000)
    found, tensor = read_hub(tmp_path / "out")
    assert found == shape
    assert all(torch.equal(tensor(name), value) for name, value in tensors.items())


def test_weights_are_cast_to_the_dtype(tmp_path, tokenizer, transformers):
    tensors = export_to(tmp_path / "out", tokenizer, shape=GPT2, dtype=torch.bfloat16)
    _, tensor = read_hub(tmp_path / "out")
    name = "layers.1.attention.k.weight"
    assert torch.equal(tensor(name), tensors[name].bfloat16())
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16


# -- memory --------------------------------------------------------------------


@pytest.mark.parametrize("shape", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_one_tensor_is_held_at_a_time(shape, tmp_path, tokenizer):
    alive, most = weakref.WeakSet(), 0

    def tensor(name):
        nonlocal most
        fresh = torch.zeros(next(w.shape for w in weights(shape) if w.name == name))
        alive.add(fresh)
        most = max(most, len(alive))
        return fresh

    export_to(tmp_path / "out", tokenizer, shape=shape, tensor=tensor, shard_bytes=20_000)
    assert most == 1


def test_each_weight_is_asked_for_once(tmp_path, tokenizer):
    tensors, asked = random_weights(GPT2), []

    def tensor(name):
        asked.append(name)
        return tensors[name]

    export_to(tmp_path / "out", tokenizer, shape=GPT2, tensor=tensor)
    assert sorted(asked) == sorted(tensors)


@pytest.mark.parametrize("limit", [1, 5_000, 10_000, 10**9])
def test_shards_hold_all_tensors_in_order_and_keep_the_limit(limit):
    found = names(LLAMA)
    shards = plan_shards(found, torch.float32, limit)
    assert [theirs for shard in shards for theirs in shard.tensors] == list(found)
    for shard in shards:
        size = sum(4 * prod(theirs.shape) for theirs in shard.tensors)
        assert size <= limit or len(shard.tensors) == 1
    files = [shard.file for shard in shards]
    if limit == 10**9:
        assert files == ["model.safetensors"]
    else:
        assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"


# -- what stands there ---------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_earlier_export_is_replaced_with_all_its_shards(tmp_path, tokenizer):
    export_to(tmp_path / "out", tokenizer, shard_bytes=20_000)
    export_to(tmp_path / "out", tokenizer, shape=GPT2)
    assert set(contents(tmp_path / "out")) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert read_hub(tmp_path / "out")[0] == GPT2
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def other_model(folder, tokenizer):
    """A model that someone else wrote: the same names of files."""
    export_to(folder, tokenizer)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"howdah"', b'"someon"'))


def with_notes(folder, tokenizer):
    export_to(folder, tokenizer)
    (folder / "README.md").write_text("what I learned")


def only_sizes(folder, tokenizer):
    folder.mkdir()
    (folder / "config.json").write_text("{}")


@pytest.mark.parametrize("prepare", [other_model, with_notes, only_sizes])
def test_a_folder_of_anything_else_is_refused_and_not_touched(prepare, tmp_path, tokenizer):
    prepare(tmp_path / "out", tokenizer)
    before = contents(tmp_path / "out")
    with pytest.raises(UserError, match="choose another folder"):
        export_to(tmp_path / "out", tokenizer)
    assert contents(tmp_path / "out") == before


def test_a_file_in_the_way_is_refused(tmp_path, tokenizer):
    (tmp_path / "out").write_text("notes")
    with pytest.raises(UserError, match="is a file"):
        export_to(tmp_path / "out", tokenizer)


def test_an_empty_folder_and_missing_parents_are_filled(tmp_path, tokenizer):
    (tmp_path / "empty").mkdir()
    for to in (tmp_path / "empty", tmp_path / "a" / "b"):
        export_to(to, tokenizer)
        assert read_hub(to)[0] == LLAMA


def test_a_failure_halfway_leaves_the_earlier_export(tmp_path, tokenizer):
    export_to(tmp_path / "out", tokenizer)
    before = contents(tmp_path / "out")

    def tensor(name):
        if name == "norm.weight":
            raise RuntimeError("a rank died")
        return random_weights(LLAMA)[name]

    with pytest.raises(RuntimeError, match="a rank died"):
        export_to(tmp_path / "out", tokenizer, tensor=tensor)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, tokenizer):
    """A limit on the size of files stands for the full disk: the write call fails alike."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limit[1]))
    try:
        with pytest.raises(UserError, match=r"cannot export to .*: File too large"):
            export_to(tmp_path / "out", tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.iterdir())


def test_the_earlier_export_comes_back_when_the_new_one_cannot_take_its_place(
    tmp_path, tokenizer, monkeypatch
):
    export_to(tmp_path / "out", tokenizer)
    before = contents(tmp_path / "out")

    def rename(path, to, rename=Path.rename):
        if path.name == ".out.export":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt):
        export_to(tmp_path / "out", tokenizer, shape=GPT2)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_place_that_cannot_be_looked_into_is_a_sentence(tmp_path, tokenizer):
    (tmp_path / "file").write_text("")
    for to, why in (("file/out", "Not a directory"), ("x" * 300, "File name too long")):
        with pytest.raises(UserError, match=rf"cannot export to .*: {why} \(.*\); choose another"):
            export_to(tmp_path / to, tokenizer)


@pytest.mark.parametrize("end", [300, 10**6])
def test_an_end_that_is_no_token_is_refused_first(end, tmp_path, tokenizer):
    with pytest.raises(UserError, match="ends a document"):
        export_to(tmp_path / "out", tokenizer, end=end)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_that_is_none_is_refused_first(tmp_path):
    broken = tmp_path / "tokenizer.json"
    for path, content in ((broken, "{}"), (tmp_path / "missing.json", None)):
        if content:
            path.write_text(content)
        with pytest.raises(UserError, match="is not a tokenizer"):
            export_to(tmp_path / "out", path)
    assert not (tmp_path / "out").exists()


def test_a_shape_without_a_class_is_refused_first(tmp_path, tokenizer):
    with pytest.raises(UserError, match="norm_at"):
        export_to(tmp_path / "out", tokenizer, shape=replace(LLAMA, norm_at="after"))
    assert not list(tmp_path.iterdir())


def test_the_written_config_is_json_a_person_can_read(tmp_path, tokenizer):
    export_to(tmp_path / "out", tokenizer)
    text = (tmp_path / "out" / "config.json").read_text()
    assert json.loads(text)["architectures"] == ["LlamaForCausalLM"]
    assert text.count("\n") > 10


BERT = replace(
    GPT2,
    family="encoder",
    norm_at="after",
    feedforward="gelu_exact",
    norm_eps=1e-5,
    tie_embeddings=True,
    token_types=1,
    embedding_norm=True,
    transform=True,
    first_position=2,
)
MASK = "<|mask|>"


def roberta_tokenizer(folder, *, pad):
    path = folder / "tokenizer.json"
    extra = (tokenizers.PAD,) if pad else ()
    made = tokenizers.train(["the quick brown fox, 12 foxes\n\n"] * 3, 300, MASK, extra=extra)
    path.write_text(made.to_str())
    return path


def test_a_mask_token_moves_no_position_of_an_exported_roberta(transformers, tmp_path):
    """The mask token was token 1, which transformers takes for padding."""
    path = roberta_tokenizer(tmp_path, pad=True)
    tensors = export_to(tmp_path / "out", path, shape=BERT)
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (loaded.pad_token, loaded.pad_token_id, loaded.mask_token) == ("<|pad|>", 1, MASK)
    ids = tokenizers.load(path).encode("the quick <|pad|> fox, 12").ids
    assert 1 not in ids and loaded.mask_token_id not in ids
    tokens = torch.tensor([[0, *ids]])
    tokens[0, 2] = loaded.mask_token_id
    model = Transformer(BERT)
    model.load_state_dict(tensors)
    with torch.no_grad():
        mine = model.logits(model(tokens, torch.arange(tokens.shape[1])[None]))
        expected = theirs(tokens).logits
    assert (mine - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_roberta_whose_padding_could_be_text_is_not_exported(tmp_path, tokenizer):
    for path in (roberta_tokenizer(tmp_path, pad=False), tokenizer):
        with pytest.raises(UserError, match=r"token 1 of .* takes token 1 for padding, .*<\|pad\|"):
            export_to(tmp_path / "out", path, shape=BERT)
        assert not (tmp_path / "out").exists()
