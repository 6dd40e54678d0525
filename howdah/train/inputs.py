"""What a run reads besides its text, looked at before any text is encoded: tokenizer, prompt, and
initial weights. `howdah check` and `howdah train` ask the same questions.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers

from howdah.base.errors import UserError, named, shown
from howdah.base.files import kind_of
from howdah.base.named_code import name_problems
from howdah.base.their_words import otherwise
from howdah.checkpoint.folders import steps
from howdah.plan.method import Method
from howdah.shapes.shape import ModelShape
from howdah.text import tokenizer as tokenizers
from howdah.text.chats import chat_problems, settled
from howdah.text.masking import LACKING, NO_MASK, NO_PAIRS, NO_TASK, NO_TEXT
from howdah.text.sources import Data
from howdah.train.job import Training
from howdah.train.trackers import tracker_problems

WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)  # of a tokenizer that is trained here


def input_problems(
    data: Data, *, shape: ModelShape, prompt: str, init_from: Path | None, folder: Path
) -> list[str]:
    """A sentence for each input besides text that a run with the run folder `folder` cannot use.

    Weights of `init_from` are left out where the folder has a checkpoint, which is resumed instead.
    Only their headers are read; torch is loaded for that alone.
    """
    problems = [*_told(lambda: _check_prompt(settled(data), shape, prompt))]
    if (
        shape.family == "encoder"
        and data.mask_token is None
        and not (shape.labels or data.labelled)
    ):
        problems.append(LACKING)
    if shape.family == "decoder" and data.mask_token is not None:
        problems.append(NO_TASK)
    if shape.family == "encoder-decoder" and data.mask_token is not None:
        problems.append(NO_MASK)
    if shape.family != "encoder-decoder" and data.paired:
        problems.append(NO_PAIRS)
    problems += chat_problems(data, shape.family)
    if init_from is not None and not steps(folder / "checkpoints"):
        from howdah.train.resume import read_folder

        problems += _told(lambda: read_folder(init_from, shape))
        problems += [
            one for one in _told(lambda: _check_tokens(init_from, data)) if one not in problems
        ]
    return problems


def code_problems(train: Training, method: Method, *, ranks: int) -> Iterator[str]:
    """Yields why the user's own functions, and trackers, cannot be used, without running them."""
    for name in train.callbacks:
        yield from name_problems("train.callbacks", name, ranks=ranks)
    if method.loss and (declined := otherwise(method.loss)):
        yield f"method.loss {shown(method.loss)}: {declined}"
    elif method.loss:
        yield from name_problems("method.loss", method.loss, ranks=ranks)
    if train.callbacks and method.sync:
        yield (
            "train.callbacks are called when all ranks have done a step, and under method.sync "
            "workers have steps of their own; leave one of the two out"
        )
    yield from tracker_problems(train.tracker)


def _told(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except UserError as problem:
        yield str(problem)


def _check_prompt(data: Data, shape: ModelShape, prompt: str) -> None:
    """Raises UserError for a tokenizer that cannot be used, or a prompt that is too long."""
    tokenizer = None
    if prompt and not shape.causal:
        raise UserError(f"train.prompt is to be continued, and {NO_TEXT}; leave it out")
    if prompt and shape.labels:
        raise UserError(
            "train.prompt is to be continued, and a model with labels writes no text; leave it out"
        )
    if prompt and shape.family == "encoder-decoder":
        raise UserError(
            "train.prompt is to be continued, and an encoder-decoder writes what belongs to a "
            "source; leave it out"
        )
    if data.mask_token is not None:
        tokenizers.require_mask(data.mask_token, data.end_token)
    if data.tokenizer is None:
        extra = tokenizers.extra_tokens(shape)
        special = tokenizers.special_tokens(data.mask_token, extra)
        tokenizers.require_room(shape.vocab, special)
    else:
        tokenizer = tokenizers.usable(data.tokenizer, shape.vocab, data.end_token)
        if shape.family == "encoder-decoder":
            tokenizers.start_of(tokenizer, data.tokenizer)
            if not data.paired:
                tokenizers.sentinels_of(tokenizer, data.tokenizer)
        if data.mask_token is not None:
            tokenizers.mask_of(tokenizer, data.tokenizer, data.mask_token)
            end = tokenizers.end_of(tokenizer, data.tokenizer, data.end_token)
            tokenizers.require_mask(data.mask_token, tokenizer.id_to_token(end))
    require_prompt(prompt, tokenizer, context=shape.context)


def _check_tokens(weights: Path, data: Data) -> None:
    """Raises UserError when the folder `weights` has another tokenizer than `data` names: each row
    of its embedding would stand for another token.
    """
    theirs = weights / tokenizers.FILE
    if data.tokenizer is None or kind_of(theirs) != "file":
        return
    mine = tokenizers.find(data.tokenizer)
    if mine.samefile(theirs):
        return
    if tokenizers.load(theirs).get_vocab() != tokenizers.load(mine).get_vocab():
        raise UserError(
            f"init_from: {named(weights)} has another tokenizer than data.tokenizer names; leave "
            "data.tokenizer out, and that of the folder is used"
        )


def text_of(data: Data, weights: Path | None) -> Data:
    """The text of a run that starts from the folder `weights`: without a tokenizer of its own, with
    that of the folder.
    """
    if weights is None or data.tokenizer is not None or kind_of(weights) != "folder":
        return data
    return replace(data, tokenizer=str(weights.absolute()))


def lacking_tokenizer(data: Data, weights: Path | None) -> Iterator[str]:
    """Yields a sentence if a run starts from a folder of weights without a tokenizer."""
    if weights is None or data.tokenizer is not None or kind_of(weights) != "folder":
        return
    if kind_of(weights / "tokenizer.json") != "file":
        yield (
            f"init_from: {named(weights)} has no tokenizer.json, and with other tokens than the "
            "model's its embedding is useless; name the model's tokenizer in data.tokenizer"
        )


def require_prompt(prompt: str, tokenizer: Tokenizer | None, *, context: int) -> None:
    """Raises UserError when a prompt is longer than a model's `context`, in tokens.

    tokenizer  None: it is trained later. Then words are counted, for no token of it has two
    """
    if not prompt:
        return
    if tokenizer:
        least, count = "", len(tokenizers.prompt_ids(tokenizer, prompt, 0))
    else:
        least, count = "at least ", 1 + len(WORDS.pre_tokenize_str(prompt))
    if count > context:
        raise UserError(
            f"train.prompt has {least}{count} tokens, and the model's context is {context}: "
            "shorten it"
        )
