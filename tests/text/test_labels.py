"""Rows with a label: what is read of files, what a batch has of it, and what is refused, by file
and line.
"""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from howdah.base.errors import UserError
from howdah.plan.batch import MASKED
from howdah.shapes.presets import preset
from howdah.shapes.shape import with_labels
from howdah.text.batches import Rows, held_out_micros, micros, order_of
from howdah.text.labelled import Frame, Labels, frame_of, labels_of, row_of
from howdah.text.labels import check_labels, label_names, label_problems
from howdah.text.masking import task_of
from howdah.text.sources import Data, Source, Text, unreadable
from howdah.text.tokens import prepare

TEXTS = [("the cat sat", "cat"), ("a dog ran", "dog"), ("my cat ran", "cat"), ("no dog sat", "dog")]
ROWS = [{"text": f"{text} {n}", "label": label} for n in range(5) for text, label in TEXTS]
SHAPE = with_labels(preset("bert-base"), ("cat", "dog"))


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def data_of(tmp_path, rows=ROWS, held=ROWS[:3], **settings):
    source = Source(written(tmp_path / "train.jsonl", rows), label="label")
    validation = (Text(written(tmp_path / "held.jsonl", held), label="label"),) if held else ()
    return Data((source,), validation=validation, sequence_length=8, **settings)


def made(data, tmp_path, *, labels=None, **more):
    labels = labels or labels_of(SHAPE)
    return prepare(data, vocab=300, cache=tmp_path / "cache", say=str, labels=labels, **more)


# -- reading -------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet"])
def test_labels_are_read_from_every_format_with_fields(tmp_path, ending):
    path, rows = tmp_path / f"rows.{ending}", ROWS[:4]
    if ending == "jsonl":
        written(path, rows)
    elif ending == "json":
        path.write_text(json.dumps(rows))
    elif ending == "parquet":
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        gap = "\t" if ending == "tsv" else ","
        path.write_text("\n".join([gap.join(rows[0]), *(gap.join(row.values()) for row in rows)]))
    assert label_names(Data((Source(str(path), label="label"),))) == ("cat", "dog")


def test_labels_that_are_numbers_are_sorted_as_numbers(tmp_path):
    rows = [{"text": f"row {n}", "label": n} for n in (10, 9, 2, True)]
    assert label_names(data_of(tmp_path, rows[:3], [])) == ("2", "9", "10")
    assert label_names(data_of(tmp_path, rows, [])) == ("10", "2", "9", "true")
    rows = [{"text": "a", "label": label} for label in ("7", "10", "007", "07")]
    assert label_names(data_of(tmp_path, rows, [])) == ("007", "07", "7", "10")
    rows[0]["label"] = "1" * 5000
    assert label_names(data_of(tmp_path, rows, [])) == ("007", "07", "10", "1" * 5000)


def test_a_copy_with_another_label_is_another_row(tmp_path):
    rows = [*ROWS, ROWS[0], {**ROWS[0], "label": "dog"}]
    corpus = made(data_of(tmp_path, rows, held=[{"text": "one", "label": "cat"}]), tmp_path)
    assert (corpus.documents, corpus.duplicates) == (len(ROWS) + 2, 1)


# -- rows of a batch -----------------------------------------------------------


def test_an_encoder_has_the_label_at_the_first_token_and_a_decoder_at_the_last(tmp_path):
    data = data_of(tmp_path, order="sequential")
    corpus = made(data, tmp_path)
    order = order_of(corpus, sequence=8, seed=0)
    (micro,) = micros(corpus, order, Rows(micro=4), first=0, size=3)  # and a row of padding
    real = (micro.documents == 0).sum(1)
    for row, (text, label) in enumerate((r["text"], r["label"]) for r in ROWS[3:6]):
        ids = corpus.tokenizer.encode(text, add_special_tokens=True).ids
        assert ids[0] == ids[-1] == corpus.end  # the template of a tokenizer that is trained here
        kept = ids if len(ids) <= 8 else [*ids[:7], ids[-1]]
        assert micro.tokens[row, : real[row]].tolist() == kept
        assert micro.positions[row].tolist() == [*range(real[row]), *range(8 - real[row])]
        found = task_of(SHAPE, None, corpus, seed=0)(micro).labels[row]
        number = ("cat", "dog").index(label)
        assert (found[0], set(found[1:])) == (number, {MASKED})
        place = max(at for at, token in enumerate(kept) if token != corpus.end)
        assert np.flatnonzero(micro.labels[row] != MASKED).tolist() == [place]
        assert micro.labels[row, place] == number
    assert set(task_of(SHAPE, None, corpus, seed=0)(micro).labels[3]) == {MASKED}


def test_every_row_is_read_once_an_epoch_and_held_out_rows_once(tmp_path):
    corpus = made(data_of(tmp_path), tmp_path)
    order = order_of(corpus, sequence=8, seed=0)
    assert order.samples == (len(ROWS) - 3,)  # those of data.validation are left out
    (epoch,) = micros(corpus, order, Rows(micro=17), first=0, size=17)
    assert len({row.tobytes() for row in epoch.tokens}) == 17
    held = [*held_out_micros(corpus, Rows(micro=2), sequence=8)]
    assert sum(int((micro.labels != MASKED).sum()) for micro in held) == 3


def test_a_text_is_cut_as_transformers_cuts_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocab = {piece: n for n, piece in enumerate(["[PAD]", "[CLS]", "[SEP]", *"abcdefgh"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP] [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    frame = frame_of(tokenizer, end=2)
    assert frame == Frame(tail=2, pad=0)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
    for text in ("a b", "a b c", "a b c d e f g h"):
        ids = tokenizer.encode(text).ids
        for most in (5, 6, 20):
            tokens, label, _ = row_of(np.array([3, *ids]), frame, most)
            expected = theirs(text, truncation=True, max_length=most)["input_ids"]
            assert (tokens.tolist(), label) == (expected, 3)


def test_the_last_token_is_the_last_that_is_no_padding():
    """As transformers looks for it: GPT-2's padding is the token that ends a text, too."""
    assert row_of(np.array([1, 5, 6, 0]), Frame(0, pad=0), 9)[2] == 1
    assert row_of(np.array([1, 5, 6, 0]), Frame(0, pad=4), 9)[2] == 2
    assert row_of(np.array([1, 0]), Frame(0, pad=0), 9)[2] == 0


def test_a_tokenizer_that_is_trained_here_sees_no_labels(tmp_path):
    rows = [{"text": "aaaa", "label": "zzzz"}, {"text": "aaab", "label": "yyyy"}] * 30
    rows = [{**row, "text": f"{row['text']} {n}"} for n, row in enumerate(rows)]
    labels = Labels(("yyyy", "zzzz"), ("<|end|>", "$A"))
    corpus = made(data_of(tmp_path, rows, rows[:1]), tmp_path, labels=labels)
    words = corpus.tokenizer.get_vocab()
    assert "aa" in words and not any("zz" in word or "yy" in word for word in words)
    assert corpus.tokenizer.encode("a", add_special_tokens=True).tokens[0] == "<|end|>"


def test_other_labels_are_another_cache(tmp_path):
    data = data_of(tmp_path)
    first = made(data, tmp_path).folder
    assert made(data, tmp_path).folder == first
    assert made(data, tmp_path, labels=Labels(("dog", "cat"), labels_of(SHAPE).template)) != first


# -- refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"label": "cat"}, r"train\.jsonl line 21: no field 'text'"),
        ({"text": "the cat"}, r"train\.jsonl line 21: no field 'label'"),
        ({"text": "a", "lable": "cat"}, r"line 21: no field 'label'; did you mean 'lable'\?"),
        ({"text": "a", "label": None}, r"line 21: the field 'label' is empty; each text must"),
        ({"text": "a", "label": ""}, r"line 21: the field 'label' is empty; each text must"),
        ({"text": "a", "label": 0.5}, r"line 21: the field 'label' is 0\.5; a label is a name or"),
        ({"text": "a", "label": ["cat"]}, r"line 21: the field 'label' is \['cat'\]; a label is"),
        ({"text": 3, "label": "cat"}, r"line 21: the field 'text' is of type int"),
    ],
    ids=str,
)
def test_a_row_without_its_text_or_its_label_is_told_by_its_line(tmp_path, row, sentence):
    data = data_of(tmp_path, [*ROWS, row])
    with pytest.raises(UserError, match=sentence) as told:
        label_names(data)
    assert str(told.value).count("\n") == 0
    with pytest.raises(UserError, match=sentence):
        made(data, tmp_path)
    assert [*(tmp_path / "cache").glob("*.unfinished")] == []


def test_an_empty_text_is_left_out_or_stops(tmp_path):
    rows = [*ROWS, {"text": "", "label": "cat"}]
    assert made(data_of(tmp_path, rows), tmp_path).skipped == 1
    stops = data_of(tmp_path, rows, undecodable="stop")
    with pytest.raises(UserError, match=r"line 21: text is empty, or holds the character"):
        label_names(stops)


def test_a_table_without_the_column_is_told_by_its_name(tmp_path):
    (tmp_path / "rows.csv").write_text("text,class\na,b\n")
    with pytest.raises(UserError, match=r"rows\.csv: no column 'label'"):
        label_names(Data((Source(str(tmp_path / "rows.csv"), label="label"),)))


def test_one_label_for_all_rows_can_not_be_told_apart(tmp_path):
    data = data_of(tmp_path, [row for row in ROWS if row["label"] == "cat"])
    with pytest.raises(UserError, match=r"of 10 rows all have the label 'cat'; two labels at"):
        label_names(data)


@pytest.mark.parametrize("name", ["notes.txt", "notes"])
def test_text_without_fields_has_no_labels(tmp_path, name):
    """A file that is named, and one among others in a folder."""
    (tmp_path / "notes").mkdir()
    for file in (tmp_path / "notes.txt", tmp_path / "notes" / "a.txt"):
        file.write_text("the cat\n\na dog\n")
    data = Data((Source(str(tmp_path / name), label="label"),))
    sentence = r"\.txt is text, and a label is a field of a row; name the files of rows"
    with pytest.raises(UserError, match=sentence):
        label_names(data)


def test_rows_of_which_none_can_be_read_are_told(tmp_path):
    (tmp_path / "train.jsonl").write_bytes(b"\xff\n")
    data = Data((Source(str(tmp_path / "train.jsonl"), label="label"),))
    with pytest.raises(UserError, match=r"train\.jsonl holds no document.*line 1: the byte at off"):
        label_names(data)


def test_a_field_of_texts_in_the_place_of_labels_is_noticed(tmp_path):
    data = data_of(tmp_path, [{"text": "a", "label": f"name {n}"} for n in range(1001)])
    with pytest.raises(UserError, match=r"1,001 labels, such as 'name 0', and at most 1,000"):
        label_names(data)


def test_a_held_out_label_that_no_row_has_is_told_by_its_line(tmp_path):
    data = data_of(tmp_path, held=[*ROWS[:2], {"text": "a cow", "label": "cow"}])
    sentence = r"held\.jsonl line 3: the label 'cow' has no row of data\.sources"
    with pytest.raises(UserError, match=sentence):
        check_labels(data, ("cat", "dog"))
    with pytest.raises(UserError, match=sentence):
        made(data, tmp_path)


def test_a_label_that_the_model_does_not_have_is_told_by_its_line(tmp_path):
    data = data_of(tmp_path, [*ROWS, {"text": "a cow", "label": "cow"}])
    with pytest.raises(UserError, match=r"line 21: the label 'cow' is not among model\.labels"):
        made(data, tmp_path)


def test_a_label_of_held_out_rows_alone_is_told_by_its_line(tmp_path):
    """Where a share is held out, too: the only row of a label may be among it."""
    labels = Labels(("cat", "cow", "dog"), ("<|end|>", "$A"))
    for number in range(100):
        data = data_of(tmp_path, [*ROWS, {"text": f"cow {number}", "label": "cow"}], [])
        try:
            made(data, tmp_path / str(number), labels=labels)
        except UserError as problem:
            assert "train.jsonl line 21: the label 'cow' is of held-out rows alone" in str(problem)
            return
    pytest.fail("one in thirty rows is held out")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            Data((Source("stdlib", label="label"),)),
            r"sources\[0\]\.path is 'stdlib', which has none",
        ),
        (Data((Source("synthetic:1MB", label="a"),)), r"'synthetic:1MB', which has none; name"),
        (Data((Source("a.csv", label="a"), Source("b.csv"))), r"sources\[1\] has no label, and"),
        (
            Data((Source("a.csv", label="a"),), validation=(Text("b.csv"),)),
            r"validation\[0\] has no label",
        ),
        (Data((Source("a.jsonl", target="b", label="a"),)), r"a target and a label; a text has"),
        (Data((Source("a.csv", label="text"),)), r"are both 'text'; name two fields"),
        (Data((Source("a.csv", label="a"),), rows="padded"), r"has a row of its own; leave it"),
        (Data((Source("a.csv", label="a"),), chat="all"), r"data\.chat makes texts of conversat"),
        (Data((Source("a.csv", label="a"),), mask_token="[M]"), r"here it is to find labels"),
        (Data(), r"model\.labels tells texts apart, and data\.sources name no label; give"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_fields_that_do_not_fit_are_told(data, sentence):
    told = [*label_problems(data, SHAPE)]
    assert len(told) == 1
    with pytest.raises(UserError, match=sentence):
        raise UserError(told[0])


def test_what_cannot_be_read_is_told_before_anything_starts(tmp_path):
    data = data_of(tmp_path, [{"text": "a"}])
    (problem,) = unreadable(data)
    assert "train.jsonl line 1: no field 'label'" in problem
