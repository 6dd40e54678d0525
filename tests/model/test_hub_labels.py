"""Folders of classifiers: the logits of transformers' ...ForSequenceClassification, both ways; a
head for labels in the place of that of a language model; and what is refused.
"""

import json
from dataclasses import replace

import pytest
import torch

from howdah.base.errors import UserError
from howdah.checkpoint.export import export
from howdah.model.hub import read_hub
from howdah.shapes.huggingface import shape_from_config
from howdah.shapes.huggingface_written import class_of, config
from howdah.shapes.presets import preset
from howdah.shapes.shape import with_labels
from howdah.shapes.weights import weights
from howdah.text import tokenizer as tokenizers
from howdah.train.resume import read_folder
from howdah.train.whole_model import loaded_model
from howdah.verify.case import small_shape

transformers = pytest.importorskip("transformers")
LABELS, CPU = ("low", "middle", "high"), torch.device("cpu")
NAMES = ("bert-base", "roberta-base", "laptop", "gpt2-774m", "bloom-176b", "qwen3-8b")


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def shape_of(name):
    shape = with_labels(small_shape(preset(name), context=32), LABELS)
    return replace(shape, ffn_size=4 * shape.width if name == "bloom-176b" else shape.ffn_size)


def their_model(shape, head="SequenceClassification", **settings):
    torch.manual_seed(0)
    given = config(shape, end=0, dtype="float32", pad=1) | settings
    made = transformers.AutoConfig.for_model(**given)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(made).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def logits_of(folder, shape, tokens, seed=0):
    """Ours, at the token that stands for the text."""
    fill = read_folder(folder, shape, seed)
    model = loaded_model(fill, shape, dtype=torch.float32, device=CPU)
    with torch.no_grad():
        hidden = model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
        return model.logits(hidden[:, 0 if shape.family == "encoder" else -1])


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_folder_are_those_of_transformers(tmp_path, name):
    shape, tokens = shape_of(name), torch.randint(2, 60, (3, 9))
    model = their_model(shape)
    model.save_pretrained(tmp_path)
    found, _ = read_hub(tmp_path)
    assert found.labels == LABELS and class_of(found) == type(model).__name__
    with torch.no_grad():
        theirs = model(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert theirs.abs().max() > 0.1
    assert torch.allclose(logits_of(tmp_path, found, tokens), theirs, atol=1e-5)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_loaded_by_transformers_with_its_labels(tmp_path, name):
    shape, tokens = shape_of(name), torch.randint(2, 60, (3, 9))
    shape = replace(shape, vocab=320)
    extra = tokenizers.extra_tokens(shape)
    made = tokenizers.train(iter(["a cat", "a dog"] * 9), 300, extra=extra)
    made.save(str(tmp_path / "tokenizer.json"))
    torch.manual_seed(0)
    own = {one.name: 0.2 * torch.randn(one.shape) for one in weights(shape)}
    out = tmp_path / "out"
    export(
        shape=shape,
        tensor=own.__getitem__,
        tokenizer=tmp_path / "tokenizer.json",
        end=0,
        to=out,
        dtype=torch.float32,
    )
    theirs, said = transformers.AutoModelForSequenceClassification.from_pretrained(
        out, output_loading_info=True
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    assert theirs.config.id2label == dict(enumerate(LABELS))
    assert theirs.config.label2id["high"] == 2
    with torch.no_grad():
        expected = theirs.eval()(tokens, attention_mask=torch.ones_like(tokens)).logits
    again, tensor = read_hub(out)
    assert again.labels == LABELS
    assert all(torch.equal(tensor(one), value) for one, value in own.items())
    assert torch.allclose(logits_of(out, again, tokens), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["bert-base", "roberta-base", "laptop"])
def test_a_language_model_gets_a_fresh_head_by_the_seed(tmp_path, name):
    shape, tokens = shape_of(name), torch.randint(2, 60, (2, 9))
    head = "MaskedLM" if shape.pooler else "CausalLM"
    model = their_model(shape, head, architectures=None)
    model.save_pretrained(tmp_path)
    found, tensor = read_hub(tmp_path)
    assert found.labels == ()
    one, other = (logits_of(tmp_path, shape, tokens, seed) for seed in (1, 2))
    assert torch.equal(one, logits_of(tmp_path, shape, tokens, 1)) and not torch.equal(one, other)
    _, mine = read_hub(tmp_path, labels=LABELS, fresh=lambda weight: torch.zeros(1))
    assert torch.equal(mine("layers.1.attention.q.weight"), tensor("layers.1.attention.q.weight"))
    fresh = {one.name for one in weights(shape) if one.name.startswith(("pooler", "head"))}
    assert all(len(mine(one)) == 1 for one in fresh)


def test_a_pooler_that_is_there_is_used(tmp_path):
    """Of a BERT that was trained to tell neighbouring sentences, as Google's are."""
    shape = shape_of("bert-base")
    model = their_model(shape, "PreTraining", architectures=None)
    model.save_pretrained(tmp_path)
    _, tensor = read_hub(tmp_path, labels=LABELS, fresh=lambda weight: torch.zeros(1))
    assert torch.equal(tensor("pooler.weight"), model.bert.pooler.dense.weight)
    assert len(tensor("head.weight")) == 1


def test_a_classifier_of_other_labels_is_not_taken_for_this_one(tmp_path):
    shape = shape_of("bert-base")
    their_model(shape).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"differs from this run's in labels; leave the \[model\]"):
        read_folder(tmp_path, replace(shape, labels=("no", "yes")))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"problem_type": "regression"}, "has problem_type 'regression', and howdah computes only"),
        ({"problem_type": "multi_label_classification"}, "computes only 'single_label_classifi"),
        ({"id2label": {"0": "a", "2": "b"}}, "has id2label .*; name labels 0, 1 and so on"),
        ({"id2label": {"0": "a"}}, "model.labels has 'a' alone; two at least"),
        ({"id2label": {"0": "a", "1": "a"}}, "model.labels has 'a' twice; give each"),
        ({"id2label": {"0": "a", "1": 3}}, "has id2label .*; name labels 0, 1"),
    ],
    ids=str,
)
def test_other_heads_are_refused(settings, sentence):
    given = config(shape_of("bert-base"), end=0, dtype="float32", pad=1) | settings
    with pytest.raises(UserError, match=sentence):
        shape_from_config(json.loads(json.dumps(given)))


def test_labels_without_names_have_those_of_transformers():
    given = config(shape_of("bert-base"), end=0, dtype="float32", pad=1)
    del given["id2label"]
    assert shape_from_config(given).labels == ("LABEL_0", "LABEL_1")


def test_a_t5_has_no_head_for_labels():
    given = config(preset("t5-base"), end=0, dtype="float32")
    given["architectures"] = ["T5ForSequenceClassification"]
    with pytest.raises(UserError, match=r"model\.labels is for models of one stack"):
        shape_from_config(given)
