"""Made-up text: for a first try of a layout, and for measuring, where there is no corpus.

    synthetic:4MB    about so many bytes, the same on every machine

Words have made-up spellings, and the rank r word is as frequent as 1/r (Zipf's law), as in a real
language; what follows a word depends on it, so that a model has something to learn beyond
frequencies: half of all words are followed by one that only they prefer.
"""

from collections.abc import Iterator

import numpy as np

from howdah.base.errors import UserError, shown
from howdah.base.quantities import parse_quantity
from howdah.base.seeds import key, mix

PREFIX = "synthetic"
BYTES = 4_000_000
WORDS = 5000
DOCUMENT = 400  # words
LETTERS = "etaoinshrdlucmfwypvbgk"
MOST = 10**12  # bytes


def is_synthetic(path: str) -> bool:
    """Whether a source is made-up text."""
    return path.partition(":")[0] == PREFIX


def size_of(path: str) -> int:
    """The bytes that a source asks for. Raises UserError."""
    _, given, size = path.partition(":")
    if not given:
        return BYTES
    found = parse_quantity(size, "bytes", where=f"the size in {shown(path)}")
    if not 1000 <= found <= MOST:
        raise UserError(f"{shown(path)}: the size must be from 1 kB to 1 TB, such as synthetic:4MB")
    return int(found)


def documents(path: str) -> Iterator[str]:
    """Yields the documents of a source of made-up text. Raises UserError for a wrong size."""
    size, done, number = size_of(path), 0, 0
    words = [_word(rank) for rank in range(WORDS)]
    edges = np.cumsum(1 / np.arange(1, WORDS + 1))
    while done < size:
        draws = _draws(number)
        ranks = np.searchsorted(edges, draws[0] * edges[-1])
        text, before = [], 0
        for rank, chance in zip(ranks.tolist(), draws[1].tolist(), strict=True):
            before = (before * 31 + 7) % WORDS if chance < 0.5 else rank
            text.append(words[before])
        document = " ".join(text)[: size - done] + "\n"
        yield document
        done += len(document)
        number += 1


def _draws(document: int) -> np.ndarray:
    """Two rows of numbers in [0, 1) for the words of a document."""
    places = np.arange(2 * DOCUMENT, dtype=np.uint64)
    bits = mix(key(0, PREFIX, document), places) >> np.uint64(11)
    return np.asarray(bits * 2.0**-53).reshape(2, DOCUMENT)


def _word(rank: int) -> str:
    """The spelling of a word; frequent ones are short."""
    word, left = "", rank + 1
    while left:
        left, letter = divmod(left - 1, len(LETTERS))
        word += LETTERS[letter]
    return word
