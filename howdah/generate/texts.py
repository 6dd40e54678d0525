"""The text of tokens, piece by piece as they arrive."""

from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from howdah.generate.draw import Draw
from howdah.generate.predictor import Predictor
from howdah.generate.rows import generate
from howdah.text.tokenizer import prompt_ids

UNFINISHED = "\ufffd"  # what a decoder shows for the first bytes of a character


def sample_text(
    model: Predictor, tokenizer: Tokenizer, prompt: str, *, length: int, draw: Draw, end: int
) -> Iterator[str]:
    """Yields the text that follows `prompt`, in pieces of whole characters.

    Raises UserError for a prompt that cannot be continued.
    """
    tokens = prompt_ids(tokenizer, prompt, end)
    return decode(tokenizer, generate(model, tokens, length=length, draw=draw, ends=[end]))


def decode(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of `tokens`, piece by piece, as the tokens arrive.

    A character may be spread over several tokens, and a decoder may treat the first token of a text
    differently. So each piece is decoded together with the piece before it:

        tokens   | shown before | last piece | new |
                                ^ start      ^ shown
    """
    all_tokens: list[int] = []
    start = shown = 0
    piece = ""
    for token in tokens:
        all_tokens.append(token)
        before = tokenizer.decode(all_tokens[start:shown])
        piece = tokenizer.decode(all_tokens[start:])[len(before) :]
        if piece and not piece.endswith(UNFINISHED):
            yield piece
            start, shown, piece = shown, len(all_tokens), ""
    if piece:
        yield piece
