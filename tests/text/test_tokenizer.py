"""Tokenizers: lossless, with an end that no text can spell, and refused when they cannot serve."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from howdah.base.errors import UserError
from howdah.text import tokenizer as tokenizers

TEXTS = ["the cat sat on the mat, the cat sat", "def f(x):\n    return x\n"] * 3
TRAINED = tokenizers.train(TEXTS, 280)


@given(st.text() | st.text(alphabet="the cat\n\t é😀\u200d\x00<|end|>"))
def test_encoding_loses_nothing(text):
    ids = TRAINED.encode(text, add_special_tokens=False).ids
    assert TRAINED.decode(ids, skip_special_tokens=False) == text


def test_no_text_can_spell_the_end(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(TRAINED.to_str())
    for tokenizer in (TRAINED, tokenizers.load(path)):
        end = tokenizers.end_of(tokenizer, "x")
        assert end not in tokenizer.encode("a <|end|> b").ids


def test_training_twice_gives_the_same_tokenizer():
    assert tokenizers.train(TEXTS, 280).to_str() == TRAINED.to_str()
    assert tokenizers.entries(TRAINED) == 280


def test_long_words_are_cut_where_a_tokenizer_is_trained():
    """Its time grew with the square of a word's length."""
    word = "ab" * tokenizers.LONG  # two parts
    parts = list(tokenizers._parts(f"one {word} two"))
    assert parts == [f"one {word[: tokenizers.LONG]}", f"{word[tokenizers.LONG :]} two"]
    assert list(tokenizers._parts("a few words")) == ["a few words"]
    tokenizer = tokenizers.train([word], 300)
    assert tokenizer.decode(tokenizer.encode(word).ids) == word


def test_little_text_gives_fewer_entries():
    assert tokenizers.entries(tokenizers.train(["ab"], 1000)) < 300


def test_a_vocabulary_without_room_for_the_bytes_is_refused():
    assert tokenizers.entries(tokenizers.train(TEXTS, 257)) == 257
    with pytest.raises(UserError, match=r"vocab is 256.* at least 257"):
        tokenizers.train(TEXTS, 256)
    with pytest.raises(UserError, match=r"<\|end\|> and <\|pad\|> and <m> need 259 entries"):
        tokenizers.train(TEXTS, 258, "<m>", extra=(tokenizers.PAD,))


def test_padding_is_token_1_and_no_text():
    made = tokenizers.train(TEXTS, 280, "<m>", extra=(tokenizers.PAD,))
    assert [made.token_to_id(name) for name in ("<|end|>", "<|pad|>", "<m>")] == [0, 1, 2]
    assert 1 not in made.encode("a <|pad|> b").ids
    assert tokenizers.train(TEXTS, 280, "<m>").token_to_id("<m>") == 1  # as it was for BERT


def word_level(*words, special=()):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, words[0]))
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    return tokenizer


def test_the_end_is_looked_up_by_name():
    assert tokenizers.end_of(word_level("a", "b", special=["</s>"]), "x") == 2
    both = word_level("a", special=["</s>", "<|endoftext|>"])
    assert tokenizers.end_of(both, "x") == both.token_to_id("<|endoftext|>")
    with pytest.raises(UserError, match=r"mine has no token that ends a document; .*<\|end\|>"):
        tokenizers.end_of(word_level("a", "b"), "mine")


def test_a_wordpiece_tokenizer_ends_documents_with_any_of_its_tokens():
    """BERT's have none of the usual ends; there was no way to name another."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "un", "##able"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}))
    assert tokenizers.end_of(tokenizer, "x") == 3
    assert tokenizers.end_of(tokenizer, "x", "[PAD]") == 0
    assert tokenizers.encode(tokenizer, ["unable"])[0].ids == [4, 5]
    tokenizer.add_special_tokens(["[EOD]"])
    with pytest.raises(
        UserError, match=r"data\.end_token is '\[EOP\]', which x does not have; did .* '\[EOD\]'\?"
    ):
        tokenizers.end_of(tokenizer, "x", "[EOP]")


def test_size_is_the_largest_id_for_ids_may_have_gaps():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 9}, "a"))
    assert tokenizers.entries(tokenizer) == 10
    tokenizers.require_fits(10, 10, "mine")
    with pytest.raises(UserError, match=r"mine has 10 entries but model\.vocab is 9"):
        tokenizers.require_fits(10, 9, "mine")


def test_a_tokenizer_is_found_by_file_or_folder(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        tokenizers.find(str(tmp_path))
    with pytest.raises(UserError, match="nothing does not exist"):
        tokenizers.find(str(tmp_path / "nothing"))
    path.write_text(TRAINED.to_str())
    assert tokenizers.find(str(tmp_path)) == tokenizers.find(str(path)) == path


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json"])
def test_a_file_that_is_no_tokenizer_is_a_sentence(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizers.load(path)


def test_a_tokenizer_that_is_no_file_is_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer\.json is a pipe, a socket or a device"):
        tokenizers.find(str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\); name a tokenizer"):
        tokenizers.find("x" * 300)


def test_a_tokenizer_of_gigabytes_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "LARGEST", 10)
    (tmp_path / "tokenizer.json").write_text(TRAINED.to_str())
    for ask in (tokenizers.load, tokenizers.fingerprint):
        with pytest.raises(UserError, match="more than the 10 bytes that are read"):
            ask(tmp_path / "tokenizer.json")


def test_text_that_a_tokenizer_cannot_say_is_a_sentence():
    """The library raises a bare Exception in the middle of a corpus."""
    model = models.BPE(vocab={"a": 0, "b": 1}, merges=[], unk_token="?")
    with pytest.raises(
        UserError, match=r"data\.tokenizer: it cannot encode the text \(.*\); choose"
    ):
        tokenizers.encode(Tokenizer(model), ["abc"])
    assert [found.ids for found in tokenizers.encode(Tokenizer(model), ["ab", ""])] == [[0, 1], []]


def test_a_tokenizer_that_loads_and_cannot_encode_is_a_sentence(tmp_path):
    """`train` said it; a prompt, and rows of a task, ended in the library's words."""
    words = Tokenizer(models.WordPiece({"a": 0, "<|end|>": 1}))
    words.save(str(tmp_path / "tokenizer.json"))
    loaded = tokenizers.load(tmp_path / "tokenizer.json")
    for call in (tokenizers.encode_one, lambda *both: tokenizers.prompt_ids(*both, 1)):
        with pytest.raises(UserError, match=r"it cannot encode the text \(.*UNK.*\); choose"):
            call(loaded, "zz")


def test_a_panic_of_the_library_is_a_sentence(tmp_path):
    """pyo3's exception is no Exception. One of its threads is a limit of the machine, and stays."""
    path = tmp_path / "tokenizer.json"
    tokenizers.train(["a few words"], 300).save(str(path))
    said = json.loads(path.read_text())
    said["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(said))
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer \(Precompiled"):
        tokenizers.load(path)
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(panic), tokenizers.in_words("all"):
        raise panic("ThreadPoolBuildError")
    with pytest.raises(UserError, match=r"^all \(at once\)$"), tokenizers.in_words("all"):
        raise panic("at once")


def test_truncation_and_padding_of_a_brought_tokenizer_are_turned_off(tmp_path):
    cut = Tokenizer.from_str(TRAINED.to_str())
    cut.enable_truncation(2)
    cut.enable_padding(length=8)
    path = tmp_path / "tokenizer.json"
    path.write_text(cut.to_str())
    assert json.loads(path.read_text())["truncation"]
    whole = tokenizers.load(path).encode("x y z x y z").ids
    assert whole == TRAINED.encode("x y z x y z").ids and len(whole) > 8
    assert len(Tokenizer.from_file(str(path)).encode("x y z x y z").ids) == 8  # had it stayed


def test_the_fingerprint_is_of_the_contents(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("a")
    two.write_text("a")
    assert tokenizers.fingerprint(one) == tokenizers.fingerprint(two)
    two.write_text("b")
    assert tokenizers.fingerprint(one) != tokenizers.fingerprint(two)
