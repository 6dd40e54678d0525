"""Training on labelled rows: a loss curve beside a plain loop of transformers, what a run says and
writes of its labels, and what keeps one from starting.
"""

import json

import pytest
import torch
from small_runs import losses, metrics, train_on

import howdah
from howdah.base.errors import UserError
from howdah.comm.transport import SingleRank
from howdah.config.recipe import Machine, load_run, resolve_run, resolved
from howdah.config.save import save_run
from howdah.train.finished_run import open_run
from howdah.train.label_scores import scores
from howdah.train.loop import train
from howdah.train.start import require_inputs

STEPS, BATCH, LENGTH = 8, 6, 16
WORDS = ("fine", "cheap", "fast", "bad", "late", "broken", "plain", "usual")
KINDS = {"good": WORDS[:3], "poor": WORDS[3:6], "so so": WORDS[6:]}
RECIPE = """
init_from = "{init}"
layout = "single"
seed = 1
threads = 1

[data]
sources = [{{ path = "{rows}", label = "label" }}]
validation = [{{ path = "{held}", label = "label" }}]
sequence_length = 16
order = "sequential"

[batch]
global_batch = 6

[method]
grad_clip = 0.7

[method.optimizer]
weight_decay = 0.0

[method.lr]
peak = 2e-3
warmup_steps = 0
schedule = "constant"

[train]
steps = 8
log_every = 1
evaluate_every = 4
"""


def rows_of(first, count):
    """Rows whose labels their words tell; of many lengths, some longer than a sample."""
    found = []
    for n in range(first, first + count):
        label = [*KINDS][n % 3]
        words = [KINDS[label][(n + k) % len(KINDS[label])] for k in range(1 + n % 19)]
        found.append({"text": f"order {n} was {' '.join(words)}", "label": label})
    return found


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def classifier(tmp_path):
    """Makes a folder of transformers' classifier, its recipe, and its rows."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    def make(kind, sizes, template):
        rows, held = rows_of(0, STEPS * BATCH), rows_of(900, 12)
        words = sorted({word for row in (*rows, *held) for word in row["text"].split()})
        special = ["[CLS]", "[PAD]", "[UNK]", "[SEP]"]  # a RoBERTa's padding is token 1
        vocab = {word: n for n, word in enumerate([*special, *words])}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(special)
        pairs = [(one, vocab[one]) for one in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(template, special_tokens=pairs)
        folder = tmp_path / "init"
        ours = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
        ours.save_pretrained(folder)
        labels = dict(enumerate(sorted(KINDS)))
        made = transformers.AutoConfig.for_model(
            kind, **sizes, vocab_size=len(vocab), id2label=labels, pad_token_id=1
        )
        torch.manual_seed(0)
        model = transformers.AutoModelForSequenceClassification.from_config(made)
        model.save_pretrained(folder)
        recipe = tmp_path / "classify.toml"
        held_file = written(tmp_path / "held.jsonl", held)
        rows_file = written(tmp_path / "rows.jsonl", rows)
        recipe.write_text(RECIPE.format(init=folder, rows=rows_file, held=held_file))
        return model, ours, rows

    return make


@pytest.fixture
def job_of(tmp_path, cache):
    def make(name, *overrides):
        machine = Machine(world=None, local_world=None, cores=1, cuda=0, cache=cache)
        run = load_run(tmp_path / "classify.toml", [f"folder={tmp_path / name}", *overrides])
        return resolve_run(run, machine)

    return make


BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.1,
}
LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "initializer_range": 0.1,
}
KINDS_OF_MODELS = {
    "bert": (BERT, "[CLS] $A [SEP]"),
    "roberta": (BERT | {"max_position_embeddings": 42, "type_vocab_size": 1}, "[CLS] $A [SEP]"),
    "llama": (LLAMA, "[CLS] $A"),
}
LAYOUTS = ("single x2", "dp2 zero2", "tp2 sp pp2 x2")


def a_plain_loop(model, tokenizer, rows):
    """The losses of transformers' model, of torch's AdamW and of batches in the rows' order."""
    numbers = {label: number for number, label in model.config.id2label.items()}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    found = []
    for step in range(STEPS):
        some = rows[step * BATCH :][:BATCH]
        texts = [row["text"] for row in some]
        read = tokenizer(
            texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        labels = torch.tensor([numbers[row["label"]] for row in some])
        given = {name: read[name] for name in ("input_ids", "attention_mask")}
        loss = model(**given, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    "kind", ["bert", *(pytest.param(one, marks=pytest.mark.slow) for one in ("roberta", "llama"))]
)
def test_a_loss_curve_is_that_of_a_plain_loop(classifier, job_of, workers, tmp_path, kind):
    sizes, template = KINDS_OF_MODELS[kind]
    model, tokenizer, rows = classifier(kind, sizes, template)
    expected = a_plain_loop(model, tokenizer, rows)
    assert expected[-1] < expected[0]
    for number, layout in enumerate(LAYOUTS):
        train_on(workers, job_of(str(number), f"layout={layout}"))
        found = losses(tmp_path / str(number))
        assert [found[step + 1] for step in range(STEPS)] == pytest.approx(expected, rel=1e-6)


# -- what a run has of its labels --------------------------------------------------


@pytest.fixture
def labelled(make_job, tmp_path):
    """Makes a job of the small recipe on labelled rows, from fresh weights."""
    rows = written(tmp_path / "rows.jsonl", rows_of(0, 60))

    def make(name, *overrides):
        source = f'data.sources=[{{path = "{rows}", label = "label"}}]'
        return make_job(name, source, "data.validation_share=0.2", *overrides)

    return make


ENCODER = ("model.preset=bert-base", "model.layers=2", "model.width=32", "model.heads=2")
ENCODER += ("model.ffn_size=64", "model.vocab=300", "model.context=32")


def test_a_run_tells_accuracy_and_f1_and_its_export_is_loaded(labelled, tmp_path):
    """From scratch: the labels are those of the rows, and what is said is written, too."""
    job = labelled("run", *ENCODER, "train.export=true", "train.evaluate_every=10")
    assert job.shape.labels == ("good", "poor", "so so")
    assert not job.shape.tie_embeddings and not job.shape.transform
    train(job, SingleRank())
    folder = tmp_path / "run"
    log = (folder / "log.txt").read_text()
    last = metrics(folder, "held_out_all")[20]
    assert set(last) == {"kind", "step", "loss", "accuracy", "f1"}
    told = f"loss {last['loss']:.4f}, accuracy {last['accuracy']:.2%}, macro F1 {last['f1']:.4f}"
    assert f"held-out at step 20, all of it: {told}" in log
    assert f"held-out    {told} of " in log
    assert set(metrics(folder, "held_out")) == {10, 20}
    assert "AutoModelForSequenceClassification.from_pretrained" in log
    assert "predicted" in log and "NOT EQUAL" not in log

    text = "order 7 was fine cheap fast"
    own, other = (
        howdah.pipeline("text-classification", path) for path in (folder, folder / "export")
    )
    assert own(text) == other(text)
    transformers = pytest.importorskip("transformers")
    theirs = transformers.pipeline("text-classification", str(folder / "export"))
    for how in ({}, {"top_k": 2}, {"top_k": None}):
        mine, expected = own([text, "late"], **how), theirs([text, "late"], **how)
        flat = [[one] if isinstance(one, dict) else one for one in mine]
        also = [[one] if isinstance(one, dict) else one for one in expected]
        for some, others in zip(flat, also, strict=True):
            assert [one["label"] for one in some] == [one["label"] for one in others]
            values = [one["score"] for one in others]
            assert [one["score"] for one in some] == pytest.approx(values, rel=1e-4)


def test_accuracy_is_that_of_the_model_that_was_saved(labelled, tmp_path):
    """Counted once more, by the pipeline."""
    job = labelled("run", "model.labels=[]", "train.steps=12")
    train(job, SingleRank())
    classify = howdah.pipeline("text-classification", tmp_path / "run")
    told = metrics(tmp_path / "run", "held_out_all")[12]
    held = held_out_rows(job)
    found = [one["label"] for one in classify([row["text"] for row in held])]
    labels = [row["label"] for row in held]
    right = sum(a == b for a, b in zip(found, labels, strict=True)) / len(held)
    assert told["accuracy"] == pytest.approx(right)
    names = job.shape.labels
    f1 = scores(
        [labels.count(name) for name in names],
        [found.count(name) for name in names],
        [sum(a == b == name for a, b in zip(found, labels, strict=True)) for name in names],
    ).f1
    assert told["f1"] == pytest.approx(f1)


def held_out_rows(job):
    """The rows that a share holds out, by the text that the tokenizer gives back."""
    corpus = howdah.train.start.prepare_tokens(job, lambda line: None)
    stream = corpus.held_out
    kept = [stream.document(n)[2:].tolist() for n in range(len(stream.starts))]
    texts = {corpus.tokenizer.decode(ids) for ids in kept}
    rows = [row for row in rows_of(0, 60) if row["text"] in texts]
    assert len(rows) == len(kept)
    return rows


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("layout", ["dp2 zero3 x1", "tp2 sp pp2 x2"])
def test_scores_of_a_layout_are_those_of_one_process(labelled, workers, tmp_path, layout):
    for name, words in (("one", "single"), ("some", layout)):
        more = ("train.steps=4", "method.precision=float64")
        job = labelled(name, *ENCODER, f"layout={words}", *more)
        if words == "single":
            train(job, SingleRank())
        else:
            train_on(workers, job)
    one, some = (metrics(tmp_path / name, "held_out_all")[4] for name in ("one", "some"))
    assert some["loss"] == pytest.approx(one["loss"], rel=1e-10)
    assert (some["accuracy"], some["f1"]) == (one["accuracy"], one["f1"])


def test_a_run_goes_on_with_its_labels_and_not_with_others(labelled, tmp_path):
    train(labelled("run", "train.steps=10"), SingleRank())
    train(labelled("run", "train.steps=12"), SingleRank())
    assert 12 in losses(tmp_path / "run")
    assert open_run(tmp_path / "run", say=print).shape.labels == ("good", "poor", "so so")
    with pytest.raises(UserError, match=r"holds a model with labels \['good', 'poor', 'so so'\]"):
        train(labelled("run", 'model.labels=["poor", "good", "so so"]'), SingleRank())


def test_run_toml_has_the_labels_and_asks_no_rows(labelled, tmp_path):
    job = labelled("run")
    (tmp_path / "run").mkdir()
    run = load_run(
        tmp_path / "small.toml",
        [f'data.sources=[{{path = "{tmp_path / "rows.jsonl"}", label = "label"}}]'],
    )
    save_run(resolved(run, job), tmp_path / "run" / "run.toml")
    (tmp_path / "rows.jsonl").unlink()
    assert load_run(tmp_path / "run").model.labels == ("good", "poor", "so so")


# -- scores ------------------------------------------------------------------------


def test_scores_are_those_of_scikit_learn():
    """f1_score([0, 0, 1, 2, 2, 2], [0, 1, 1, 2, 2, 0], average="macro") is 0.6555…, by hand: 1/2,
    2/3 and 4/5; a label that is in neither does not count, one that is never met has 0.
    """
    assert scores([2, 1, 3], [2, 2, 2], [1, 1, 2]) == pytest.approx(
        (4 / 6, (1 / 2 + 2 / 3 + 4 / 5) / 3)
    )
    assert (
        scores([2, 1, 3, 0], [2, 2, 2, 0], [1, 1, 2, 0]).f1
        == scores([2, 1, 3], [2, 2, 2], [1, 1, 2]).f1
    )
    assert scores([4, 0], [0, 4], [0, 0]) == (0.0, 0.0)


# -- refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (('train.prompt="it was"',), r"a model with labels writes no text; leave it out"),
        (("model.tie_embeddings=true", 'model.labels=["a", "b"]'), r""),
        (('model.labels=["good"]',), r"model\.labels has 'good' alone"),
        (('data.mask_token="<|mask|>"',), r"here it is to find labels; leave it out"),
        (("model.preset=t5-base",), r"model\.labels is for models of one stack, and model\.family"),
    ],
    ids=str,
)
def test_what_labels_cannot_be_combined_with_is_refused(labelled, overrides, sentence):
    try:
        require_inputs(labelled("run", *overrides))
    except UserError as problem:
        import re

        assert re.search(sentence, str(problem)), problem
    else:
        assert not sentence


def test_rows_without_labels_are_no_rows_of_a_classifier(classifier, job_of, tmp_path):
    classifier("bert", BERT, "[CLS] $A [SEP]")
    source = f'data.sources=[{{path = "{tmp_path / "rows.jsonl"}"}}]'
    with pytest.raises(UserError, match=r"model\.labels tells texts apart, and data\.sources name"):
        job_of("run", source, "data.validation=[]", "data.order=random")


def test_pipelines_ask_for_the_head_that_they_need(labelled, make_job, tmp_path):
    train(labelled("labels", "train.steps=1"), SingleRank())
    train(make_job("words", "train.steps=1"), SingleRank())
    with pytest.raises(UserError, match=r"has a head for labels, and text-generation needs one"):
        howdah.pipeline("text-generation", tmp_path / "labels")
    with pytest.raises(UserError, match=r"has the head of a language model, and text-classificat"):
        howdah.pipeline("sentiment-analysis", tmp_path / "words")
    classify = howdah.pipeline("text-classification", tmp_path / "labels")
    for wrong in (0, 2.5, "all"):
        with pytest.raises(UserError, match=r"top_k is .*; it must be a whole number from 1 on"):
            classify("fine", top_k=wrong)
    with pytest.raises(UserError, match=r"the model reads 1 to 32"):
        classify("fine " * 100)
