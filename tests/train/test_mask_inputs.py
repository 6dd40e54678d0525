"""`data.mask_token` is refused before any text is read, where a text could hold it or it hides
nothing.
"""

from dataclasses import replace

import pytest
from random_model import BERT, LLAMA
from tokenizers import AddedToken, Tokenizer, models

from howdah.text.sources import Data
from howdah.train.inputs import input_problems


def problems(folder, shape=BERT, **data):
    return input_problems(Data(**data), shape=shape, prompt="", init_from=None, folder=folder)


@pytest.fixture
def wide():
    return replace(BERT, vocab=300)


@pytest.mark.parametrize(
    ("mask", "end", "what"),
    [
        ("", None, "is '', empty;"),
        ("x", None, "is 'x', one character, which a text can hold;"),
        ("<|end|>", None, "the token that ends a document;"),
        ("<e>", "<e>", "the token that ends a document;"),
        ("<|pad|>", None, "padding;"),
    ],
)
def test_a_mask_token_that_means_something_else(tmp_path, wide, mask, end, what):
    (told,) = problems(tmp_path, wide, mask_token=mask, end_token=end)
    assert told.startswith("data.mask_token is ") and what in told
    assert problems(tmp_path, wide, mask_token="<|mask|>") == []


def test_a_mask_token_that_ends_documents_in_a_tokenizer_given(tmp_path, wide):
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    made.add_special_tokens([AddedToken(name, special=True) for name in ("[SEP]", "[MASK]")])
    made.save(str(path := tmp_path / "tokenizer.json"))
    (told,) = problems(tmp_path, wide, mask_token="[SEP]", tokenizer=str(path))
    assert "is '[SEP]', the token that ends a document; name" in told
    assert problems(tmp_path, wide, mask_token="[MASK]", tokenizer=str(path)) == []


def test_a_decoder_has_no_mask_token(tmp_path, wide):
    (told,) = problems(tmp_path, replace(LLAMA, vocab=300), mask_token="<|mask|>")
    assert told.startswith("data.mask_token hides tokens from an encoder, and the model is a dec")


def test_a_roberta_needs_room_for_its_padding(tmp_path, wide):
    roberta = replace(wide, vocab=258, first_position=2)
    (told,) = problems(tmp_path, roberta, mask_token="<|mask|>")
    assert "need 259 entries" in told
    assert problems(tmp_path, replace(wide, vocab=258), mask_token="<|mask|>") == []
