"""Tokenizers: trained here, or brought along as a tokenizer.json.

The one trained here is byte-level BPE: text is bytes, pairs that occur often become entries, and
every byte has an entry of its own, so that nothing is unknown and decoding gives back the text
exactly (Sennrich et al. 2016, arXiv 1508.07909; over bytes: Radford et al. 2019).

One special token stands before each document. It is looked up by name, never assumed to have a
number, and no text can spell it: a document that contains the characters <|end|> is encoded as
those characters.
"""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from howdah.base.errors import UserError, brief, named
from howdah.base.files import kind_of, read_file, read_text

END = "<|end|>"
ENDS = (END, "<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<eos>", "[EOS]")
SMALLEST = 256 + 1  # the bytes and the end
FILE = "tokenizer.json"
LARGEST = 128 << 20  # bytes; the largest vocabularies have 35 MB


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """A byte-level BPE tokenizer of at most `vocab` entries; fewer when the text has no more pairs.

    Raises UserError when `vocab` has no room for the bytes.
    """
    require_room(vocab)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _plain(tokenizer)


def require_room(vocab: int) -> None:
    """Raises UserError when a tokenizer of `vocab` entries has no room for the bytes."""
    if vocab < SMALLEST:
        raise UserError(
            f"model.vocab is {vocab}, but 256 bytes and {END} need {SMALLEST} entries; "
            f"make it at least {SMALLEST}"
        )


def find(name: str) -> Path:
    """The tokenizer.json that `name`, a file or a folder, stands for. Raises UserError."""
    path = Path(name) / FILE if kind_of(Path(name)) == "folder" else Path(name)
    if (kind := kind_of(path)) != "file":
        kind = "is a folder" if kind == "folder" else kind
        raise UserError(f"data.tokenizer: {named(path)} {kind}; name a {FILE} or its folder")
    return path


def load(path: Path) -> Tokenizer:
    """The tokenizer in a file, set to encode plain text. Raises UserError if it is none."""
    try:
        return _plain(Tokenizer.from_str(read_text(path, LARGEST)))
    except Exception as error:  # the library raises bare Exception for a file it cannot use
        raise UserError(f"data.tokenizer: {path} is not a tokenizer ({brief(error)})") from error


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """Whole documents in, and text that looks like a special token stays text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[Encoding]:
    """Whole documents, without the tokens that a chat model would add around them.

    Raises UserError where the tokenizer has no entry for a text, not even one for what is unknown.
    """
    try:
        return list(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    except Exception as error:  # as above
        raise UserError(
            f"data.tokenizer: it cannot encode the text ({brief(error)}); choose another"
        ) from error


def prompt_ids(tokenizer: Tokenizer, prompt: str, end: int) -> list[int]:
    """What a model goes on from: `end` stands before the prompt, as before each document in
    training. Raises UserError for what is not UTF-8.
    """
    return [end, *tokenizer.encode(_as_utf8(prompt), add_special_tokens=False).ids]


def _as_utf8(words: str) -> str:
    """Words of the command line as text. Where the system's encoding is ASCII, Python hides the
    bytes that are not in surrogates, which no tokenizer takes. Raises UserError for other bytes.
    """
    try:
        return words.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise UserError("the prompt is not UTF-8; write it in a terminal whose text is") from None


def end_of(tokenizer: Tokenizer, name: str) -> int:
    """The id of the token that stands between documents. Raises UserError if there is none."""
    for end in ENDS:
        if (token := tokenizer.token_to_id(end)) is not None:
            return int(token)
    raise UserError(
        f"data.tokenizer: {name} has no token that ends a document; add one of {', '.join(ENDS)}"
    )


def entries(tokenizer: Tokenizer) -> int:
    """One more than the largest id: what an embedding must have rows for. Ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def require_fits(needed: int, vocab: int, name: str) -> None:
    """Raises UserError when a tokenizer of `needed` entries is larger than the model's `vocab`."""
    if needed > vocab:
        raise UserError(
            f"data.tokenizer: {name} has {needed} entries but model.vocab is {vocab}; "
            f"set model.vocab to {needed} or more"
        )


def fingerprint(path: Path) -> str:
    """A hash of the file: runs that differ in it have different tokens."""
    try:
        return blake2b(read_file(path, LARGEST), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path}: {error.strerror}") from error
