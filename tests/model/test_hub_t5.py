"""T5 beside transformers: logits both ways, old files, and buckets of distances."""

import json
from dataclasses import replace

import pytest
import torch
from random_model import model_of, random_weights
from safetensors.torch import load_file, save_file

from howdah.base.errors import UserError
from howdah.model import relative
from howdah.model.attention import Cache
from howdah.model.hub import read_hub
from howdah.model.hub_names import names
from howdah.model.relative import buckets_of
from howdah.shapes.huggingface import shape_from_config
from howdah.shapes.huggingface_written import config
from howdah.shapes.shape import ModelShape
from howdah.shapes.weights import weights

transformers = pytest.importorskip("transformers")

T5 = ModelShape(
    family="encoder-decoder",
    layers=2,
    encoder_layers=3,
    width=16,
    heads=3,
    head_size=6,
    ffn_size=24,
    vocab=40,
    context=32,
    feedforward="relu",
    norm_eps=1e-6,
    positions="relative",
    tie_embeddings=True,
)
SHAPES = {
    "1.0": T5,
    "1.1": replace(T5, feedforward="geglu", tie_embeddings=False),
    "few buckets": replace(T5, relative_buckets=8),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def their_model(shape, dtype):
    """transformers' model of a shape, with random weights that are its own."""
    made = transformers.AutoConfig.for_model(**config(shape, end=1, start=0, dtype="float32"))
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration._from_config(made).to(dtype).eval()
    if not shape.tie_embeddings:  # transformers 5 ties what it makes, and what a file has not
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def batch():
    """Tokens of sources and targets, and which of the sources are no padding."""
    draw = torch.Generator().manual_seed(1)
    source, target = torch.randint(2, 40, (2, 3, 20), generator=draw)
    return source, target[:, :11], (torch.arange(20) < torch.tensor([[20], [7], [1]])).long()


def logits_of(model, source, target, seen):
    return model.logits(model(target, target, source=source, seen=seen))


@pytest.mark.slow_after(1)
@every_shape
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_equal(shape, dtype, bound, tmp_path, monkeypatch):
    theirs = their_model(shape, dtype)
    theirs.save_pretrained(tmp_path)
    found, tensor = read_hub(tmp_path)
    assert found == shape
    source, target, seen = batch()
    model = model_of(shape, {weight.name: tensor(weight.name) for weight in weights(shape)})
    mine = logits_of(model, source, target, seen)
    monkeypatch.setattr(torch, "float32", dtype)  # their norms are in float32 always
    with torch.no_grad():
        expected = theirs(source, attention_mask=seen, decoder_input_ids=target).logits
    assert mine.dtype == expected.dtype == dtype
    assert (mine - expected).abs().max() < bound * max(1, expected.abs().max())


@every_shape
def test_transformers_reads_a_folder_of_ours(shape, tmp_path):
    tensors = random_weights(shape, dtype=torch.float32)
    write_folder(tmp_path, shape, their_tensors(shape, tensors))
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path).eval()
    source, target, seen = batch()
    mine = logits_of(model_of(shape, tensors), source, target, seen)
    with torch.no_grad():
        expected = theirs(source, attention_mask=seen, decoder_input_ids=target).logits
    assert (mine - expected).abs().max() < 1e-5 * max(1, expected.abs().max())
    _, tensor = read_hub(tmp_path)
    assert all(torch.equal(tensor(name), value) for name, value in tensors.items())


def their_tensors(shape, tensors):
    return {theirs.name: tensors[theirs.ours[0]].contiguous() for theirs in names(shape)}


def write_folder(folder, shape, tensors):
    sizes = config(shape, end=1, start=0, dtype="float32")
    (folder / "config.json").write_text(json.dumps(sizes))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_old_files_have_copies_and_a_table_that_nobody_uses(tmp_path):
    tensors = random_weights(T5)
    stored = their_tensors(T5, tensors)
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    copies = [f"{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
    copies = {name: stored["shared.weight"].clone() for name in (*copies, "lm_head.weight")}
    write_folder(tmp_path, T5, stored | copies | {table: torch.ones(32, 3)})
    _, tensor = read_hub(tmp_path)
    assert all(torch.equal(tensor(name), value) for name, value in tensors.items())
    copies["decoder.embed_tokens.weight"] += 1
    write_folder(tmp_path, T5, stored | copies)
    with pytest.raises(UserError, match=r"decoder\.embed_tokens\.weight"):
        read_hub(tmp_path)


@every_shape
def test_config_and_shape_are_inverse(shape):
    sizes = json.loads(json.dumps(config(shape, end=3, start=5, dtype="bfloat16")))
    assert shape_from_config(sizes) == shape
    assert sizes["decoder_start_token_id"] == sizes["pad_token_id"] == 5


@pytest.mark.parametrize(
    ("name", "value"),
    [("relative_attention_max_distance", 64), ("feed_forward_proj", "gated-silu")],
)
def test_a_setting_that_changes_the_result_is_named(name, value):
    sizes = config(T5, end=1, start=0, dtype="float32") | {name: value}
    with pytest.raises(UserError, match=f"{name} {value!r}"):
        shape_from_config(sizes)


@pytest.mark.parametrize("buckets", [8, 32, 33])
@pytest.mark.parametrize("both_ways", [False, True])
def test_buckets_are_those_of_transformers(buckets, both_ways):
    theirs = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    distances = torch.arange(-400, 401)
    expected = theirs(distances, bidirectional=both_ways, num_buckets=buckets)
    assert torch.equal(buckets_of(distances, buckets, both_ways=both_ways), expected)


@pytest.mark.parametrize(
    ("farthest", "before", "both"),
    [
        (16, [5, 4, 4, 3, 2, 1, 0], [3, 2, 2, 2, 2, 1, 0, 5, 6, 6, 6, 6, 7]),  # of the docstring
        (128, [4, 4, 4, 3, 2, 1, 0], [2, 2, 2, 2, 2, 1, 0, 5, 6, 6, 6, 6, 6]),  # of the page
    ],
)
def test_the_pictures_of_the_buckets(monkeypatch, farthest, before, both):
    monkeypatch.setattr(relative, "FARTHEST", farthest)
    distances = torch.arange(-6, 7)
    assert buckets_of(distances[:7], 8, both_ways=False).tolist() == before
    assert buckets_of(distances, 8, both_ways=True).tolist() == both


def test_one_token_after_another_has_the_states_of_all_at_once():
    model = model_of(T5, random_weights(T5))
    source, target, seen = batch()
    with torch.no_grad():
        states, cache = model.encode(source, seen), Cache()
        parts = [target[:, :4], *target[:, 4:].split(1, 1)]
        each = [model.decode(part, states, seen, cache=cache) for part in parts]
        whole = model(target, target, source=source, seen=seen)
    assert (torch.cat(each, 1) - whole).abs().max() < 1e-12


def test_padding_of_a_source_is_not_seen():
    model = model_of(T5, random_weights(T5))
    source, target, seen = batch()
    other = torch.where(seen.bool(), source, 3)
    assert not torch.equal(source, other)
    assert torch.equal(
        logits_of(model, source, target, seen), logits_of(model, other, target, seen)
    )


def test_what_is_stored_is_what_transformers_stores(tmp_path):
    their_model(SHAPES["1.1"], torch.float32).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert sorted(stored) == sorted(theirs.name for theirs in names(SHAPES["1.1"]))
