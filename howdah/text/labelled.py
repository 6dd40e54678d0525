"""Rows of a text and its label, for a model that tells texts apart.

    {"text": "fine, and cheap", "label": "good"}      or columns of CSV, TSV, Parquet, a dataset

A label is a name or a whole number; it is kept as a text. `labels.py` lists those of a run's rows.

    stored    <end> 1 [CLS] fine , and cheap [SEP] <end> 0 …    in front of each text its label
    row       [CLS] fine , and cheap [SEP] <end> <end>          cut and padded as transformers does
    label       1    -   -  -    -     -     -     -            of an encoder: at the first token
                -    -   -  -    -     1     -     -            of a decoder: at the last

So a text has one label, at the token whose state stands for all of it, and its loss is that of one
token. All other states are made and not used, which in the head takes h² operations of the 12·h²
that every block has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from howdah.base.errors import UserError, nearest, shown
from howdah.shapes.shape import ModelShape
from howdah.text.order import Numbers
from howdah.text.readers import Bad
from howdah.text.records import PAIR, Record, text_field
from howdah.text.tokenizer import END, PADS


@dataclass(frozen=True)
class Labelled:
    """Takes a text and its label, with `PAIR` between them.

    field, label  the names of the fields
    """

    field: str
    label: str
    others: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        return self.field, self.label

    @property
    def says(self) -> str:
        return f"the fields {shown(self.field)} and {shown(self.label)}"

    def __call__(self, record: Record, where: str, bad: Bad) -> Iterator[str]:
        """Yields the text and its label, unless the text is empty or holds `PAIR`. Raises UserError
        for a row without a label.
        """
        label = label_of(record, where, self.label)
        for text in text_field(record, where, self.field, bad):
            if not text or PAIR in text:
                bad(f"{where}: {self.field} is empty, or holds the character {PAIR!r}")
            else:
                yield f"{text}{PAIR}{label}"


@dataclass(frozen=True)
class Places(Labelled):
    """Takes the label of a row and the place of that row, with `PAIR` between them."""

    def __call__(self, record: Record, where: str, bad: Bad) -> Iterator[str]:
        """Yields the label of a row and its place. Raises UserError for a row without a label."""
        for pair in super().__call__(record, where, bad):
            yield f"{pair.partition(PAIR)[2]}{PAIR}{where}"


def label_of(record: Record, where: str, field: str) -> str:
    """The label of the record at `where`. Raises UserError unless it is a name or a whole number.

    A whole number is its digits, and true and false are these words, as JSON writes them.
    """
    if field not in record:
        raise UserError(f"{where}: no field {shown(field)}{nearest(field, record)}")
    value = record[field]
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "":
        raise UserError(f"{where}: the field {shown(field)} is empty; each text must have a label")
    if not isinstance(value, str | int) or PAIR in str(value):
        raise UserError(
            f"{where}: the field {shown(field)} is {shown(value)}; a label is a name or a whole "
            "number"
        )
    return str(value)


@dataclass(frozen=True)
class Labels:
    """What a run tells its texts apart in.

    names     of the labels; the place of a label is its number
    template  what a tokenizer that is trained here puts around the tokens of a text, "$A"
    """

    names: tuple[str, ...]
    template: tuple[str, ...]


def labels_of(shape: ModelShape) -> Labels | None:
    """The labels of a model; None of a language model. An encoder looks at the first token of a
    text, and BERT's and RoBERTa's tokenizers put one before it and one behind; of a decoder the
    last token has seen all others.
    """
    if not shape.labels:
        return None
    return Labels(shape.labels, (END, "$A") if shape.causal else (END, "$A", END))


class Frame(NamedTuple):
    """What a row of a text with a label is made by.

    tail  tokens that the tokenizer puts behind a text, which stay where the text is cut
    pad   the token that is not looked at for the last of a text: transformers' padding
    """

    tail: int
    pad: int


def frame_of(tokenizer: Tokenizer, end: int) -> Frame:
    """The frame of a tokenizer's texts. Padding is its own token for that, or else `end`."""
    special = tokenizer.encode("a", add_special_tokens=True).special_tokens_mask
    tail = len(special) - max((at + 1 for at, one in enumerate(special) if not one), default=0)
    pads = (tokenizer.token_to_id(name) for name in PADS)
    return Frame(tail, next((one for one in pads if one is not None), end))


def row_of(stored: Numbers, frame: Frame, most: int) -> tuple[Numbers, int, int]:
    """(tokens, number of the label, place of the last token) of a stored text, of which at most
    so many tokens are kept.
    """
    tokens = stored[1:]
    if len(tokens) > most:
        tail = min(frame.tail, most)
        tokens = np.concatenate([tokens[: most - tail], tokens[len(tokens) - tail :]])
    return tokens, int(stored[0]), last_seen(tokens.tolist(), frame.pad)


def last_seen(tokens: Sequence[int], pad: int | None) -> int:
    """The place of the last token of a text that is no padding; 0 if all are."""
    return max((place for place, token in enumerate(tokens) if token != pad), default=0)
