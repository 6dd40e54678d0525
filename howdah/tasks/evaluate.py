"""What a decoder scores on a task.

    perplexity        exp of the mean loss, per token and per word; bits per byte
    last-word         acc: each token of the last word was the likeliest; perplexity of the word
    multiple-choice   acc: the right choice was the likeliest; acc_norm: the likeliest when each is
                      divided by its characters, or long choices would lose

The numbers are those that lm-evaluation-harness gives by these names, where it is told to put the
same token in front. A question and a choice are tokenised together, and spaces at the end of the
question belong to the choice: so tokens are those of the whole text.

A text that is longer than the context is scored in windows. Each token is scored once; the last
window reaches back, so that it is full, too:

    text      t t t t t t t t t t t      context 4
    windows   0 0 0 0 1 1 1 1 2 2 2      window 2 also reads one token of window 1
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

from howdah.base.errors import UserError
from howdah.generate.likelihood import Asked, Likelihood, likelihoods
from howdah.generate.predictor import require_decoder
from howdah.model.transformer import Transformer
from howdah.tasks.opened import OpenedModel
from howdah.tasks.task_file import Question, Task


@dataclass(frozen=True)
class Scores:
    """The result of a task.

    values  by name
    errors  standard errors of those that are means of right and wrong
    """

    kind: str
    samples: int
    values: dict[str, float]
    errors: dict[str, float]


def evaluate_task(
    opened: OpenedModel, model: Transformer, task: Task, asked: Sequence[Question]
) -> Scores:
    """The scores of a model on the questions of a task. Raises UserError."""
    require_decoder(opened.shape)
    if task.kind == "perplexity":
        return Scores(task.kind, len(asked), _of_texts(opened, model, asked), {})
    cut = task.too_long == "cut"
    rows = [
        _pair(opened, task, question, choice, cut=cut)
        for question in asked
        for choice in question.choices
    ]
    found = iter(likelihoods(model, rows))
    by_question = [[next(found) for _ in question.choices] for question in asked]
    if task.kind == "last-word":
        flat = [one for (one,) in by_question]
        mean = sum(one.log_prob for one in flat) / len(flat)
        hits = {"acc": [one.greedy for one in flat]}
        return _means(task, hits, {"perplexity": _exp(-mean)})
    return _means(task, _choices(asked, by_question), {})


def _choices(
    asked: Sequence[Question], found: Sequence[Sequence[Likelihood]]
) -> dict[str, list[bool]]:
    """Whether the right choice of each question was the likeliest."""
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for question, each in zip(asked, found, strict=True):
        sums = [one.log_prob for one in each]
        per_letter = [x / len(text) for x, text in zip(sums, question.choices, strict=True)]
        for name, scores in (("acc", sums), ("acc_norm", per_letter)):
            hits[name].append(max(range(len(scores)), key=scores.__getitem__) == question.answer)
    return hits


def _means(task: Task, hits: dict[str, list[bool]], more: dict[str, float]) -> Scores:
    values, errors, count = {}, {}, 0
    for name, found in hits.items():
        count, share = len(found), sum(found) / len(found)
        values[name] = share
        errors[name] = (share * (1 - share) / max(count - 1, 1)) ** 0.5
    return Scores(task.kind, count, values | more, errors)


def _pair(opened: OpenedModel, task: Task, of: Question, choice: str, *, cut: bool) -> Asked:
    """The tokens of a question and one choice. Raises UserError when they are too many."""
    text = of.context.rstrip()
    behind = of.context[len(text) :] + (task.separator if task.kind == "multiple-choice" else "")
    front = opened.plain(text)
    wanted = opened.plain(text + behind + choice)[len(front) :]
    begin = [_begin(opened)] if task.begin or not front else []
    context, most = [*begin, *front], opened.shape.context
    if not wanted:
        raise UserError(f"{of.where}: a choice has no token of its own behind the question")
    over = len(context) + len(wanted) - 1 - most
    if over > 0 and not cut:
        raise UserError(
            f"{of.where}: question and choice have {most + over} tokens, and the model's context "
            f'is {most}; shorten it, or write too_long = "cut" in the task file'
        )
    kept = context[over:] if over > 0 else context
    if not kept:
        raise UserError(f"{of.where}: the choice alone has {len(wanted)} tokens; shorten it")
    return Asked(tuple(kept), tuple(wanted))


def _begin(opened: OpenedModel) -> int:
    if opened.begin is None:
        raise UserError(
            f"{opened.folder}: tokenizer_config.json names no bos_token and no eos_token, and a "
            "text without a token before it cannot be scored; name one of them there"
        )
    return opened.begin


# -- whole texts ---------------------------------------------------------------


def windows(tokens: Sequence[int], begin: int, context: int) -> Iterator[Asked]:
    """Yields what is asked of a text so that each token is scored once."""
    whole = (begin, *tokens)  # whole[n] is read before tokens[n] is scored
    for first in range(0, len(tokens), context):
        stop = min(first + context, len(tokens))
        start = max(stop - context, 0)
        yield Asked(whole[start : first + 1], tuple(tokens[first:stop]))


def _of_texts(
    opened: OpenedModel, model: Transformer, asked: Sequence[Question]
) -> dict[str, float]:
    texts = [question.choices[0] for question in asked]
    begin, rows = _begin(opened), list[Asked]()
    for text in texts:
        rows += windows(opened.plain(text), begin, opened.shape.context)
    total = -sum(one.log_prob for one in likelihoods(model, rows))
    tokens = sum(len(one.wanted) for one in rows)
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    size = sum(len(text.encode()) for text in texts)
    return {
        "loss": total / tokens,
        "perplexity": _exp(total / tokens),
        "word_perplexity": _exp(total / words),
        "bits_per_byte": total / size / log(2),
    }


def _exp(x: float) -> float:
    return exp(min(x, 700.0))
