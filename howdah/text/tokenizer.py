"""Tokenizers: trained on the run's text, or loaded from a tokenizer.json.

A tokenizer trained here is byte-level BPE: text is a sequence of bytes, pairs that occur often
become vocabulary entries, and every byte has an entry of its own. So no text is unknown, and
decoding returns the text exactly (Sennrich et al. 2016, arXiv 1508.07909; over bytes: Radford et
al. 2019).

One special token is put before each document. Its id is looked up by name, never assumed, and no
text is encoded as it: the characters <|end|> in a document are encoded as ordinary characters.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from howdah.base.errors import UserError, brief, named, nearest, shown
from howdah.base.files import kind_of, read_file, read_text
from howdah.plan.method import SENTINELS
from howdah.shapes.shape import ModelShape
from howdah.text.interruptible import PANIC

END = "<|end|>"
ENDS = (
    *(END, "<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]"),
    "[SEP]",  # of BERT
)
PAD = "<|pad|>"
PADS = (PAD, "[PAD]", "<pad>")  # no text has it, and nothing is hidden by it
SENTINEL = "<extra_id_{}>"  # T5's name for what stands in the place of a span
MASKS = ("<|mask|>", "[MASK]", "<mask>")  # what hides others, in a tokenizer that has it
FILE = "tokenizer.json"
LARGEST = 128 << 20  # bytes; files of the largest vocabularies have 35 MB
LONG = 4096  # characters
RUNS = re.compile(rf"\S{{{LONG},}}|\s{{{LONG},}}")
CANNOT = "data.tokenizer: it cannot encode the text", "; choose another"


def train(
    texts: Iterable[str], vocab: int, mask: str | None = None, *, extra: Sequence[str] = ()
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer of at most `vocab` entries on `texts`; one of them is
    `mask`, if given.

    extra  tokens that no text has, from 1 on (`extra_tokens`)

    It has fewer entries when the text has no more pairs to merge.
    Raises UserError when `vocab` is too small for the 256 bytes and the special tokens.
    """
    special = special_tokens(mask, extra)
    require_room(vocab, special)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((part for text in texts for part in _parts(text)), trainer)
    return _plain(tokenizer)


def _parts(text: str) -> Iterator[str]:
    """A text, cut inside what has no blank for LONG characters: training takes time with the square
    of the length of a word (a genome of one megabyte took ten minutes).
    """
    began = 0
    for run in RUNS.finditer(text):
        for cut in range(run.start() + LONG, run.end(), LONG):
            yield text[began:cut]
            began = cut
    yield text[began:]


def special_tokens(mask: str | None, extra: Sequence[str]) -> list[str]:
    """The special tokens of a tokenizer that is trained here; their ids are their places."""
    return [END, *extra, *((mask,) if mask is not None else ())]


def extra_tokens(shape: ModelShape) -> tuple[str, ...]:
    """The tokens beside the end token that a model's tokenizer has: RoBERTa numbers positions past
    tokens of padding, and decoders behind an encoder begin with one and write sentinels.
    """
    if shape.family == "encoder-decoder":
        return PAD, *(SENTINEL.format(number) for number in range(SENTINELS))
    return (PAD,) if shape.first_position else ()


def start_of(tokenizer: Tokenizer, name: str) -> int:
    """The id of the token of padding, with which a decoder behind an encoder begins.

    Raises UserError, naming the tokenizer `name`, when the tokenizer does not have one.
    """
    for pad in PADS:
        if (token := tokenizer.token_to_id(pad)) is not None:
            return int(token)
    raise UserError(
        f"data.tokenizer: {name} has no token of padding, with which the decoder of an "
        f"encoder-decoder begins; add one of {', '.join(PADS)}"
    )


def sentinels_of(tokenizer: Tokenizer, name: str) -> tuple[int, ...]:
    """The ids of the tokens that stand for spans: <extra_id_0> and so on.

    Raises UserError, naming the tokenizer `name`, when the tokenizer has none.
    """
    known: list[int] = []
    for number in range(SENTINELS):
        if (token := tokenizer.token_to_id(SENTINEL.format(number))) is None:
            break
        known.append(token)
    if not known:
        raise UserError(
            f"data.tokenizer: {name} has no {SENTINEL.format(0)}, which stands for a span that is "
            "left out; use the tokenizer of a T5, or none, and one is trained here"
        )
    return tuple(known)


def require_room(vocab: int, special: Sequence[str] = (END,)) -> None:
    """Raises UserError when `vocab` is too small for the 256 bytes and the special tokens."""
    if vocab < (least := 256 + len(special)):
        raise UserError(
            f"model.vocab is {vocab}, but 256 bytes and {_listed(special)} need {least} "
            f"entries; make it at least {least}"
        )


def _listed(special: Sequence[str]) -> str:
    several = f"{len(special)} special tokens, {special[0]} to {special[-1]},"
    return " and ".join(special) if len(special) < 5 else several


def require_mask(mask: str, end: str | None) -> None:
    """Raises UserError for a mask token that a text could hold, or that means something else."""
    if len(mask) < 2:
        what = "one character, which a text can hold" if mask else "empty"
    elif mask in (END, end, *PADS):
        what = "padding" if mask in PADS else "the token that ends a document"
    else:
        return
    raise UserError(
        f"data.mask_token is {shown(mask)}, {what}; name a token of its own, such as {MASKS[0]}"
    )


def find(name: str) -> Path:
    """The path of the tokenizer.json; `name` is that file or its folder.

    Raises UserError when there is no such file.
    """
    path = Path(name) / FILE if kind_of(Path(name)) == "folder" else Path(name)
    if (kind := kind_of(path)) != "file":
        kind = "is a folder" if kind == "folder" else kind
        raise UserError(f"data.tokenizer: {named(path)} {kind}; name a {FILE} or its folder")
    return path


def load(path: Path) -> Tokenizer:
    """Loads a tokenizer.json, set to encode plain text.

    Raises UserError when the file is not a tokenizer.
    """
    with in_words(f"data.tokenizer: {path} is not a tokenizer"):
        return _plain(Tokenizer.from_str(read_text(path, LARGEST)))


def usable(name: str, vocab: int, end: str | None) -> Tokenizer:
    """Loads the tokenizer that `data.tokenizer` names. Raises UserError when it is too large for
    `vocab`, or has no end token (`end_of`).
    """
    tokenizer = load(path := find(name))
    require_fits(entries(tokenizer), vocab, str(path))
    end_of(tokenizer, str(path), end)
    return tokenizer


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Turns off truncation and padding; text that looks like a special token is encoded as text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def frame(tokenizer: Tokenizer, template: Sequence[str]) -> None:
    """Makes a tokenizer put special tokens around the tokens of a text, "$A"."""
    special = [(one, tokenizer.token_to_id(one)) for one in {*template} - {"$A"}]
    tokenizer.post_processor = TemplateProcessing(single=[*template], special_tokens=special)


def require_numbers(labels: int, entries: int) -> None:
    """Raises UserError for more labels than tokens: numbers of labels are stored as tokens are."""
    if labels > entries:
        raise UserError(
            f"there are {labels} labels, and the tokenizer has {entries} entries; use a larger one"
        )


@contextmanager
def in_words(fault: str, remedy: str = "") -> Iterator[None]:
    """The library's errors as a UserError: bare Exceptions, and panics, which are none. One of its
    threads is no fault of a file, and is raised (`text/interruptible.py`).
    """
    try:
        yield
    except BaseException as error:
        panics = type(error).__name__ == PANIC and "ThreadPool" not in str(error)
        if not (isinstance(error, Exception) or panics):
            raise
        raise UserError(f"{fault} ({brief(error)}){remedy}") from error


def encode(tokenizer: Tokenizer, texts: list[str], *, special: bool = False) -> list[Encoding]:
    """Encodes whole documents, without the special tokens that a chat model adds around them,
    unless these are asked for.

    Raises UserError when the tokenizer has no entry for a text and no "unknown" token either.
    """
    with in_words(*CANNOT):
        return list(tokenizer.encode_batch_fast(texts, add_special_tokens=special))


def encode_one(tokenizer: Tokenizer, text: str, *, special: bool = False) -> Encoding:
    """Encodes a text, here and not on other threads. Raises UserError as `encode` does."""
    with in_words(*CANNOT):
        return tokenizer.encode(text, add_special_tokens=special)


def prompt_ids(tokenizer: Tokenizer, prompt: str, end: int) -> list[int]:
    """The token ids of a prompt, with `end` in front, as before each document in training.

    Raises UserError when the prompt is not UTF-8, or cannot be encoded.
    """
    return [end, *encode_one(tokenizer, as_utf8(prompt)).ids]


def as_utf8(words: str) -> str:
    """Decodes a command-line argument as UTF-8. Where the system's encoding is ASCII, Python
    represents other bytes as surrogates, which no tokenizer accepts.

    Raises UserError when the bytes are not UTF-8.
    """
    try:
        return words.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UserError("the prompt is not UTF-8; write it in a terminal whose text is") from None


def end_of(tokenizer: Tokenizer, name: str, wanted: str | None = None) -> int:
    """The id of the end token, which is put between documents: `wanted`, or the first of `ENDS`.

    Raises UserError, naming the tokenizer `name`, when the tokenizer does not have it.
    """
    for end in (wanted,) if wanted else ENDS:
        if (token := tokenizer.token_to_id(end)) is not None:
            return int(token)
    added = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())
    if wanted:
        raise UserError(
            f"data.end_token is {shown(wanted)}, which {name} does not have{nearest(wanted, added)}"
        )
    raise UserError(
        f"data.tokenizer: {name} has no token that ends a document; name one of its tokens in "
        f"data.end_token, or add one of {', '.join(ENDS)}"
    )


def mask_of(tokenizer: Tokenizer, name: str, wanted: str) -> int:
    """The id of the mask token `wanted`.

    Raises UserError, naming the tokenizer `name`, when the tokenizer does not have it.
    """
    if (token := tokenizer.token_to_id(wanted)) is None:
        added = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())
        raise UserError(
            f"data.mask_token is {shown(wanted)}, which {name} does not have"
            f"{nearest(wanted, added)}"
        )
    return int(token)


def entries(tokenizer: Tokenizer) -> int:
    """The number of embedding rows needed: the largest id plus one (ids may have gaps)."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def require_fits(needed: int, vocab: int, name: str) -> None:
    """Raises UserError when a tokenizer of `needed` entries is larger than the model's `vocab`."""
    if needed > vocab:
        raise UserError(
            f"data.tokenizer: {name} has {needed} entries but model.vocab is {vocab}; "
            f"set model.vocab to {needed} or more"
        )


def fingerprint(path: Path) -> str:
    """A hash of the tokenizer file: runs with different hashes have different tokens.

    Raises UserError when the file cannot be read.
    """
    try:
        return blake2b(read_file(path, LARGEST), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from error
