"""Spans that are left out of texts, and pairs: what they depend on, and how they lie in a batch."""

import json
from dataclasses import replace

import numpy as np
import pytest

from howdah.base.errors import UserError
from howdah.plan.batch import MASKED
from howdah.plan.method import Method, Spans
from howdah.shapes.presets import preset
from howdah.text import tokenizer as tokenizers
from howdah.text.batches import Micro, Rows, held_out_micros, micros, order_of
from howdah.text.masking import task_of
from howdah.text.seq2seq import SpanCorruption
from howdah.text.sources import Data, Source, Text, check_sources, documents
from howdah.text.tokens import prepare
from howdah.train.inputs import input_problems
from howdah.verify.case import Case, corpus_of

END, START, SENTINELS = 0, 1, tuple(range(110, 100, -1))
TASK = SpanCorruption(Spans(), seed=4, sentinels=SENTINELS, start=START, end=END)
T5 = preset("t5-small")
SPECIAL = tokenizers.extra_tokens(T5)


def micro_of(samples, length=64, real=None):
    samples = np.array(samples)
    tokens = 2 + (samples[:, None] * 31 + np.arange(length) * 7) % 90
    labels = np.where(np.arange(length) < (real or length), tokens, MASKED)
    places = np.tile(np.arange(length), (len(samples), 1))
    return Micro(tokens, labels, places, np.zeros_like(tokens, np.int32), samples)


def row_of(micro, row):
    """Source and target of a row, without their padding."""
    source = micro.more["source"][row][micro.more["seen"][row] == 1]
    return source.tolist(), micro.labels[row][micro.labels[row] != MASKED].tolist()


def test_what_is_left_out_is_the_target():
    given = micro_of(range(20))
    made = TASK(given)
    for row in range(20):
        source, target = row_of(made, row)
        assert (source[-1], target[-1]) == (END, END)
        marks = [token for token in source if token in SENTINELS]
        assert marks == [token for token in target if token in SENTINELS] == [*SENTINELS[:3]]
        text, rest = [], target[:-1]
        for token in source[:-1]:
            if token in SENTINELS:  # its span is what follows it in the target
                rest = rest[1:]
                while rest and rest[0] not in SENTINELS:
                    text.append(rest.pop(0))
            else:
                text.append(token)
        assert text == given.tokens[row].tolist() and not rest
        assert len(target) == 10 + 3 + 1 and source[0] == text[0]  # 15 % of 64; text comes first
        assert made.tokens[row, 0] == START
        assert made.tokens[row, 1 : len(target)].tolist() == target[:-1]


def test_spans_depend_on_seed_and_sample_alone():
    one, other = TASK(micro_of([3, 4, 5])), TASK(micro_of([5, 3]))
    assert row_of(one, 0) == row_of(other, 1) and row_of(one, 2) == row_of(other, 0)
    again = replace(TASK, seed=5)(micro_of([3]))
    held_out = replace(TASK, name="held-out spans")(micro_of([3]))
    assert row_of(one, 0) != row_of(again, 0) != row_of(held_out, 0) != row_of(one, 0)


def test_all_cuts_are_drawn():
    found = {tuple(TASK._lengths("kept", sample, 5, 3)) for sample in range(200)}
    assert found == {(1, 1, 3), (1, 2, 2), (1, 3, 1), (2, 1, 2), (2, 2, 1), (3, 1, 1)}


@pytest.mark.parametrize("length", [1, 2, 3, 4, 9, 64])
@pytest.mark.parametrize(("share", "mean"), [(0.15, 3.0), (0.5, 1.0), (0.9, 2.0)])
def test_source_and_target_fit_whatever_the_sizes(length, share, mean):
    task = replace(TASK, spans=Spans(share, mean), sentinels=tuple(range(100, 200)))
    made = task(micro_of([1, 2, -1], length))
    for row in range(3):
        source, target = row_of(made, row)
        if row == 2 or not target:  # no sample, or too short for one: all is seen, nothing written
            assert not target and made.more["seen"][row].all()
        else:
            assert source[-1] == target[-1] == END and 2 < len(target) <= length >= len(source)
    assert length < 4 or row_of(made, 0)[1]


def test_a_row_that_is_shorter_than_a_sample_has_less():
    source, target = row_of(TASK(micro_of([7], 64, real=20)), 0)
    assert len(source) + len(target) == 20 + 2 + 2


def test_more_spans_than_sentinels_are_refused():
    task = replace(TASK, sentinels=SENTINELS[:2])
    with pytest.raises(UserError, match=r"leaves 3 spans out .* has 2 tokens for them"):
        task(micro_of([1]))


def test_the_task_of_an_encoder_decoder():
    case = Case(T5, None, Method(), samples=4, micro=2, sequence=16, steps=1, seed=0)
    corpus = corpus_of(case)
    task = task_of(T5, Method(), corpus, seed=0)
    assert isinstance(task, SpanCorruption) and task.name == "spans"
    assert task_of(T5, Method(), corpus, seed=0, held_out=True).name == "held-out spans"


# -- pairs ----------------------------------------------------------------------


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [
        {"en": f"{n} cats and {n + 1} dogs", "de": f"{n} Katzen" * (1 + n % 3)} for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def data_of(path, **of):
    return Data((Source(str(path), "en", "de"),), validation_share=0.2, **of)


def prepared(data, tmp_path, vocab=400):
    return prepare(data, vocab=vocab, cache=tmp_path / "cache", say=print, extra=SPECIAL)


def test_pairs_are_samples(pairs, tmp_path):
    corpus = prepared(data_of(pairs), tmp_path)
    assert corpus.start == 1 and corpus.tokenizer.token_to_id("<extra_id_99>") == 101
    (tokens,) = corpus.sources
    assert tokens.samples(99) + corpus.held_out.samples(99) == 40 == corpus.documents
    order = order_of(corpus, sequence=32, seed=0)
    assert order.samples == (len(tokens.starts),)
    (one, other) = micros(corpus, order, Rows(2), first=0, size=3)
    decode = corpus.tokenizer.decode
    for row in (0, 1):
        source, target = row_of(one, row)
        words = decode(source[:-1])
        assert source[-1] == target[-1] == corpus.end
        number = int(words.split()[0])
        assert words == f"{number} cats and {number + 1} dogs"
        assert decode(target[:-1]) == f"{number} Katzen" * (1 + number % 3)
        assert one.tokens[row, : len(target)].tolist() == [1, *target[:-1]]
    assert other.more["seen"][1].all() and (other.labels[1] == MASKED).all()  # padding
    held = [*held_out_micros(corpus, Rows(4), sequence=32)]
    assert sum(int((micro.samples >= 0).sum()) for micro in held) == corpus.held_out.samples(32)
    assert task_of(T5, Method(), corpus, seed=0)(one) is one


def test_a_pair_that_is_longer_than_a_sample_is_cut(pairs, tmp_path):
    corpus = prepared(data_of(pairs), tmp_path)
    order = order_of(corpus, sequence=4, seed=0)
    (one,) = micros(corpus, order, Rows(2), first=0, size=2)
    source, target = row_of(one, 0)
    assert len(source) == 4 and source[-1] == corpus.end and len(target) <= 4


def test_pairs_are_read_from_json_alone(pairs, tmp_path):
    array = tmp_path / "pairs.json"
    array.write_text(f"[{','.join(pairs.read_text().splitlines())}]")
    both = [[*documents(Text(str(path), "en", "de"))] for path in (pairs, array)]
    assert both[0] == both[1] and both[0][0] == "0 cats and 1 dogs\x1e0 Katzen"
    (told,) = check_sources(Data((Source("pairs.csv", "en", "de"),)))
    assert told.endswith("'pairs.csv'; name a .jsonl or a .json")
    mixed = Data((Source(str(pairs), "en", "de"), Source("stdlib")))
    assert any("train on pairs or on texts, not on both" in told for told in check_sources(mixed))


def test_a_pair_without_a_part_is_left_out(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = [{"en": "a", "de": "b"}, {"en": "", "de": "c"}, {"en": "d\x1e", "de": "e"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    skipped = []
    assert [*documents(Text(str(path), "en", "de"), skipped=skipped.append)] == ["a\x1eb"]
    assert len(skipped) == 2 and "line 2: en or de is empty" in skipped[0]
    with pytest.raises(UserError, match="no field 'fr'"):
        next(documents(Text(str(path), "en", "fr")))


@pytest.mark.parametrize(
    ("shape", "of", "said"),
    [
        (T5, {"mask_token": "<|mask|>"}, "data.mask_token hides tokens from an encoder, and what"),
        (preset("laptop"), {"paired": True}, "data.sources has pairs of a source and a target"),
        (T5, {"prompt": "def "}, "train.prompt is to be continued, and an encoder-decoder writes"),
        (replace(T5, vocab=300), {}, "model.vocab is 300, but 256 bytes and 102 special tokens"),
    ],
)
def test_what_a_run_cannot_read_is_said_first(tmp_path, shape, of, said):
    source = Source("x.jsonl", "a", "b" if of.get("paired") else "")
    data = Data((source,), mask_token=of.get("mask_token"))
    prompt = of.get("prompt", "")
    problems = input_problems(data, shape=shape, prompt=prompt, init_from=None, folder=tmp_path)
    assert any(problem.startswith(said) for problem in problems)


@pytest.mark.parametrize(
    ("special", "said"), [([], "has no token of padding"), (["<pad>"], "has no <extra_id_0>")]
)
def test_a_tokenizer_without_what_a_decoder_needs(tmp_path, special, said):
    made = tokenizers.train(["some text"], 300, extra=special)
    made.save(str(path := tmp_path / "tokenizer.json"))
    data = Data(tokenizer=str(path))
    (told,) = input_problems(data, shape=T5, prompt="", init_from=None, folder=tmp_path)
    assert said in told
