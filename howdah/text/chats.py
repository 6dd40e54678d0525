"""What `data.chat` asks of a run's data, said before any text is encoded."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from tokenizers import Tokenizer

from howdah.base.errors import UserError, shown
from howdah.base.files import read_text
from howdah.text import synthetic, tokenised
from howdah.text import tokenizer as tokenizers
from howdah.text.sources import (
    STDLIB,
    Data,
    Text,
    documents_of,
    nothing_in,
    texts,
    unreadable,
)
from howdah.text.template import Chat, manner_of
from howdah.text.turns import Conversation

FIRST = 8  # conversations of each source that are looked at


def chat_of(data: Data) -> Chat:
    """What makes tokens of the conversations of a run. Raises UserError."""
    name = str(data.tokenizer)
    path = tokenizers.find(name)
    with tokenizers.in_words(f"data.tokenizer: {path} is not a tokenizer"):
        tokenizer = Tokenizer.from_str(read_text(path, tokenizers.LARGEST))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Chat(manner_of(name), tokenizer, every=data.chat == "all", name=name)


def settled(data: Data) -> Data:
    """The data of a run; conversations end with the token that their tokenizer's folder names."""
    if not data.chats or data.end_token is not None or data.tokenizer is None:
        return data
    return replace(data, end_token=manner_of(data.tokenizer).end)


def chat_problems(data: Data, family: str) -> Iterator[str]:
    """Yields a sentence for each reason why the conversations of a run cannot be trained on. The
    first ones of each source are encoded.
    """
    if not data.chats:
        return
    if family != "decoder":
        yield (
            f"data.chat trains a decoder to answer, and the model is an {family}; leave it out, "
            "and of an encoder-decoder name the target of each source"
        )
        return
    if data.labelled:
        yield "data.chat is of answers and data.sources.label of classes; leave one of them out"
        return
    if data.tokenizer is None:
        yield (
            f"data.chat is {data.chat}, and conversations are written by the chat template of a "
            "tokenizer: name its folder in data.tokenizer, or a model's in init_from"
        )
        return
    problems = [told for key, one in texts(data) for told in _no_rows(key, one)]
    yield from problems
    if not problems and not unreadable(data):
        try:
            _encode_first(data)
        except UserError as problem:
            yield str(problem)


def _no_rows(key: str, source: Text) -> Iterator[str]:
    """Yields a sentence for a source that cannot hold conversations."""
    path = source.path
    if path == STDLIB or tokenised.is_tokenised(path) or synthetic.is_synthetic(path):
        yield (
            f"{key}.path is {shown(path)}, which has no rows, and data.chat reads conversations; "
            "name a .jsonl, a .parquet or a dataset"
        )


def _encode_first(data: Data) -> None:
    """Raises UserError if the first conversations of a source cannot be encoded, or it has none."""
    chat = chat_of(data)
    for _, one in texts(data):
        if one.path.startswith("hf:"):
            continue
        skipped: list[str] = []
        first = list(islice(documents_of(one, data, skipped.append), FIRST))
        if not first:
            raise nothing_in(one, skipped)
        for row in first:
            assert isinstance(row, Conversation)
            chat(row)
