"""Building: copies dropped before the split, the split by content, everything accounted for."""

import json
import re
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from howdah.base.errors import UserError
from howdah.text import building
from howdah.text.building import build, split
from howdah.text.sources import Data, Source, Text


def lines(path, *texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return Source(str(path))


def built(tmp_path, *sources, vocab=300, **settings):
    """(what was said, the index, the shares of progress)."""
    said, shares = [], []
    folder = tmp_path / "out"
    folder.mkdir()
    build(Data(sources, **settings), folder, vocab=vocab, say=said.append, progress=shares.append)
    return said, json.loads((folder / building.INDEX).read_text()), shares


digests = st.lists(
    st.lists(st.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "big")), min_size=1, max_size=9),
    min_size=1,
    max_size=3,
)


@given(digests, st.floats(0.01, 0.99))
def test_every_source_trains_and_something_is_held_out(sources, share):
    unique = list(dict.fromkeys(digest for source in sources for digest in source))
    cut = len(unique) // 2
    sources = [part for part in (unique[:cut], unique[cut:]) if part]
    if all(len(source) == 1 for source in sources):
        with pytest.raises(UserError, match="at least 2 documents"):
            split(sources, share)
        return
    held = split(sources, share)
    assert held
    assert all(set(source) - held for source in sources)


def test_about_the_share_is_held_out_and_others_do_not_change_it():
    source = [blake2b(str(i).encode(), digest_size=16).digest() for i in range(4000)]
    held = split([source], 0.1)
    assert 0.08 < len(held) / len(source) < 0.12
    assert split([source[:2000]], 0.1) == held & set(source[:2000])
    assert held < split([source], 0.2)


def test_copies_are_dropped_before_the_split(tmp_path):
    texts = [f"document {i}" for i in range(20)]
    one = lines(tmp_path / "one.jsonl", *texts, *texts[:5])
    two = lines(tmp_path / "two.jsonl", *texts[5:10], "only here")
    said, index, _ = built(tmp_path, one, two, validation_share=0.3)
    assert index["facts"]["documents"] == 21
    assert index["facts"]["duplicates"] == 10
    counts = {name: count["starts"] for name, count in index["tokens"].items()}
    assert sum(counts.values()) == 21
    assert counts["source1"] == 1
    assert any("21 documents" in sentence and "10 copies" in sentence for sentence in said)


def test_a_source_of_nothing_but_copies_is_refused(tmp_path):
    one, two = (lines(tmp_path / f"{n}.jsonl", "a", "b") for n in range(2))
    with pytest.raises(UserError, match=r"1\.jsonl holds no document"):
        built(tmp_path, one, two)


# -- data.validation ---------------------------------------------------------------


def counts_of(index):
    return {name: count["starts"] for name, count in index["tokens"].items()}


def test_validation_text_is_held_out_and_its_copies_are_not_trained_on(tmp_path):
    texts = [f"document {i}" for i in range(20)]
    train = lines(tmp_path / "train.jsonl", *texts, texts[0])
    held = [lines(tmp_path / f"{n}.jsonl", *texts[18 + n :], f"only {n}") for n in range(2)]
    said, index, _ = built(tmp_path, train, validation=tuple(held))
    assert counts_of(index) == {"source0": 18, "held_out": 4}
    assert index["facts"]["documents"] == 22 and index["facts"]["duplicates"] == 4
    assert "22 documents, 0.0 MB; 4 of them held out; 4 copies left out" in said
    assert "2 documents of data.sources are in data.validation too, and are not trained on" in said


def test_the_tokenizer_is_not_trained_on_validation_text(tmp_path):
    train = lines(tmp_path / "a.jsonl", "plain words again and again " * 3)
    held = lines(tmp_path / "b.jsonl", "zyzzyva " * 50)
    built(tmp_path, train, validation=(held,), vocab=290)
    tokens = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    assert any("agai" in token for token in tokens) and not any("zyzz" in t for t in tokens)


@pytest.mark.parametrize(
    ("train", "held", "sentence"),
    [
        ("ab", "", r"data\.validation: .*b\.jsonl holds no document that is not empty or a copy;"),
        ("ab", "ba", r"data\.sources: .*a\.jsonl holds no document that is not empty or a copy;"),
    ],
)
def test_text_to_train_on_and_text_to_hold_out_are_both_needed(tmp_path, train, held, sentence):
    one, two = lines(tmp_path / "a.jsonl", *train), lines(tmp_path / "b.jsonl", *held)
    with pytest.raises(UserError, match=f"^{sentence}"):
        built(tmp_path, one, validation=(two,))


def test_one_document_may_be_all_the_validation_text(tmp_path):
    one, two = lines(tmp_path / "a.jsonl", "alone"), lines(tmp_path / "b.jsonl", "another")
    assert counts_of(built(tmp_path, one, validation=(two,))[1]) == {"source0": 1, "held_out": 1}


# -- what is told --------------------------------------------------------------------


def test_what_was_skipped_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.txt").write_bytes(b"\xff\xff")
    said, index, _ = built(tmp_path, Source(str(tmp_path)))
    assert index["facts"]["skipped"] == 1
    assert any("skipped 1 " in sentence and "c.txt" in sentence for sentence in said)


def test_the_how_to_shows_the_lines_that_tell_what_is_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"text {number}")
    (folder / "copy.txt").write_text("text 0")
    (folder / "bad.txt").write_bytes(b"good until \xff here")
    (folder / "prices.csv").write_text("text,price\na,1\n")
    held = tmp_path / "held.jsonl"
    held.write_text(json.dumps({"text": "text 1"}))
    said, *_ = built(tmp_path, Source("text"), validation=(Text("held.jsonl"),))
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "own-text.md").read_text("utf-8")
    shown = re.findall(r"^\| `([^`]*\d[^`]*)` \|", page, re.M)
    assert len(shown) == 4
    for line in shown:
        words = re.escape(line).replace(r"\.\.\.", ".*")
        pattern = re.sub(r"\d+(\\.\d+)?", r"[\\d.]+", words)
        assert [one for one in said if re.fullmatch(pattern, one)], (line, said)


def test_a_source_where_all_is_skipped_says_why(tmp_path):
    (tmp_path / "c.txt").write_bytes(b"\xff\xff")
    with pytest.raises(UserError, match=r"holds no document .*1 skipped: .*c\.txt"):
        built(tmp_path, Source(str(tmp_path)))


def test_one_document_cannot_be_divided(tmp_path):
    told = r"has a single document; .* at least 2 documents, or .* with data\.validation$"
    with pytest.raises(UserError, match=told):
        built(tmp_path, lines(tmp_path / "a.jsonl", "alone"))


def test_copies_of_one_document_are_told_where_it_cannot_be_divided(tmp_path):
    """A folder of equal files was called a single document."""
    told = r"single document once copies are left out \(5 here\); .* with data\.validation$"
    with pytest.raises(UserError, match=told):
        built(tmp_path, lines(tmp_path / "a.jsonl", *["alone"] * 6))


def test_the_tokenizer_is_not_trained_on_what_is_held_out(tmp_path):
    """A word that only the held-out document has cannot become an entry."""
    texts = ["plain words again and again " * 3, "zyzzyva " * 50]
    ordered = sorted(texts, key=lambda text: blake2b(text.encode(), digest_size=16).digest())
    built(tmp_path, lines(tmp_path / "a.jsonl", *texts), validation_share=1e-9, vocab=290)
    tokens = json.loads((tmp_path / "out" / "tokenizer.json").read_text())["model"]["vocab"]
    held_word, train_word = ("zyzz", "agai") if ordered[0] is texts[1] else ("agai", "zyzz")
    assert any(train_word in token for token in tokens)
    assert not any(held_word in token for token in tokens)


def test_sources_that_change_while_they_are_read_are_refused(tmp_path):
    source = lines(tmp_path / "a.jsonl", "one", "two", "three")

    def change(sentence):
        if sentence == "encoding":
            lines(tmp_path / "a.jsonl", "one", "two")

    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="changed while they were read"):
        build(Data((source,)), tmp_path / "out", vocab=300, say=change, progress=float)


def test_progress_rises_to_one(tmp_path):
    _, _, shares = built(tmp_path, lines(tmp_path / "a.jsonl", *map(str, range(50))))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0 and shares[0] < 1


def test_bad_input_is_refused_before_the_reading(tmp_path):
    with pytest.raises(UserError, match="at least 257"):
        built(tmp_path, Source("nowhere"), vocab=100)
